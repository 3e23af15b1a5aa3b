// Y = gelu(X A) B on two ranks: A cut by columns, B by rows, one all_reduce at the end, and the same result
// as one rank.
#include <fmt/core.h>

#include <cmath>

#include "parallel/tensor_parallel.h"

using namespace echelon;

namespace {

constexpr std::int64_t tokens = 4, width = 6, hidden = 8;

// Element (i, j) of the logical matrix `which`: every rank can fill its own part of it.
double element(int which, std::int64_t i, std::int64_t j) {
  return std::sin(static_cast<double>(100 * which + 10 * i + j));
}

// Rows [0, rows) and columns [first, first + cols) of that matrix.
Tensor part(const Rank& rank, int which, std::int64_t rows, std::int64_t cols, std::int64_t first_row,
            std::int64_t first_col) {
  const Tensor t = rank.activation({rows, cols});
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < cols; ++j)
      t.host<double>()[i * cols + j] = element(which, first_row + i, first_col + j);
  return t;
}

double first_element_on(int tp) {
  double result = 0;
  Mesh mesh;
  mesh.set(Axis::tp, tp);
  ThreadWorld world(tp, std::chrono::seconds(10));
  run_ranks(world, [&](int index) {
    Arena arena;
    const auto kernels = make_reference_kernels();
    const Rank rank(world, mesh, index, DType::f64, arena, *kernels);
    const TensorParallel tensor_parallel(rank, /*sequence_parallel=*/false);
    const Range mine = split_range(hidden, tp, index);
    const Tensor x =
        tensor_parallel.enter(part(rank, 0, tokens, width, 0, 0), tokens).get();  // I -> R: nothing travels
    const Tensor a = part(rank, 1, width, mine.size(), 0, mine.begin),
                 b = part(rank, 2, mine.size(), width, mine.begin, 0);
    const Tensor h = rank.activation({tokens, mine.size()}), y = rank.activation({tokens, width});
    kernels->matmul(x, Transpose::no, a, Transpose::no, h, false);
    kernels->activate(Activation::gelu, h, {}, h);
    kernels->matmul(h, Transpose::no, b, Transpose::no, y, false);
    const Tensor whole = tensor_parallel.leave(y, tokens).get();  // P -> I: one all_reduce
    if (index == 0) result = whole.host<double>()[0];
  });
  return result;
}

}  // namespace

int main() {
  const double one = first_element_on(1), two = first_element_on(2);
  fmt::print("one rank {:.15f}\ntwo ranks {:.15f}\n", one, two);
  return std::abs(one - two) < 1e-14 ? 0 : 1;
}
