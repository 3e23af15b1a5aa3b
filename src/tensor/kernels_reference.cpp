// Plain loops in f32, f64 and bf16, one thread, no vendor library: the yardstick against which every faster
// kernel and every mesh is measured. Passes over rows and elements are those of tensor/rows/, which devices
// run too, here with one lane. Sums run in index order in F = Wide<T>, the type of the computation for
// numbers stored as T, so a rerun agrees to the last bit; T(...) is where an output is rounded. What
// kernels.h says is accumulated ("+=") is first summed separately and then added once: the sum of one
// microbatch does not depend on what the output held before.
#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/halving_tree.h"
#include "tensor/attention_reference.h"
#include "tensor/kernels_host.h"
#include "tensor/reference_view.h"
#include "tensor/row_kernels.h"

namespace echelon {
namespace {

// op(b) is copied in panels of a few columns, so that the inner loop is contiguous for all transposes, and
// one order of summation (k ascending) serves all four cases.
template <class F, class A, class B, class C>
void matmul_of(const rows::Matrix<A>& a, bool a_transposed, const rows::Matrix<B>& b, bool b_transposed,
               const rows::Matrix<C>& c, bool accumulate, const SumBlocks& blocks) {
  constexpr std::int64_t width = 16;  // as many running sums as fit in registers
  const std::int64_t m = c.rows, n = c.cols, depth = a_transposed ? a.rows : a.cols;
  const SumBlocks whole{{{0, depth}}}, &all = blocks.empty() ? whole : blocks;
  std::vector<std::array<F, width>> sums(static_cast<std::size_t>(most_waiting(std::ssize(all)) + 1));
  std::vector<F> panel(static_cast<std::size_t>(depth * width));
  for (std::int64_t begin = 0; begin < n; begin += width) {
    const std::int64_t used = std::min(width, n - begin);
    for (std::int64_t k = 0; k < depth; ++k)
      for (std::int64_t j = 0; j < used; ++j)
        panel[static_cast<std::size_t>(k * width + j)] = b_transposed ? b[begin + j][k] : b[k][begin + j];
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t block = 0; block < std::ssize(all); ++block) {
        const TreePlace place = tree_place(std::ssize(all), block);
        auto at = static_cast<std::size_t>(place.waiting);
        std::array<F, width> sum{};
        for (const Range& range : all[static_cast<std::size_t>(block)])
          for (std::int64_t k = range.begin; k < range.end; ++k) {
            const F factor = a_transposed ? a[k][i] : a[i][k];
            const F* line = panel.data() + k * width;
            for (std::size_t j = 0; j < width; ++j) sum[j] += factor * line[j];
          }
        sums[at] = sum;
        for (int merge = 0; merge < place.merges; ++merge, --at)
          for (std::size_t j = 0; j < width; ++j) sums[at - 1][j] += sums[at][j];
      }
      const std::array<F, width>& sum = sums.front();
      for (std::int64_t j = 0; j < used; ++j) {
        C& out = c[i][begin + j];
        const F product = sum[static_cast<std::size_t>(j)];
        out = C(accumulate ? out + product : product);
      }
    }
  }
}

class ReferenceKernels final : public RowKernels<HostLaunch, HostBackend> {
 public:
  void matmul(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, Out c, bool accumulate) override {
    multiply({a, ta, b, tb, c, accumulate});
  }

  void grouped_matmul(std::span<const MatrixProduct> products) override {
    for (const MatrixProduct& p : products) multiply(p);
  }

  bool all_finite(const Tensor& tx) override {
    bool finite = true;
    with_stored_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx);
      for (std::int64_t i = 0; i < x.rows && finite; ++i)
        finite = std::all_of(x[i], x[i] + x.cols, [](Wide<T> value) { return std::isfinite(value); });
    });
    return finite;
  }

  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape, Out out,
                 Out lse) override {
    with_stored_type(out, [&]<class T>(T) { reference_attention<T>(q, k, v, shape, out, lse); });
  }

  void attention_delta(const Tensor& out, const Tensor& dout, const AttentionShape& shape,
                       Out delta) override {
    with_stored_type(out, [&]<class T>(T) { reference_attention_delta<T>(out, dout, shape, delta); });
  }

  void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                          const Tensor& lse, const Tensor& delta, const AttentionShape& shape, Out dq, Out dk,
                          Out dv) override {
    with_stored_type(dout, [&]<class T>(T) {
      reference_attention_backward<T>(q, k, v, dout, lse, delta, shape, dq, dk, dv);
    });
  }

 private:
  void multiply(const MatrixProduct& p) {
    with_pair(p.a, p.b, [&]<class A, class B>(const rows::Matrix<A>& left, const rows::Matrix<B>& right) {
      with_stored_type(p.c, [&]<class C>(C) {
        using F = Wide<C>;
        if constexpr (std::is_same_v<Wide<A>, F>)
          matmul_of<F>(left, p.ta == Transpose::yes, right, p.tb == Transpose::yes, Matrix<C>(p.c),
                       p.accumulate, p.blocks);
      });
    });
  }
};

}  // namespace

std::unique_ptr<Kernels> make_reference_kernels() {
  return std::make_unique<Kernels>(std::make_shared<ReferenceKernels>());
}

}  // namespace echelon
