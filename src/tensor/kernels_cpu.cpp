// The fast kernels of one rank: oneDNN products, SIMD passes, a team of threads; f32 and bf16. T is the
// stored type; computation is in f32. The terms of each element of a result, and the order in which they are
// added, depend only on shapes, never on the number of threads.
#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/split.h"
#include "tensor/attention_cpu.h"
#include "tensor/flush_subnormals.h"
#include "tensor/kernels_host.h"
#include "tensor/matmul.h"
#include "tensor/reference_view.h"
#include "tensor/rope_angles.h"
#include "tensor/rows/activations.h"
#include "tensor/rows/elements.h"
#include "tensor/rows/short_convolution.h"
#include "tensor/rows/sinks.h"
#include "tensor/simd.h"
#include "tensor/thread_team.h"
#include "tensor/updates_cpu.h"

namespace echelon {
namespace {

// Column sums: groups of rows that are summed side by side, and columns of one strip.
constexpr std::int64_t most_groups = 32, strip = 2048;
constexpr std::int64_t column_sums_size = most_groups * 2 * strip;

template <class T>
bool contiguous(const Matrix<T>& x) {
  return x.stride == x.cols || x.rows <= 1;
}

// Calls body(float{}) or body(bf16{}) for the tensor's dtype.
template <class Body>
void with_type(const Tensor& t, const Body& body) {
  if (t.dtype() == DType::f32) return body(float{});
  if (t.dtype() == DType::bf16) return body(bf16{});
  throw InvariantError(fmt::format("internal error: the CPU kernels compute in f32 and bf16, not in {}",
                                   dtype_name(t.dtype())));
}

Panel panel_of(const Tensor& t) {
  Panel panel;
  with_type(t, [&]<class T>(T) {
    const Matrix<T> x(t);
    panel = {x.data, x.stride, t.dtype()};
  });
  return panel;
}
ConstPanel operand_of(const Tensor& t) {
  const Panel x = panel_of(t);
  return {x.data, x.stride, x.type};
}

Product product_of(const MatrixProduct& p) {
  return {.ta = p.ta,
          .tb = p.tb,
          .m = p.c.rows(),
          .n = p.c.cols(),
          .k = p.ta == Transpose::yes ? p.a.rows() : p.a.cols(),
          .a = operand_of(p.a),
          .b = operand_of(p.b),
          .beta = p.accumulate ? 1.0f : 0.0f,
          .c = panel_of(p.c),
          .blocks = p.blocks.empty() ? nullptr : &p.blocks};
}

// For all channels: the tap of a row itself, of the row before it, ...
template <class T>
std::vector<float> taps_by_position(const Tensor& w) {
  const Matrix<T> of_channels(w);
  const std::int64_t width = of_channels.rows, positions = of_channels.cols;
  std::vector<float> taps(static_cast<std::size_t>(width * positions));
  for (std::int64_t c = 0; c < width; ++c)
    for (std::int64_t k = 0; k < positions; ++k)
      taps[static_cast<std::size_t>(k * width + c)] = float{of_channels[c][positions - 1 - k]};
  return taps;
}
template <class T>
ConvolvedRow<T> convolved_row(const rows::GatedChannels<T>& at, const float* taps, std::int64_t positions,
                              std::int64_t i) {
  const std::int64_t there = at.sequences.position(i) - at.sequences.start(i) + 1;
  return {at.given[i], at.given.stride, at.width, taps, std::min(positions, there)};
}

// Of a team, besides the one that made it.
void begin_thread() {
  keep_products_to_their_thread();
  [[maybe_unused]] static thread_local const FlushSubnormals until_it_ends;
}

class CpuKernels final : public HostBackend {
 public:
  CpuKernels(Arena& arena, DType dtype, int threads, Numerics numerics)
      : dtype_(dtype),
        numerics_(numerics),
        team_(threads, begin_thread),
        scratch_(arena, MemoryCategory::other, DType::u8, {threads * attention_scratch_bytes(dtype)}),
        column_sums_(arena, MemoryCategory::other, DType::f32, {column_sums_size}) {
    check(threads >= 1, "CPU kernels need at least one thread");
    keep_products_to_their_thread();
    prepare_products();
  }

  const ThreadTeam& team() const override { return team_; }

  void matmul(const Tensor& ta, Transpose turn_a, const Tensor& tb, Transpose turn_b, Out tc,
              bool accumulate) override {
    const MatrixProduct product{ta, turn_a, tb, turn_b, tc, accumulate};
    grouped_matmul({&product, 1});
  }

  void grouped_matmul(std::span<const MatrixProduct> products) override {
    std::vector<Product> list;
    std::vector<SumBlocks> whole(products.size());  // unless blocks are given
    for (const MatrixProduct& p : products) {
      check(p.blocks.empty() || numerics_ == Numerics::invariant, "ordinary products have no blocks");
      list.push_back(product_of(p));
      if (numerics_ == Numerics::ordinary || !p.blocks.empty()) continue;
      SumBlocks& one = whole[list.size() - 1];
      one = {{{0, list.back().k}}};
      list.back().blocks = &one;
    }
    multiply_all(list);
  }

  // Called for bf16 products, since there are no fp8 products here.
  void round_to_fp8(const Tensor& tx, Fp8 format, Out ty) override {
    const Matrix<bf16> x(tx), y(ty);
    const float scale = fp8_scale(static_cast<float>(largest(tx)), format);
    team_.each_row(x.rows, x.cols,
                   [&](std::int64_t i) { simd<bf16>().round_to_fp8(x[i], scale, format, y[i], x.cols); });
  }

  void fill(Out tx, double value) override {
    const bool zero = std::bit_cast<std::uint64_t>(value) == 0;  // not -0.0
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx);
      team_.each_span(x, contiguous(x), [&](T* at, std::int64_t, std::int64_t, std::int64_t n) {
        if (zero)
          std::memset(static_cast<void*>(at), 0,
                      static_cast<std::size_t>(n) * sizeof(T));  // gradients, in each step
        else
          std::fill_n(at, n, T(static_cast<float>(value)));
      });
    });
  }

  void copy(const Tensor& from, Out to) override {
    if (from.dtype() == DType::i16) {
      const Matrix<std::int16_t> x(from), y(to);
      return team_.each_span(x, contiguous(x) && contiguous(y),
                             [&](const std::int16_t* at, std::int64_t row, std::int64_t col, std::int64_t n) {
                               std::copy_n(at, n, y[row] + col);
                             });
    }
    each_pair(from, to, []<class X, class Y>(const X* x, Y* y, std::int64_t n) {
      if constexpr (std::is_same_v<X, Y>)
        std::copy_n(x, n, y);
      else if constexpr (std::is_same_v<X, bf16>)
        simd<bf16>().widen(x, y, n);
      else
        simd<bf16>().narrow(x, y, n);
    });
  }

  void add(const Tensor& tx, InOut ty) override {
    each_pair(tx, ty, []<class X, class Y>(const X* x, Y* y, std::int64_t n) {
      if constexpr (std::is_same_v<X, Y>)
        simd<X>().add(x, y, n);
      else if constexpr (std::is_same_v<X, bf16>)
        simd<bf16>().add_to_wide(x, y, n);
      else
        simd<bf16>().add_wide(x, y, n);
    });
  }

  void scale(InOut tx, double factor) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx);
      team_.each_span(x, contiguous(x), [&](T* at, std::int64_t, std::int64_t, std::int64_t n) {
        simd<T>().scale(at, static_cast<float>(factor), at, n);
      });
    });
  }

  void sum_squares(const Tensor& tx, std::int64_t block, Out tsums) override {
    with_type(tx, [&]<class T>(T) {
      const std::int64_t count = tx.numel(), blocks = (count + block - 1) / block;
      const T* x = tx.host<T>();
      double* sums = tsums.host<double>();
      team_.each_row(blocks, block, [&](std::int64_t i) {
        sums[i] = simd<T>().sum_squares(x + i * block, std::min(block, count - i * block));
      });
    });
  }

  void sum_in_order(const Tensor& tx, std::int64_t block, Out tsums) override {
    const std::int64_t count = tx.numel();
    const double* x = tx.host<double>();
    double* sums = tsums.host<double>();
    team_.each_row((count + block - 1) / block, block, [&](std::int64_t i) {
      sums[i] = std::accumulate(x + i * block, x + std::min((i + 1) * block, count), 0.0);
    });
  }

  double largest(const Tensor& tx) override {
    // As integers, floats without sign have the same order, with NaN above infinity.
    std::atomic<std::uint32_t> most = 0;
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx);
      team_.each_span(x, contiguous(x), [&](const T* at, std::int64_t, std::int64_t, std::int64_t n) {
        const auto here = std::bit_cast<std::uint32_t>(simd<T>().largest(at, n));
        std::uint32_t before = most;
        while (before < here && !most.compare_exchange_weak(before, here)) {
        }
      });
    });
    return std::bit_cast<float>(most.load());
  }

  ExactSum sum_squares_exactly(const Tensor& tx, double scale) override {
    std::atomic<std::uint64_t> high = 0, low = 0;  // in any order
    with_type(tx, [&]<class T>(T) {
      constexpr std::int64_t piece = 65536;
      const T* x = tx.host<T>();
      team_.each_row((tx.numel() + piece - 1) / piece, piece, [&](std::int64_t i) {
        double of_high = 0, of_low = 0;
        simd<T>().sum_squares_exactly(x + i * piece, scale, std::min(piece, tx.numel() - i * piece), &of_high,
                                      &of_low);
        high += static_cast<std::uint64_t>(of_high), low += static_cast<std::uint64_t>(of_low);
      });
    });
    return {high, low};
  }

  bool all_finite(const Tensor& tx) override {
    std::atomic<bool> finite = true;
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx);
      team_.each_span(x, contiguous(x), [&](T* at, std::int64_t, std::int64_t, std::int64_t n) {
        if (!simd<T>().all_finite(at, n)) finite.store(false, std::memory_order_relaxed);
      });
    });
    return finite;
  }

  void add_bias(const Tensor& tbias, InOut ty) override {
    with_type(ty, [&]<class T>(T) {
      const Matrix<T> y(ty);
      const T* bias = tbias.host<T>();
      team_.each_row(y.rows, y.cols, [&](std::int64_t i) { simd<T>().add(bias, y[i], y.cols); });
    });
  }

  void residual(const Tensor& tx, const Tensor& ty, const Tensor& tbias, Out tout) override {
    with_type(tout, [&]<class T>(T) {
      const Matrix<T> x(tx), y(ty), out(tout);
      const T* bias = host_or_none<T>(tbias);
      team_.each_row(out.rows, out.cols,
                     [&](std::int64_t i) { simd<T>().residual(x[i], y[i], bias, out[i], out.cols); });
    });
  }

  void bias_gradient(const Tensor& tdy, InOut tdbias) override {
    with_type(tdy, [&]<class T>(T) {
      const Matrix<T> dy(tdy);
      add_column_sums(dy.rows, dy.cols, tdbias.host<float>(), nullptr,
                      [&](Range part, std::int64_t at, std::int64_t n, float* sum, float*) {
                        simd<T>().column_sums(dy[part.begin] + at, dy.stride, part.size(), sum, n);
                      });
    });
  }

  void layer_norm(const Tensor& tx, const Tensor& tw, const Tensor& tb, double eps, Out ty,
                  Out tstats) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx), y(ty);
      const T *w = host_or_none<T>(tw), *b = host_or_none<T>(tb);
      float* stats = tstats.host<float>();
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        simd<T>().layer_norm(x[i], w, b, static_cast<float>(eps), y[i], stats + 2 * i, x.cols);
      });
    });
  }

  void layer_norm_again(const Tensor& tx, const Tensor& tw, const Tensor& tb, const Tensor& tstats,
                        Out ty) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx), y(ty);
      const T *w = host_or_none<T>(tw), *b = host_or_none<T>(tb);
      const float* stats = tstats.host<float>();
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        simd<T>().layer_norm_again(x[i], w, b, stats + 2 * i, y[i], x.cols);
      });
    });
  }

  void layer_norm_backward_input(const Tensor& tdy, const Tensor& tx, const Tensor& tw, const Tensor& tstats,
                                 InOut tdx) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> dy(tdy), x(tx), dx(tdx);
      const T* w = host_or_none<T>(tw);
      const float* stats = tstats.host<float>();
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        simd<T>().layer_norm_dx(dy[i], x[i], w, stats + 2 * i, dx[i], x.cols);
      });
    });
  }

  void layer_norm_backward_weight(const Tensor& tdy, const Tensor& tx, const Tensor& tstats, InOut tdw,
                                  InOut tdb) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> dy(tdy), x(tx);
      const float* stats = tstats.host<float>();
      add_column_sums(x.rows, x.cols, tdw.host<float>(), tdb.host<float>(),
                      [&](Range part, std::int64_t at, std::int64_t n, float* dw, float* db) {
                        simd<T>().layer_norm_dw(dy[part.begin] + at, dy.stride, x[part.begin] + at, x.stride,
                                                stats + 2 * part.begin, part.size(), dw, db, n);
                      });
    });
  }

  void rms_norm(const Tensor& tx, const Tensor& tw, double eps, Out ty, Out tstats) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx), y(ty);
      const T* w = host_or_none<T>(tw);
      float* stats = tstats.host<float>();
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        simd<T>().rms_norm(x[i], w, static_cast<float>(eps), y[i], stats + i, x.cols);
      });
    });
  }

  void rms_norm_again(const Tensor& tx, const Tensor& tw, const Tensor& tstats, Out ty) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx), y(ty);
      const T* w = host_or_none<T>(tw);
      const float* stats = tstats.host<float>();
      team_.each_row(x.rows, x.cols,
                     [&](std::int64_t i) { simd<T>().rms_norm_again(x[i], w, stats + i, y[i], x.cols); });
    });
  }

  void rms_norm_backward_input(const Tensor& tdy, const Tensor& tx, const Tensor& tw, const Tensor& tstats,
                               InOut tdx) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> dy(tdy), x(tx), dx(tdx);
      const T* w = host_or_none<T>(tw);
      const float* stats = tstats.host<float>();
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        simd<T>().rms_norm_dx(dy[i], x[i], w, stats + i, dx[i], x.cols);
      });
    });
  }

  void rms_norm_backward_weight(const Tensor& tdy, const Tensor& tx, const Tensor& tstats,
                                InOut tdw) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> dy(tdy), x(tx);
      const float* stats = tstats.host<float>();
      add_column_sums(x.rows, x.cols, tdw.host<float>(), nullptr,
                      [&](Range part, std::int64_t at, std::int64_t n, float* dw, float*) {
                        simd<T>().rms_norm_dw(dy[part.begin] + at, dy.stride, x[part.begin] + at, x.stride,
                                              stats + part.begin, part.size(), dw, n);
                      });
    });
  }

  void row_squares(const Tensor& tx, Out tsquares) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx);
      float* squares = tsquares.host<float>();
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) { squares[i] = simd<T>().dot(x[i], x[i], x.cols); });
    });
  }

  void rms_norm_of_squares(const Tensor& tx, const Tensor& tw, double eps, double columns, Out ty,
                           InOut tstats) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx), y(ty);
      const T* w = tw.host<T>();
      float* stats = tstats.host<float>();
      const float of_row = static_cast<float>(columns), least = static_cast<float>(eps);
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        stats[i] = 1.0f / std::sqrt(stats[i] / of_row + least);
        simd<T>().rms_norm_again(x[i], w, stats + i, y[i], x.cols);
      });
    });
  }

  void rms_norm_backward_sums(const Tensor& tdy, const Tensor& tx, const Tensor& tw, const Tensor& tstats,
                              Out tsums) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> dy(tdy), x(tx);
      const T* w = tw.host<T>();
      const float* stats = tstats.host<float>();
      float* sums = tsums.host<float>();
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        sums[i] = simd<T>().rms_norm_dx_sum(dy[i], x[i], w, stats[i], x.cols);
      });
    });
  }

  void rms_norm_backward_input_of_sums(const Tensor& tdy, const Tensor& tx, const Tensor& tw,
                                       const Tensor& tstats, const Tensor& tsums, double columns,
                                       InOut tdx) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> dy(tdy), x(tx), dx(tdx);
      const T* w = tw.host<T>();
      const float *stats = tstats.host<float>(), *sums = tsums.host<float>();
      const float of_row = static_cast<float>(columns);
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        simd<T>().rms_norm_dx_of(dy[i], x[i], w, stats[i], sums[i] / of_row, dx[i], x.cols);
      });
    });
  }

  void activate(Activation a, InOut th, const Tensor& tbias, Out ty) override {
    with_type(th, [&]<class T>(T) {
      const Matrix<T> h(th), y(ty);
      const T* bias = host_or_none<T>(tbias);
      const auto pass = simd<T>().activation(a).forward;
      team_.each_row(h.rows, h.cols, [&](std::int64_t i) { pass(h[i], bias, y[i], h.cols); });
    });
  }

  void activate_backward(Activation a, InOut th, InOut tdy) override {
    with_type(th, [&]<class T>(T) {
      const Matrix<T> h(th), dy(tdy);
      const auto pass = simd<T>().activation(a).backward;
      team_.each_row(h.rows, h.cols, [&](std::int64_t i) { pass(h[i], dy[i], h.cols); });
    });
  }

  void gated(Activation a, const Tensor& gate_up, Out ty, const SwigluClamp& clamp) override {
    with_type(ty, [&]<class T>(T) {
      const Matrix<T> x(gate_up), y(ty);
      const auto pass = simd<T>().gated(a).forward;
      const float alpha = static_cast<float>(clamp.alpha), limit = static_cast<float>(clamp.limit);
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        pass(x[i], x[i] + y.cols, y[i], y.cols, alpha, limit);
      });
    });
  }

  void gated_backward(Activation a, InOut gate_up, InOut tdy, const SwigluClamp& clamp) override {
    with_type(tdy, [&]<class T>(T) {
      const Matrix<T> x(gate_up), dy(tdy);
      const auto pass = simd<T>().gated(a).backward;
      const float alpha = static_cast<float>(clamp.alpha), limit = static_cast<float>(clamp.limit);
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        pass(x[i], x[i] + dy.cols, dy[i], dy.cols, alpha, limit);
      });
    });
  }

  void xielu(const Tensor& th, const Tensor& alphas, Out ty) override {
    with_type(th, [&]<class T>(T) {
      const Matrix<T> h(th), y(ty);
      const rows::XieluOf<float> of(alphas.host<T>());
      team_.each_row(h.rows, h.cols,
                     [&](std::int64_t i) { simd<T>().xielu(h[i], of.above, of.below, y[i], h.cols); });
    });
  }

  void xielu_backward(InOut th, const Tensor& talphas, InOut tdy, Out tdalphas) override {
    with_type(th, [&]<class T>(T) {
      const Matrix<T> h(th), dy(tdy);
      const T* alphas = talphas.host<T>();
      float* dalphas = tdalphas.host<float>();
      const rows::XieluOf<float> of(alphas);
      const float slopes[] = {rows::sigmoid(static_cast<float>(alphas[0])),
                              rows::sigmoid(static_cast<float>(alphas[1]))};
      team_.each_row(h.rows, h.cols, [&](std::int64_t i) {
        float sums[2];
        simd<T>().xielu_backward(h[i], dy[i], of.above, of.below, &sums[0], &sums[1], h.cols);
        for (std::int64_t j = 0; j < 2; ++j) dalphas[2 * i + j] = sums[j] * slopes[j];
      });
    });
  }

  void sigmoid_gate(const Tensor& tx, const Tensor& tgate, Out ty) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx), gate(tgate), y(ty);
      team_.each_row(x.rows, x.cols,
                     [&](std::int64_t i) { simd<T>().sigmoid_gate(x[i], gate[i], y[i], x.cols); });
    });
  }

  void sigmoid_gate_backward(const Tensor& tx, InOut tgate, InOut tdy, Out ty) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx), gate(tgate), dy(tdy), y(ty);
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        simd<T>().sigmoid_gate_backward(x[i], gate[i], dy[i], y[i], x.cols);
      });
    });
  }

  void short_convolution(const Tensor& bcx, const Tensor& w, const SequenceRows& rows, Out ty) override {
    with_type(bcx, [&]<class T>(T) {
      const Matrix<T> y(ty);
      const std::vector<float> taps = taps_by_position<T>(w);
      const auto at = gated_channels<T>(bcx, rows);
      team_.each_row(y.rows, 3 * y.cols, [&](std::int64_t i) {
        simd<T>().short_convolution(convolved_row(at, taps.data(), w.cols(), i), y[i]);
      });
    });
  }

  void short_convolution_backward(const Tensor& bcx, const Tensor& w, const Tensor& tdy,
                                  const SequenceRows& rows, Out dbcx, Out ty) override {
    with_type(bcx, [&]<class T>(T) {
      const Matrix<T> dy(tdy), d_given(dbcx), y(ty);
      const std::vector<float> taps = taps_by_position<T>(w);
      const auto at = gated_channels<T>(bcx, rows);
      team_.each_row(y.rows, 6 * y.cols, [&](std::int64_t i) {
        std::int64_t seen_by = 1;
        while (seen_by < w.cols() && at.reaches(i, seen_by)) ++seen_by;
        simd<T>().short_convolution_backward(convolved_row(at, taps.data(), w.cols(), i), dy[i], dy.stride,
                                             seen_by, d_given[i], y[i]);
      });
    });
  }

  void short_convolution_backward_weight(const Tensor& bcx, const Tensor& tdy, const SequenceRows& rows,
                                         InOut tdw) override {
    with_type(bcx, [&]<class T>(T) {
      const Matrix<T> dy(tdy);
      const Matrix<float> dw(tdw);
      const auto at = gated_channels<T>(bcx, rows);
      constexpr std::int64_t piece = 64;
      team_.each_task((dy.cols + piece - 1) / piece, [&](std::int64_t part, int) {
        const std::int64_t begin = part * piece, n = std::min(piece, dy.cols - begin);
        std::vector<float> sums(static_cast<std::size_t>(dw.cols * n));
        for (std::int64_t i = 0; i < dy.rows; ++i) {
          ConvolvedRow<T> row = convolved_row(at, nullptr, dw.cols, i);
          row.given += begin;
          simd<T>().short_convolution_taps(row, dy[i] + begin, sums.data(), n);
        }
        for (std::int64_t c = 0; c < n; ++c)
          for (std::int64_t k = 0; k < dw.cols; ++k)
            dw[begin + c][dw.cols - 1 - k] += sums[static_cast<std::size_t>(k * n + c)];
      });
    });
  }

  void weighted_activation_backward(Activation a, InOut hidden, InOut tdy, const Tensor& tweights,
                                    Out tdweights, const SwigluClamp& clamp) override {
    if (!is_gated(a)) return weighted_backward_without_gate(a, hidden, tdy, tweights, tdweights);
    with_type(tdy, [&]<class T>(T) {
      const Matrix<T> x(hidden), dy(tdy);
      const float* weights = tweights.host<float>();
      float* dweights = tdweights.host<float>();
      const auto pass = simd<T>().gated_backward_wide(a);
      const float alpha = static_cast<float>(clamp.alpha), limit = static_cast<float>(clamp.limit);
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        constexpr std::int64_t piece = 256;
        std::array<float, piece> incoming, weighted;
        T *gate = x[i], *up = x[i] + dy.cols;
        dweights[i] = 0;
        for (std::int64_t at = 0; at < dy.cols; at += piece) {
          const std::int64_t n = std::min(piece, dy.cols - at);
          simd<T>().widen(dy[i] + at, incoming.data(), n);
          simd<float>().scale(incoming.data(), weights[i], weighted.data(), n);
          pass(gate + at, up + at, weighted.data(), n, alpha, limit);
          dweights[i] += simd<float>().dot(incoming.data(), weighted.data(), n);
          simd<T>().scale_wide(weighted.data(), weights[i], dy[i] + at, n);
        }
      });
    });
  }

  void weighted_backward_without_gate(Activation a, InOut hidden, InOut tdy, const Tensor& tweights,
                                      Out tdweights) {
    with_type(tdy, [&]<class T>(T) {
      const Matrix<T> x(hidden), dy(tdy);
      const float* weights = tweights.host<float>();
      float* dweights = tdweights.host<float>();
      const auto pass = simd<float>().activation(a).backward;
      team_.each_row(x.rows, x.cols, [&](std::int64_t i) {
        constexpr std::int64_t piece = 256;
        std::array<float, piece> incoming, weighted, h;
        dweights[i] = 0;
        for (std::int64_t at = 0; at < dy.cols; at += piece) {
          const std::int64_t n = std::min(piece, dy.cols - at);
          simd<T>().widen(dy[i] + at, incoming.data(), n);
          simd<T>().widen(x[i] + at, h.data(), n);
          simd<float>().scale(incoming.data(), weights[i], weighted.data(), n);
          pass(h.data(), weighted.data(),
               n);  // h is now the activation, and weighted its gradient
          dweights[i] += simd<float>().dot(incoming.data(), h.data(), n);
          simd<T>().scale_wide(weighted.data(), 1.0f, x[i] + at, n);
          simd<T>().scale_wide(h.data(), weights[i], dy[i] + at, n);
        }
      });
    });
  }

  void combine_rows(const Tensor& tx, const Tensor& tplaces, const Tensor& tweights, Out ty) override {
    with_type(ty, [&]<class T>(T) {
      const Matrix<T> x(tx), y(ty);
      const std::int64_t k = y.rows == 0 ? 0 : tplaces.numel() / y.rows;
      const std::int32_t* places = tplaces.host<std::int32_t>();
      const float* weights = tweights.defined() ? tweights.host<float>() : nullptr;
      check(std::all_of(places, places + y.rows * k, [&](std::int32_t p) { return p < x.rows; }),
            "combine_rows: a place lies after the last row");
      team_.each_row(y.rows, (k + 1) * y.cols, [&](std::int64_t i) {
        constexpr std::int64_t piece = 1024;
        std::array<float, piece> sum;
        for (std::int64_t at = 0; at < y.cols; at += piece) {
          const std::int64_t n = std::min(piece, y.cols - at);
          std::fill_n(sum.data(), n, 0.0f);
          for (std::int64_t j = i * k; j < (i + 1) * k; ++j)
            if (places[j] >= 0)
              simd<T>().add_scaled(x[places[j]] + at, weights == nullptr ? 1.0f : weights[j], sum.data(), n);
          simd<T>().narrow(sum.data(), y[i] + at, n);
        }
      });
    });
  }

  void rope(InOut tx, std::int64_t head_dim, const Tensor& tpositions, const RopeTurns& turns,
            bool inverse) override {
    with_type(tx, [&]<class T>(T) {
      const Matrix<T> x(tx);
      const std::int32_t* positions = tpositions.host<std::int32_t>();
      const std::int64_t half = std::ssize(turns.frequencies);
      constexpr std::int64_t block = 64, width = RopeAngles::most_pairs;
      const std::int64_t blocks = (x.rows + block - 1) / block;
      team_.each_row(blocks * ((half + width - 1) / width), block * x.cols, [&](std::int64_t part) {
        const std::int64_t first_pair = part / blocks * width, pairs = std::min(width, half - first_pair);
        const std::int64_t begin = part % blocks * block, end = std::min(begin + block, x.rows);
        RopeAngles angles(turns, first_pair, pairs);
        for (std::int64_t i = begin; i < end; ++i) {
          angles.move_to(positions[i]);
          for (T* head = x[i] + first_pair; head < x[i] + x.cols; head += head_dim)
            simd<T>().rotate(head, head + half, angles.cosine(), angles.sine(), inverse ? -1.0f : 1.0f,
                             pairs);
          if (first_pair == 0 && turns.growth != 0)  // of what is not turned, too
            for (T* rest = x[i] + 2 * half; rest < x[i] + x.cols; rest += head_dim)
              simd<T>().scale(
                  rest, static_cast<float>(grown_factor(1, turns.growth, turns.growth_length, positions[i])),
                  rest, head_dim - 2 * half);
        }
      });
    });
  }

  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape, Out out,
                 Out lse) override {
    check_head(q, shape);
    attention_forward(q, k, v, shape, out, lse, scratch_, team_, numerics_);
  }

  void attention_delta(const Tensor& tout, const Tensor& tdout, const AttentionShape& s,
                       Out tdelta) override {
    with_type(tout, [&]<class T>(T) {
      const Matrix<T> out(tout), dout(tdout);
      float* delta = tdelta.host<float>();
      team_.each_row(out.rows, out.cols, [&](std::int64_t row) {
        float* first = delta + row / s.q_len * s.num_heads * s.q_len + row % s.q_len;
        for (std::int64_t head = 0; head < s.num_heads; ++head)
          first[head * s.q_len] =
              simd<T>().dot(out[row] + head * s.head_dim, dout[row] + head * s.head_dim, s.head_dim);
      });
    });
  }

  void attention_sink(const Tensor& tsinks, const AttentionShape& s, InOut tout, InOut tlse) override {
    with_type(tout, [&]<class T>(T) {
      const Matrix<T> out(tout);
      const T* sinks = tsinks.host<T>();
      float* lse = tlse.host<float>();
      team_.each_row(out.rows, out.cols, [&](std::int64_t row) {
        float* first = lse + row / s.q_len * s.num_heads * s.q_len + row % s.q_len;
        for (std::int64_t head = 0; head < s.num_heads; ++head) {
          T* const begin = out[row] + head * s.head_dim;
          float& sum = first[head * s.q_len];
          const float keys = sum;
          sum = rows::with_sink(static_cast<float>(sinks[head]), keys);
          simd<T>().scale(begin, std::exp(keys - sum), begin, s.head_dim);
        }
      });
    });
  }

  void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                          const Tensor& lse, const Tensor& delta, const AttentionShape& shape, Out dq, Out dk,
                          Out dv) override {
    check_head(q, shape);
    echelon::attention_backward(q, k, v, dout, lse, delta, shape, dq, dk, dv, scratch_, team_, numerics_);
  }

  void embedding(const Tensor& tids, const Tensor& ttable, std::int64_t first_id, Out ty) override {
    with_type(ty, [&]<class T>(T) {
      const Matrix<T> table(ttable), y(ty);
      const std::int32_t* ids = tids.host<std::int32_t>();
      team_.each_row(y.rows, y.cols, [&](std::int64_t i) {
        const std::int64_t row = rows::local_column(ids[i], first_id, table.rows);
        if (row >= 0)
          std::copy_n(table[row], y.cols, y[i]);
        else
          std::fill_n(y[i], y.cols, T{});
      });
    });
  }

  void embedding_backward(const Tensor& tids, const Tensor& tdy, std::int64_t first_id,
                          InOut tdtable) override {
    with_type(tdy, [&]<class T>(T) {
      const Matrix<T> dy(tdy);
      const Matrix<float> dtable(tdtable);
      const std::int32_t* ids = tids.host<std::int32_t>();
      // Each thread takes a range of columns, so that the rows of an id are added in order.
      constexpr std::int64_t width = 64;
      team_.each_row((dy.cols + width - 1) / width, dy.rows * width, [&](std::int64_t block) {
        const std::int64_t begin = block * width, count = std::min(width, dy.cols - begin);
        for (std::int64_t i = 0; i < dy.rows; ++i) {
          const std::int64_t row = rows::local_column(ids[i], first_id, dtable.rows);
          if (row >= 0) simd<T>().add_to_wide(dy[i] + begin, dtable[row] + begin, count);
        }
      });
    });
  }

  void soft_cap(InOut tx, double cap) override {
    const Matrix<float> x(tx);
    team_.each_span(x, contiguous(x), [&](float* at, std::int64_t, std::int64_t, std::int64_t n) {
      wide_simd().soft_cap(at, static_cast<float>(cap), n);
    });
  }

  void row_max(const Tensor& tlogits, Out tmax) override {
    const Matrix<float> logits(tlogits);
    float* max = tmax.host<float>();
    team_.each_row(logits.rows, logits.cols,
                   [&](std::int64_t i) { max[i] = wide_simd().max(logits[i], logits.cols); });
  }

  void exp_sum(InOut tlogits, const Tensor& tmax, const Tensor& ttargets, std::int64_t first_id, Out tsum,
               Out ttarget) override {
    const Matrix<float> logits(tlogits);
    const float* max = tmax.host<float>();
    const std::int32_t* targets = ttargets.host<std::int32_t>();
    float *sum = tsum.host<float>(), *target = ttarget.host<float>();
    team_.each_row(logits.rows, logits.cols, [&](std::int64_t i) {
      const std::int64_t column = rows::local_column(targets[i], first_id, logits.cols);
      target[i] = column >= 0 ? logits[i][column] - max[i] : 0.0f;
      sum[i] = wide_simd().exp_sum(logits[i], max[i], logits.cols);
    });
  }

  void cross_entropy_backward(const Tensor& tp, const Tensor& tsum, const Tensor& ttargets,
                              std::int64_t first_id, double loss_scale, Out tdlogits,
                              const LogitsCap& cap) override {
    with_type(tdlogits, [&]<class T>(T) {
      const Matrix<float> p(tp);
      const Matrix<T> dlogits(tdlogits);
      const float* sum = tsum.host<float>();
      const float* max = cap.cap > 0 ? cap.max.host<float>() : nullptr;
      const std::int32_t* targets = ttargets.host<std::int32_t>();
      team_.each_row(p.rows, p.cols, [&](std::int64_t i) {
        logits_gradient(p[i], sum[i], {static_cast<float>(cap.cap), max == nullptr ? 0 : max[i]},
                        targets[i] < 0, rows::local_column(targets[i], first_id, p.cols),
                        static_cast<float>(loss_scale), dlogits[i], p.cols);
      });
    });
  }

  // All steps at once, while a row is in a thread's cache.
  void cross_entropy(InOut tlogits, const Tensor& ttargets, double loss_scale, double cap, Out tmax, Out tsum,
                     Out ttarget, Out tdlogits) override {
    with_type(tdlogits, [&]<class T>(T) {
      const Matrix<float> logits(tlogits);
      const Matrix<T> dlogits(tdlogits);
      const std::int32_t* targets = ttargets.host<std::int32_t>();
      float *max = tmax.host<float>(), *sum = tsum.host<float>(), *target = ttarget.host<float>();
      team_.each_row(logits.rows, logits.cols, [&](std::int64_t i) {
        float* const row = logits[i];
        const std::int64_t column = rows::local_column(targets[i], 0, logits.cols);
        max[i] = wide_simd().max(row, logits.cols);
        target[i] = column >= 0 ? row[column] - max[i] : 0.0f;
        sum[i] = wide_simd().exp_sum(row, max[i], logits.cols);
        logits_gradient(row, sum[i], {static_cast<float>(cap), max[i]}, targets[i] < 0, column,
                        static_cast<float>(loss_scale), dlogits[i], logits.cols);
      });
    });
  }

  void adamw(InOut p, const Tensor& g, InOut m, InOut v, const AdamWStep& step, InOut remainder) override {
    adamw_by_team(p, g, m, v, step, remainder, team_);
  }
  void momentum(const Tensor& g, InOut m, Out update, const MomentumStep& step) override {
    momentum_by_team(g, m, update, step, team_);
  }
  void step_weights(InOut p, const Tensor& update, const WeightStep& step, InOut remainder) override {
    step_weights_by_team(p, update, step, remainder, team_);
  }

 private:
  struct RowCap {
    float cap, max;  // 0: none
  };
  // What cross_entropy_backward() computes for a row; `column` is the target's, or negative.
  template <class T>
  void logits_gradient(const float* p, float sum, const RowCap& cap, bool ignored, std::int64_t column,
                       float weight, T* to, std::int64_t cols) {
    if (ignored) {
      std::fill_n(to, cols, T{});
      return;
    }
    float at_target = column >= 0 ? weight * (p[column] / sum - 1.0f) : 0.0f;
    if (cap.cap > 0) {
      const float bent = column >= 0 ? (cap.max + std::log(p[column])) / cap.cap : 0.0f;
      at_target *= 1.0f - bent * bent;
      simd<T>().scale_capped(p, weight / sum, cap.max, cap.cap, to, cols);
    } else {
      simd<T>().scale_wide(p, weight / sum, to, cols);
    }
    if (column >= 0) to[column] = T(at_target);
  }

  void multiply_all(std::span<const Product> products) {
    for (const Product& p : products)
      for (DType type : {p.a.type, p.b.type, p.c.type}) check_room(type);
    multiply(products, scratch_.host<std::byte>(), attention_scratch_bytes(dtype_), team_);
  }

  // Kernels made for f32 have no scratch for narrower types.
  void check_room(DType type) const {
    check(type == DType::f32 || type == dtype_, "CPU kernels made for f32 multiply in f32 alone");
  }
  void check_head(const Tensor& q, const AttentionShape& shape) const {
    check_room(q.dtype());
    check(q.dtype() == DType::f32 || shape.head_dim <= most_head_dim,
          "attention in bf16 has room for heads of 4096 columns");
  }

  template <class T>
  static T* host_or_none(const Tensor& t) {
    return t.defined() ? t.host<T>() : nullptr;
  }

  // Calls body(from, to, count) for pieces; either may be bf16.
  template <class Body>
  void each_pair(const Tensor& tx, const Tensor& ty, const Body& body) {
    with_type(tx, [&]<class X>(X) {
      with_type(ty, [&]<class Y>(Y) {
        const Matrix<X> x(tx);
        const Matrix<Y> y(ty);
        team_.each_span(x, contiguous(x) && contiguous(y),
                        [&](const X* at, std::int64_t row, std::int64_t col, std::int64_t n) {
                          body(at, y[row] + col, n);
                        });
      });
    });
  }

  // first (cols) += column sums computed by add_rows, and second likewise unless null. Groups of rows are
  // summed side by side and then added in order; the number of groups depends on the rows, not on the number
  // of threads.
  template <class AddRows>  // add_rows(rows, first column, columns, sum_first, sum_second)
  void add_column_sums(std::int64_t rows, std::int64_t cols, float* first, float* second,
                       const AddRows& add_rows) {
    const std::int64_t groups = std::clamp<std::int64_t>(rows / 64, 1, most_groups);
    float* sums = column_sums_.host<float>();
    for (std::int64_t begin = 0; begin < cols; begin += strip) {
      const std::int64_t count = std::min(strip, cols - begin), width = second == nullptr ? count : 2 * count;
      team_.each_row(groups, rows / groups * count, [&](std::int64_t g) {
        float* sum = sums + g * width;
        std::fill_n(sum, width, 0.0f);
        add_rows(split_range(rows, groups, g), begin, count, sum, sum + width - count);
      });
      for (std::int64_t g = 1; g < groups; ++g) simd<float>().add(sums + g * width, sums, width);
      simd<float>().add(sums, first + begin, count);
      if (second != nullptr) simd<float>().add(sums + count, second + begin, count);
    }
  }

  const DType dtype_;
  const Numerics numerics_;
  FlushSubnormals flush_;
  const ThreadTeam team_;
  // Scratch: allocated from the start, so that every step holds the same. The scratch for attention includes
  // that of its products, and so suffices for all products.
  const Tensor scratch_, column_sums_;
};

}  // namespace

std::unique_ptr<Kernels> make_cpu_kernels(Arena& arena, DType dtype, int threads, Numerics numerics) {
  return std::make_unique<Kernels>(std::make_shared<CpuKernels>(arena, dtype, threads, numerics));
}

const char* cpu_products(DType dtype) { return products_in(dtype); }
const char* cpu_instruction_set() { return instruction_set(); }

const char* cpu_product(const ProductShape& s, int threads) {
  return multiplied_by({.ta = s.ta,
                        .tb = s.tb,
                        .m = s.m,
                        .n = s.n,
                        .k = s.k,
                        .a = {nullptr, 0, s.factors},
                        .b = {nullptr, 0, s.factors},
                        .c = {nullptr, 0, s.result}},
                       threads);
}

std::int64_t cpu_kernels_scratch_bytes(DType dtype, int threads) {
  return threads * attention_scratch_bytes(dtype) + 4 * column_sums_size;
}

}  // namespace echelon
