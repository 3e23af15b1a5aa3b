// Every kernel in bf16, the reference and the fast ones, against the reference in f64 on the same numbers,
// which bf16 holds exactly. What is bf16 may be off by one rounding, 2^-8 of the element, and by what f32
// sums are off by, c eps(f32) sqrt(length); what is f32 by the latter alone, which no number kept in bf16 on
// the way would keep to.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "attention_spoiled.h"
#include "base/error.h"
#include "base/philox.h"
#include "base/split_weight.h"
#include "case_choice.h"
#include "tensor/host.h"
#include "tensor/kernels.h"
#include "tensor/normals.h"
#include "tensor/split_weights.h"

namespace echelon::kernels_bf16_test {
namespace {

constexpr double eps = std::numeric_limits<float>::epsilon();
constexpr Transpose no = Transpose::no, yes = Transpose::yes;

// The same numbers in f64 and in bf16, or in f32 for what is wide.
struct Operand {
  Tensor exact, held;
};

struct Maker {
  const char* name;
  int threads;  // 0: the reference kernels
};

class KernelsBf16 : public ::testing::TestWithParam<Maker> {
 protected:
  Arena arena;
  const bool fast = GetParam().threads > 0;
  std::unique_ptr<Kernels> kernels =
      fast ? make_cpu_kernels(arena, DType::bf16, GetParam().threads) : make_reference_kernels();
  std::unique_ptr<Kernels> reference = make_reference_kernels();
  std::uint64_t draws = 0;

  Tensor make(DType dtype, std::vector<std::int64_t> shape) {
    return {arena, MemoryCategory::other, dtype, std::move(shape)};
  }
  // Normal numbers rounded to bf16, `scale` times.
  Operand random(DType dtype, std::int64_t rows, std::int64_t cols, double scale = 1) {
    std::vector<float> drawn(static_cast<std::size_t>(rows * cols));
    fill_normals(Philox(13, Stream::test, draws++), scale, 0, drawn);
    std::vector<double> values;
    for (const float x : drawn) values.push_back(float{bf16(x)});
    const Operand x{make(DType::f64, {rows, cols}), make(dtype, {rows, cols})};
    copy_numbers_from_host(values, x.exact);
    copy_numbers_from_host(values, x.held);
    return x;
  }
  Operand narrow(std::int64_t rows, std::int64_t cols) { return random(DType::bf16, rows, cols); }
  Operand wide(std::int64_t rows, std::int64_t cols) { return random(DType::f32, rows, cols); }
  Tensor ids(const std::vector<std::int32_t>& values) {
    const Tensor t = make(DType::i32, {std::ssize(values)});
    std::copy(values.begin(), values.end(), t.host<std::int32_t>());
    return t;
  }

  // call(kernels, of): of(operand) is the operand's tensor in f64, and then as it is held.
  template <class Call>
  void run(const Call& call) {
    call(*reference, [](const Operand& x) { return x.exact; });
    call(*kernels, [](const Operand& x) { return x.held; });
  }

  // `length`: of the longest sum; `unit_of_largest`: what its terms are rounded by. Afterwards the exact
  // numbers are those held: the next kernel begins with the same on both sides.
  static void expect_close(const Operand& x, std::int64_t length, double c, const char* what,
                           double unit_of_largest = 0) {
    const std::vector<double> exact = copy_numbers_to_host(x.exact), held = copy_numbers_to_host(x.held);
    double largest = 0;
    for (double value : exact)
      if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
    const double unit = x.held.dtype() == DType::bf16 ? 0x1p-8 : 0;
    const double sums = (c * eps * std::sqrt(static_cast<double>(length)) + unit_of_largest) * largest;
    double worst_if_bf16 = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
      EXPECT_TRUE(held[i] == exact[i] || std::abs(held[i] - exact[i]) <= unit * std::abs(exact[i]) + sums)
          << what << " element " << i << ": " << exact[i] << " expected, not " << held[i];
      if (std::isfinite(exact[i]))
        worst_if_bf16 = std::max(worst_if_bf16, std::abs(double{float{bf16(exact[i])}} - exact[i]));
    }
    if (x.held.dtype() == DType::f32 && worst_if_bf16 > 0) {
      EXPECT_GT(worst_if_bf16, sums) << what << ": the bound would let bf16 pass";
    }
    copy_numbers_from_host(held, x.exact);
  }
};

struct Size {
  std::int64_t rows, cols;
};
const std::vector<Size> sizes{{1, 1}, {3, 7}, {40, 300}, {300, 40}};

TEST_P(KernelsBf16, ProductsInEveryMixtureOfTypes) {
  for (const auto& [m, n, depth] : {std::array<std::int64_t, 3>{3, 19, 5},
                                    {40, 33, 700},
                                    {1, 1, 1},
                                    {2, 3, 0},
                                    {5, 33, 4100},
                                    {130, 5, 1030}})
    for (DType ta : {DType::bf16, DType::f32})
      for (DType tb : {DType::bf16, DType::f32})
        for (DType tc : {DType::bf16, DType::f32})
          for (bool turned : {false, true})
            for (bool accumulate : {false, true}) {
              if (!checks::is_taken(4)) continue;
              const Operand a = turned ? random(ta, depth, m) : random(ta, m, depth);
              const Operand b = turned ? random(tb, n, depth) : random(tb, depth, n), c = random(tc, m, n);
              run([&](Kernels& on, auto of) {
                on.matmul(of(a), turned ? yes : no, of(b), turned ? yes : no, of(c), accumulate);
              });
              expect_close(c, depth + 1, 2, "matmul");
            }
}

// As decoded codes and their scale, bit for bit; NaN where something is not finite.
TEST_P(KernelsBf16, RoundsToFp8) {
  for (const Fp8 format : {Fp8::e4m3, Fp8::e5m2})
    for (const auto& [rows, cols] : sizes)
      for (const double size : {1.0, 1e-7, 1e30}) {
        const Operand wide = random(DType::bf16, rows, cols + 3, size);
        const Tensor x = wide.held.column_range(2, 2 + cols), y = make(DType::bf16, {rows, cols});
        if (rows * cols > 20) x.host<bf16>()[3] = bf16(0.0f);
        const auto at = [&](std::int64_t i) -> bf16& {
          return x.host<bf16>()[i / cols * x.row_stride() + i % cols];
        };
        float largest = 0;
        for (std::int64_t i = 0; i < rows * cols; ++i) largest = std::max(largest, std::fabs(float{at(i)}));
        const float scale = fp8_scale(largest, format);
        kernels->round_to_fp8(x, format, y);
        for (std::int64_t i = 0; i < rows * cols; ++i)
          ASSERT_EQ(float{y.host<bf16>()[i]}, fp8_value(fp8_bits(at(i) * scale, format), format) / scale)
              << i;
        for (const float bad : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
          at(rows * cols / 2) = bf16(bad);
          kernels->round_to_fp8(x, format, y);
          for (std::int64_t i = 0; i < rows * cols; ++i)
            ASSERT_TRUE(std::isnan(float{y.host<bf16>()[i]})) << i;
        }
      }
}

// Of rounded operands as any product of bf16 is, and so no further from the product of the operands than both
// roundings make of its terms: e4m3 2^-4 and e5m2 2^-3 of each, or of the smallest normal number.
TEST_P(KernelsBf16, ProductsInFp8) {
  for (const auto& [m, n, depth] :
       {std::array<std::int64_t, 3>{3, 19, 5}, {40, 33, 700}, {1, 1, 1}, {2, 3, 0}})
    for (const auto& [fa, fb] :
         {std::pair{Fp8::e4m3, Fp8::e4m3}, {Fp8::e5m2, Fp8::e4m3}, {Fp8::e4m3, Fp8::e5m2}})
      for (const DType tc : {DType::bf16, DType::f32}) {
        const Operand a = narrow(depth, m), b = narrow(depth, n), c = random(tc, m, n);
        const Tensor room_a = make(DType::bf16, {depth, m}), room_b = make(DType::bf16, {depth, n});
        const std::vector<double> before = copy_numbers_to_host(c.exact), xs = copy_numbers_to_host(a.exact),
                                  ys = copy_numbers_to_host(b.exact);
        const Fp8Product product{{a.held, yes, b.held, no, c.held, true}, {true, fa, fb}, room_a, room_b};
        kernels->fp8_matmul({&product, 1});
        const auto rounded = [&](const Operand& x, Fp8 format) {
          const Operand to{make(DType::f64, {x.held.rows(), x.held.cols()}),
                           make(DType::bf16, {x.held.rows(), x.held.cols()})};
          kernels->round_to_fp8(x.held, format, to.held);
          copy_numbers_from_host(copy_numbers_to_host(to.held), to.exact);
          return to;
        };
        reference->matmul(rounded(a, fa).exact, yes, rounded(b, fb).exact, no, c.exact, true);
        const std::vector<double> made = copy_numbers_to_host(c.held);
        expect_close(c, depth + 1, 2, "fp8_matmul");
        const double ea = fp8_epsilon(fa), eb = fp8_epsilon(fb), little = 0x1p-9;
        for (std::int64_t i = 0; i < m; ++i)
          for (std::int64_t j = 0; j < n; ++j) {
            const auto at = static_cast<std::size_t>(i * n + j);
            double exact = before[at], may = 0x1p-7 * (std::abs(before[at]) + 1);
            for (std::int64_t l = 0; l < depth; ++l) {
              const double x = xs[static_cast<std::size_t>(l * m + i)],
                           y = ys[static_cast<std::size_t>(l * n + j)];
              exact += x * y;
              may += (std::abs(x) * (1 + ea) + little) * (std::abs(y) * (1 + eb) + little) - std::abs(x * y);
            }
            ASSERT_LE(std::abs(made[at] - exact), may * (1 + 0x1p-7)) << i << " " << j;
          }
      }
}

TEST_P(KernelsBf16, ElementwiseOperations) {
  for (const auto& [rows, cols] : sizes)
    for (DType tx : {DType::bf16, DType::f32})
      for (DType ty : {DType::bf16, DType::f32}) {
        const Operand x = random(tx, rows, cols), y = random(ty, rows, cols), z = random(ty, rows, cols);
        run([&](Kernels& on, auto of) { on.add(of(x), of(y)); });
        expect_close(y, 1, 0, "add");
        run([&](Kernels& on, auto of) { on.scale(of(y), 1.0 / 3); });
        expect_close(y, 1, 1, "scale");
        run([&](Kernels& on, auto of) { on.copy(of(y), of(z)); });
        expect_close(z, 1, 0, "copy");
        run([&](Kernels& on, auto of) { on.fill(of(z), 1.5); });
        expect_close(z, 1, 0, "fill");
      }
  const Operand x = narrow(1, 1000);
  const Tensor sums = make(DType::f64, {2}), expected = make(DType::f64, {2});
  kernels->sum_squares(x.held.flat(), 900, sums);
  reference->sum_squares(x.exact.flat(), 900, expected);
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_NEAR(copy_to_host<double>(sums)[i], copy_to_host<double>(expected)[i], 1e-10);
  EXPECT_TRUE(kernels->all_finite(x.held));
  for (bf16 bad : {std::numeric_limits<bf16>::infinity(), std::numeric_limits<bf16>::quiet_NaN()}) {
    x.held.host<bf16>()[999] = bad;
    EXPECT_FALSE(kernels->all_finite(x.held));
  }
}

TEST_P(KernelsBf16, BiasAndResidual) {
  for (const auto& [rows, cols] : sizes) {
    const Operand x = narrow(rows, cols), y = narrow(rows, cols), bias = narrow(1, cols),
                  out = narrow(rows, cols);
    run([&](Kernels& on, auto of) { on.residual(of(x), of(y), of(bias), of(out)); });
    expect_close(out, 2, 1, "residual");
    run([&](Kernels& on, auto of) { on.add_bias(of(bias), of(y)); });
    expect_close(y, 1, 1, "add_bias");
    const Operand dbias = wide(1, cols);
    run([&](Kernels& on, auto of) { on.bias_gradient(of(x), of(dbias)); });
    expect_close(dbias, rows + 1, 2, "bias_gradient");
  }
}

TEST_P(KernelsBf16, Norms) {
  for (const auto& [rows, cols] : sizes) {
    const Operand x = narrow(rows, cols), w = narrow(1, cols), b = narrow(1, cols), y = narrow(rows, cols);
    const Operand stats = wide(rows, 2), rstd = wide(rows, 1), dy = narrow(rows, cols),
                  dx = narrow(rows, cols);
    const Operand dw = wide(1, cols), db = wide(1, cols);
    run([&](Kernels& on, auto of) { on.layer_norm(of(x), of(w), of(b), 1e-5, of(y), of(stats)); });
    expect_close(y, cols, 8, "layer_norm"), expect_close(stats, cols, 8, "layer_norm stats");
    run([&](Kernels& on, auto of) { on.layer_norm_again(of(x), of(w), of(b), of(stats), of(y)); });
    expect_close(y, 1, 8, "layer_norm_again");
    run([&](Kernels& on, auto of) { on.layer_norm_backward_input(of(dy), of(x), of(w), of(stats), of(dx)); });
    expect_close(dx, cols, 8, "layer_norm_backward_input");
    run([&](Kernels& on, auto of) {
      on.layer_norm_backward_weight(of(dy), of(x), of(stats), of(dw), of(db));
    });
    expect_close(dw, rows + 1, 4, "layer_norm dw"), expect_close(db, rows + 1, 2, "layer_norm db");
    run([&](Kernels& on, auto of) { on.rms_norm(of(x), of(w), 1e-5, of(y), of(rstd)); });
    expect_close(y, cols, 8, "rms_norm"), expect_close(rstd, cols, 4, "rms_norm stats");
    run([&](Kernels& on, auto of) { on.rms_norm_again(of(x), of(w), of(rstd), of(y)); });
    expect_close(y, 1, 8, "rms_norm_again");
    run([&](Kernels& on, auto of) { on.rms_norm_backward_input(of(dy), of(x), of(w), of(rstd), of(dx)); });
    expect_close(dx, cols, 8, "rms_norm_backward_input");
    run([&](Kernels& on, auto of) { on.rms_norm_backward_weight(of(dy), of(x), of(rstd), of(dw)); });
    expect_close(dw, rows + 1, 4, "rms_norm dw");
    const double columns = 2.0 * static_cast<double>(cols);
    const Operand sums = wide(rows, 1);
    run([&](Kernels& on, auto of) { on.row_squares(of(x), of(rstd)); });
    expect_close(rstd, cols, 4, "row_squares");
    run([&](Kernels& on, auto of) { on.rms_norm_of_squares(of(x), of(w), 1e-5, columns, of(y), of(rstd)); });
    expect_close(y, cols, 8, "rms_norm_of_squares"), expect_close(rstd, cols, 4, "its stats");
    run([&](Kernels& on, auto of) { on.rms_norm_backward_sums(of(dy), of(x), of(w), of(rstd), of(sums)); });
    expect_close(sums, cols, 8, "rms_norm_backward_sums");
    run([&](Kernels& on, auto of) {
      on.rms_norm_backward_input_of_sums(of(dy), of(x), of(w), of(rstd), of(sums), columns, of(dx));
    });
    expect_close(dx, cols, 8, "rms_norm_backward_input_of_sums");
  }
}

TEST_P(KernelsBf16, Activations) {
  for (const auto& [rows, cols] : sizes) {
    const Operand h = narrow(rows, cols), bias = narrow(1, cols), y = narrow(rows, cols),
                  dy = narrow(rows, cols);
    run([&](Kernels& on, auto of) { on.activate(Activation::gelu, of(h), of(bias), of(y)); });
    expect_close(h, 1, 1, "gelu's bias");  // a store of its own: y is that of the h that is kept
    run([&](Kernels& on, auto of) { on.activate(Activation::gelu, of(h), Tensor(), of(y)); });
    expect_close(y, 1, 8, "gelu");
    run([&](Kernels& on, auto of) { on.activate_backward(Activation::gelu, of(h), of(dy)); });
    expect_close(dy, 1, 16, "gelu_backward dy"), expect_close(h, 1, 8, "gelu_backward y");

    for (const Activation relu : {Activation::relu, Activation::relu2}) {
      const Operand r = narrow(rows, cols), dr = narrow(rows, cols);
      run([&](Kernels& on, auto of) { on.activate(relu, of(r), Tensor(), of(y)); });
      expect_close(y, 1, 8, name_of(relu));
      run([&](Kernels& on, auto of) { on.activate_backward(relu, of(r), of(dr)); });
      expect_close(dr, 1, 16, "backward dy"), expect_close(r, 1, 8, "backward y");
    }

    const Operand x = narrow(rows, 2 * cols), again = narrow(rows, 2 * cols), d = narrow(rows, cols);
    const Operand weights = wide(rows, 1), dweights = wide(rows, 1), weighted = narrow(rows, cols);
    run([&](Kernels& on, auto of) { on.gated(Activation::swiglu, of(x), of(y)); });
    expect_close(y, 1, 8, "swiglu");
    run([&](Kernels& on, auto of) { on.gated_backward(Activation::swiglu, of(x), of(d)); });
    expect_close(x, 1, 16, "swiglu_backward dx"), expect_close(d, 1, 8, "swiglu_backward y");
    const Operand g = narrow(rows, 2 * cols), dg = narrow(rows, cols);
    run([&](Kernels& on, auto of) { on.gated(Activation::geglu, of(g), of(y)); });
    expect_close(y, 1, 8, "geglu");
    run([&](Kernels& on, auto of) { on.gated_backward(Activation::geglu, of(g), of(dg)); });
    expect_close(g, 1, 32, "geglu_backward dx"), expect_close(dg, 1, 8, "geglu_backward y");
    const Operand c = narrow(rows, 2 * cols), dc = narrow(rows, cols);
    const SwigluClamp clamp{.alpha = 1.7, .limit = 0.8};
    run([&](Kernels& on, auto of) { on.gated(Activation::clamped_swiglu, of(c), of(y), clamp); });
    expect_close(y, 1, 8, "clamped swiglu");
    run([&](Kernels& on, auto of) { on.gated_backward(Activation::clamped_swiglu, of(c), of(dc), clamp); });
    expect_close(c, 1, 32, "clamped swiglu_backward dx"), expect_close(dc, 1, 8, "clamped swiglu_backward y");
    run([&](Kernels& on, auto of) {
      on.weighted_activation_backward(Activation::swiglu, of(again), of(weighted), of(weights), of(dweights));
    });
    expect_close(again, 1, 16, "weighted_activation_backward dx");
    expect_close(weighted, 1, 8, "weighted_activation_backward y");
    expect_close(dweights, cols, 8, "weighted_activation_backward dweights");
    const Operand squared = narrow(rows, cols), d_squared = narrow(rows, cols);
    run([&](Kernels& on, auto of) {
      on.weighted_activation_backward(Activation::relu2, of(squared), of(d_squared), of(weights),
                                      of(dweights));
    });
    expect_close(squared, 1, 16, "weighted relu2_backward dx"),
        expect_close(d_squared, 1, 8, "weighted relu2_backward y");
    expect_close(dweights, cols, 8, "weighted relu2_backward dweights");
  }
}

// Products of three numbers in f32, rounded once.
TEST_P(KernelsBf16, ShortConvolution) {
  std::vector<std::int32_t> documents(60, 0);
  for (std::size_t row = 7; row < 30; ++row) documents[row] = 7;
  const SequenceRows rows{2, 30, ids(documents)};
  for (const std::int64_t width : {5, 40}) {
    const Operand given = narrow(60, 3 * width), taps = narrow(width, 3), dy = narrow(60, width),
                  y = narrow(60, width), again = narrow(60, width), d_given = narrow(60, 3 * width),
                  d_taps = wide(width, 3);
    run([&](Kernels& k, auto of) {
      k.short_convolution(of(given), of(taps), rows, of(y));
      k.short_convolution_backward(of(given), of(taps), of(dy), rows, of(d_given), of(again));
      k.short_convolution_backward_weight(of(given), of(dy), rows, of(d_taps));
    });
    expect_close(y, 9, 2, "short_convolution");
    expect_close(again, 9, 2, "short_convolution_backward's output");
    expect_close(d_given, 9, 2, "short_convolution_backward");
    expect_close(d_taps, 60, 2, "short_convolution_backward_weight");
  }
}

TEST_P(KernelsBf16, Rope) {
  const Operand x = narrow(40, 4 * 64);
  std::vector<std::int32_t> places(40);
  std::iota(places.begin(), places.end(), 1000);
  for (bool inverse : {false, true}) {
    run([&](Kernels& on, auto of) { on.rope(of(x), 64, ids(places), RopeTurns::plain(1e4, 64), inverse); });
    expect_close(x, 1, 4, "rope");
  }
}

TEST_P(KernelsBf16, Attention) {
  for (const auto& [accumulate, cap] : {std::pair{false, 0.0}, {true, 0.0}, {false, 0.5}, {true, 0.5}})
    for (std::int64_t length : {1, 5, 200}) {
      // The softmax of one score has no slope: roundings are all that is there.
      if (cap > 0 && length == 1 && !accumulate) continue;
      const AttentionShape shape{.batch = 2,
                                 .q_len = length,
                                 .kv_len = length,
                                 .num_heads = 4,
                                 .num_kv_heads = 2,
                                 .head_dim = 16,
                                 .scale = 0.25,
                                 .cap = cap,
                                 .accumulate = accumulate};
      const std::int64_t rows = 2 * length;
      const Operand q = narrow(rows, 64), k = narrow(rows, 32), v = narrow(rows, 32), out = narrow(rows, 64);
      const Operand lse = wide(1, 8 * length), delta = wide(1, 8 * length), dout = narrow(rows, 64);
      const Operand dq = narrow(rows, 64), dk = narrow(rows, 32), dv = narrow(rows, 32);
      run([&](Kernels& on, auto of) { on.attention(of(q), of(k), of(v), shape, of(out), of(lse)); });
      // Fast attention multiplies by weights, and gradients of scores, rounded to bf16.
      const double rounded = fast ? 0x1p-8 : 0;
      expect_close(out, length + 16, 8, "attention", rounded),
          expect_close(lse, length + 16, 8, "attention lse");
      run([&](Kernels& on, auto of) { on.attention_delta(of(out), of(dout), shape, of(delta)); });
      expect_close(delta, 16, 4, "attention_delta");
      const Operand sinks = narrow(1, 4), d_sinks = wide(1, 4), scaled = narrow(rows, 64),
                    lse_of_all = wide(1, 8 * length);
      run([&](Kernels& on, auto of) { on.attention_sink(of(sinks), shape, of(scaled), of(lse_of_all)); });
      expect_close(scaled, 1, 8, "attention_sink"), expect_close(lse_of_all, 1, 8, "attention_sink lse");
      run([&](Kernels& on, auto of) {
        on.attention_sink_backward(of(sinks), of(lse_of_all), of(delta), shape, of(d_sinks));
      });
      expect_close(d_sinks, 2 * length, 8, "attention_sink_backward");
      run([&](Kernels& on, auto of) {
        on.attention_backward(of(q), of(k), of(v), of(dout), of(lse), of(delta), shape, of(dq), of(dk),
                              of(dv));
      });
      // Of each key and value, the queries of both heads that read it.
      expect_close(dq, length + 16, 8, "attention dq", rounded);
      expect_close(dk, 2 * length + 16, 8, "attention dk", rounded),
          expect_close(dv, 2 * length + 16, 8, "attention dv", rounded);
    }
}

// Of many tiles of keys, whose sums have room for all keys or not. What is rounded is off by up to 2^-8 of
// it, and so by 2^-8 / sqrt(3) in the mean of squares: weights and gradients of scores on the way, and what
// is stored.
TEST_P(KernelsBf16, GradientsOfQueriesAreRoundedOnce) {
  constexpr std::int64_t queries = 8, keys = 8192;
  for (const std::int64_t depth : {16, 80}) {
    const AttentionShape shape{.q_len = queries,
                               .kv_len = keys,
                               .head_dim = depth,
                               .q_offset = keys - queries,
                               .scale = 1 / std::sqrt(static_cast<double>(depth))};
    const Operand q = narrow(queries, depth), k = narrow(keys, depth), v = narrow(keys, depth),
                  dout = narrow(queries, depth), out = narrow(queries, depth), dq = narrow(queries, depth),
                  dk = narrow(keys, depth), dv = narrow(keys, depth), lse = wide(1, queries),
                  delta = wide(1, queries);
    reference->attention(q.exact, k.exact, v.exact, shape, out.exact, lse.exact);
    reference->attention_delta(out.exact, dout.exact, shape, delta.exact);
    for (const Operand& x : {lse, delta}) copy_numbers_from_host(copy_numbers_to_host(x.exact), x.held);
    for (const bool alone : {false, true}) {
      run([&](Kernels& on, auto of) {
        on.attention_backward(of(q), of(k), of(v), of(dout), of(lse), of(delta), shape, of(dq),
                              alone ? Tensor() : of(dk), alone ? Tensor() : of(dv));
      });
      const std::vector<double> exact = copy_numbers_to_host(dq.exact), held = copy_numbers_to_host(dq.held);
      double error = 0, size = 0;
      for (std::size_t i = 0; i < exact.size(); ++i) {
        error += (held[i] - exact[i]) * (held[i] - exact[i]);
        size += exact[i] * exact[i];
      }
      EXPECT_LT(std::sqrt(error / size), std::sqrt(fast ? 2.0 : 1.0) * 0x1p-8 / std::sqrt(3.0))
          << depth << (alone ? ", alone" : "");
    }
  }
}

TEST_P(KernelsBf16, AttentionKeepsWhatIsNotANumber) {
  checks::expect_spoiled_attention(
      arena, DType::bf16,
      [this](const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s, const Tensor& out,
             const Tensor& lse) { kernels->attention(q, k, v, s, out, lse); },
      true);
}

TEST_P(KernelsBf16, RowsOfTables) {
  std::vector<std::int32_t> tokens(300), places(3 * 100);
  for (std::int32_t i = 0; i < 300; ++i) tokens[static_cast<std::size_t>(i)] = i * i % 7 - 1;
  for (std::int32_t i = 0; i < 300; ++i) places[static_cast<std::size_t>(i)] = i * 7 % 41 - 1;
  const Operand table = narrow(5, 33), y = narrow(300, 33), dtable = wide(5, 33);
  run([&](Kernels& on, auto of) { on.embedding(ids(tokens), of(table), 1, of(y)); });
  expect_close(y, 1, 0, "embedding");
  const Operand dy = narrow(300, 33);
  run([&](Kernels& on, auto of) { on.embedding_backward(ids(tokens), of(dy), 1, of(dtable)); });
  expect_close(dtable, 300, 2, "embedding_backward");
  const Operand x = narrow(40, 33), weights = wide(100, 3), combined = narrow(100, 33);
  for (bool weighted : {false, true}) {
    run([&](Kernels& on, auto of) {
      on.combine_rows(of(x), ids(places), weighted ? of(weights) : Tensor(), of(combined));
    });
    expect_close(combined, 3, 2, "combine_rows");
  }
}

TEST_P(KernelsBf16, GradientOfLogitsIsF32OrBf16) {
  const std::int64_t rows = 20, cols = 300;
  std::vector<std::int32_t> values(static_cast<std::size_t>(rows));
  for (std::int32_t i = 0; i < rows; ++i) values[static_cast<std::size_t>(i)] = i * 31 % 320 - 1;
  const Tensor targets = ids(values);
  const Operand p = wide(rows, cols), max = wide(1, rows), sum = wide(1, rows), target = wide(1, rows);
  run([&](Kernels& on, auto of) {
    on.row_max(of(p), of(max));
    on.exp_sum(of(p), of(max), targets, 1, of(sum), of(target));
  });
  expect_close(p, 1, 8, "exp_sum p"), expect_close(sum, cols, 4, "exp_sum");
  const Operand dlogits = narrow(rows, cols), apart = wide(rows, cols);
  run([&](Kernels& on, auto of) {
    on.cross_entropy_backward(of(p), of(sum), targets, 1, 0.125, of(dlogits));
  });
  expect_close(dlogits, 1, 4, "cross_entropy_backward in bf16");
  run([&](Kernels& on, auto of) { on.cross_entropy_backward(of(p), of(sum), targets, 1, 0.125, of(apart)); });
  kernels->cross_entropy_backward(p.held, sum.held, targets, 1, 0.125, p.held);
  EXPECT_EQ(copy_to_host<float>(apart.held), copy_to_host<float>(p.held)) << "in place it has other bits";
  const Operand whole = wide(rows, cols);
  run([&](Kernels& on, auto of) {
    on.cross_entropy(of(whole), targets, 0.125, 0, of(max), of(sum), of(target), of(dlogits));
  });
  expect_close(dlogits, 1, 8, "cross_entropy in bf16");
}

// Step after step the bits of weights that are f32, whatever they are; the last elements no vector holds.
TEST_P(KernelsBf16, AdamWOfSplitWeightsIsThatOfWholeOnes) {
  const std::int64_t count = 20'011;
  const Operand p = wide(1, count), g = wide(1, count), m = wide(1, count), v = wide(1, count);
  kernels->fill(v.held, 0.5);
  std::vector<float> weights = copy_to_host<float>(p.held);
  // What is as near to the next value as to this one, the smallest and largest, and what no step makes
  // finite.
  const std::array<float, 10> odd{std::bit_cast<float>(0x3f808000u),
                                  std::bit_cast<float>(0xbf818000u),
                                  0.0f,
                                  -0.0f,
                                  1e-45f,
                                  std::numeric_limits<float>::max(),
                                  std::numeric_limits<float>::lowest(),
                                  std::numeric_limits<float>::infinity(),
                                  std::bit_cast<float>(0x7f800001u),
                                  std::bit_cast<float>(0xffffffffu)};
  for (const std::size_t begin : {std::size_t{100}, weights.size() - odd.size()})
    std::copy(odd.begin(), odd.end(), weights.begin() + static_cast<std::ptrdiff_t>(begin));
  copy_from_host(weights, p.held);
  const Tensor values = make(DType::bf16, {count}), remainders = make(DType::i16, {count});
  split_values(weights, values), split_remainders(weights, remainders);
  const Tensor m2 = make(DType::f32, {1, count}), v2 = make(DType::f32, {1, count});
  kernels->copy(m.held, m2), kernels->copy(v.held, v2);
  for (std::int64_t t = 1; t <= 3; ++t) {
    const AdamWStep step{.lr = t == 1 ? 0.0 : 0.01, .weight_decay = 0.1, .step = t};
    kernels->adamw(p.held, g.held, m.held, v.held, step);
    kernels->adamw(values, g.held, m2, v2, step, remainders);
    std::vector<float> joined(weights.size());
    join_weights(values, remainders, joined);
    for (std::int64_t i = 0; i < count; ++i) {
      const float whole = p.held.host<float>()[i], here = joined[static_cast<std::size_t>(i)];
      const SplitWeight expected(whole);
      ASSERT_EQ(std::isnan(here), std::isnan(whole)) << i << " step " << t;
      if (std::isnan(whole)) continue;
      ASSERT_EQ(std::bit_cast<std::uint32_t>(here), std::bit_cast<std::uint32_t>(whole))
          << i << " step " << t;
      ASSERT_EQ(values.host<bf16>()[i].bits, expected.value.bits) << i << " step " << t;
      ASSERT_EQ(remainders.host<std::int16_t>()[i], expected.remainder) << i << " step " << t;
    }
  }
  EXPECT_EQ(copy_to_host<float>(m2), copy_to_host<float>(m.held));
  EXPECT_EQ(copy_to_host<float>(v2), copy_to_host<float>(v.held));
}

// Each form of storage has the weights of f32, kept in its way; the last elements no vector holds.
TEST_P(KernelsBf16, StepsOfWeightsAreThoseOfWholeOnes) {
  const std::int64_t count = 20'011;
  const auto vector = [&](DType dtype, std::uint64_t which) {
    const Tensor t = make(dtype, {count});
    std::vector<double> numbers(static_cast<std::size_t>(count));
    Philox(19, Stream::test, which).fill_normal(0, numbers.size(), numbers.data());
    copy_numbers_from_host(numbers, t);
    return t;
  };
  const Tensor g = vector(DType::f32, 1), wide_m = vector(DType::f32, 2), m = make(DType::bf16, {count}),
               wide_update = make(DType::f32, {count}), update = make(DType::bf16, {count});
  kernels->copy(wide_m, m);
  kernels->copy(m, wide_m);
  const MomentumStep momentum{0.9, 0.5};
  const Tensor before = make(DType::f32, {count});
  kernels->copy(wide_m, before);
  kernels->momentum(g, wide_m, wide_update, momentum);
  kernels->momentum(g, m, update, momentum);
  const auto expect_rounded = [&](const Tensor& narrow, const Tensor& wide) {
    for (std::int64_t i = 0; i < count; ++i)
      ASSERT_EQ(narrow.host<bf16>()[i].bits, bf16(wide.host<float>()[i]).bits) << i;
  };
  expect_rounded(m, wide_m), expect_rounded(update, wide_update);
  kernels->momentum(g, before, update, momentum);  // of an f32 mean
  EXPECT_EQ(copy_to_host<float>(before), copy_to_host<float>(wide_m));
  expect_rounded(update, wide_update);

  kernels->copy(update, wide_update);
  const Tensor p = vector(DType::f32, 3);
  const std::vector<float> weights = copy_to_host<float>(p);
  const Tensor values = make(DType::bf16, {count}), remainders = make(DType::i16, {count}),
               narrow = make(DType::bf16, {count}), widened = make(DType::f32, {count});
  split_values(weights, values), split_remainders(weights, remainders);
  kernels->copy(p, narrow);
  kernels->copy(narrow, widened);
  const std::vector<LogicalRun> runs{{100, 5'000}, {9, 0}, {70'000, count - 5'000}};
  const StochasticRounding rounding{weight_rounding(3, "w", 2), runs};
  WeightStep step{.lr = 0.01, .weight_decay = 0.1, .scale = 3};
  kernels->step_weights(p, wide_update, step);
  kernels->step_weights(widened, wide_update, step);
  kernels->step_weights(values, update, step, remainders);
  step.rounding = &rounding;
  kernels->step_weights(narrow, update, step);
  std::vector<float> joined(weights.size());
  join_weights(values, remainders, joined);
  EXPECT_EQ(joined, copy_to_host<float>(p));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto logical = static_cast<std::uint64_t>(i < 5'000 ? 100 + i : 70'000 + i - 5'000);
    std::uint32_t word = 0;
    rounding.random.fill_words(logical, 1, &word);
    const bf16 expected = bf16::stochastic(widened.host<float>()[i], static_cast<std::uint16_t>(word >> 16));
    ASSERT_EQ(narrow.host<bf16>()[i].bits, expected.bits) << i;
  }
}

// One parameter of 12 x 10 whose second dimension, or first, is cut over tp and whose elements are cut again,
// as ZeRO does: every element is rounded as in the whole.
TEST_P(KernelsBf16, WeightsWithoutAMasterAreRoundedAlikeHoweverTheyAreCut) {
  const std::int64_t count = 120;
  const auto values = [&](DType dtype, std::uint64_t which) {
    const Tensor t = make(dtype, {count});
    std::vector<double> numbers(static_cast<std::size_t>(count));
    Philox(17, Stream::test, which).fill_normal(0, numbers.size(), numbers.data());
    if (which == 3)
      for (double& x : numbers) x = x * x;
    copy_numbers_from_host(numbers, t);
    return t;
  };
  const auto pick = [&](const Tensor& whole, const std::vector<LogicalRun>& runs) {
    std::int64_t size = 0, at = 0;
    for (const LogicalRun& run : runs) size += run.count;
    const Tensor part = make(whole.dtype(), {size});
    for (const LogicalRun& run : runs) {
      kernels->copy(whole.flat_range(run.begin, run.begin + run.count), part.flat_range(at, at + run.count));
      at += run.count;
    }
    return part;
  };
  const auto updated = [&](const std::vector<LogicalRun>& runs, std::int64_t step) {
    const Tensor p = pick(values(DType::bf16, 0), runs), g = pick(values(DType::f32, 1), runs);
    const Tensor m = pick(values(DType::bf16, 2), runs), v = pick(values(DType::bf16, 3), runs);
    const StochasticRounding rounding{weight_rounding(5, "a.weight", step), runs};
    kernels->adamw(p, g, m, v, {.lr = 0.001, .weight_decay = 0.1, .step = step, .rounding = &rounding});
    std::vector<std::uint16_t> bits;
    for (const Tensor& t : {p, m, v})
      for (std::int64_t i = 0; i < t.numel(); ++i) bits.push_back(t.host<bf16>()[i].bits);
    return bits;
  };
  const std::vector<std::uint16_t> whole = updated({{0, count}}, 1);
  const auto weights_differ = [&](const std::vector<std::uint16_t>& other) {
    return !std::equal(whole.begin(), whole.begin() + count, other.begin());
  };
  EXPECT_EQ(updated({{0, count}}, 1), whole);
  EXPECT_TRUE(weights_differ(updated({{0, count}}, 2))) << "every step rounds the same way";
  for (int dim : {0, 1})
    for (int tp : {1, 2, 4}) {
      const ParamSpec spec{.name = "a.weight",
                           .shape = {12, 10},
                           .shard_dim = dim,
                           .pieces = {{dim == 0 ? 4 : 6, 1}, {dim == 0 ? 8 : 4, 1}}};
      std::vector<bool> seen(static_cast<std::size_t>(count));
      for (int index = 0; index < tp; ++index) {
        const auto shape = local_shape(spec, tp, index);
        const std::int64_t local = shape[0] * shape[1], cut = local / 3;
        for (const Range& part : {Range{0, cut}, Range{cut, local}}) {
          const std::vector<LogicalRun> runs = logical_runs(spec, tp, index, part);
          const std::vector<std::uint16_t> bits = updated(runs, 1);
          std::size_t at = 0;
          for (const LogicalRun& run : runs)
            for (std::int64_t i = run.begin; i < run.begin + run.count; ++i, ++at) {
              seen[static_cast<std::size_t>(i)] = true;
              for (std::int64_t kind = 0; kind < 3; ++kind)
                ASSERT_EQ(bits[at + static_cast<std::size_t>(kind * part.size())],
                          whole[static_cast<std::size_t>(kind * count + i)])
                    << "dim " << dim << " tp " << tp << " element " << i;
            }
          ASSERT_EQ(static_cast<std::int64_t>(at), part.size());
        }
      }
      EXPECT_EQ(std::count(seen.begin(), seen.end(), true), count) << "dim " << dim << " tp " << tp;
    }
}

// Weights that a step moves by 1/50 of a unit: to nearest none would ever move. The mean over n elements is
// off by a random walk of n roundings of variance f (1 - f) units^2, with f = 1/50; six deviations are
// allowed.
TEST_P(KernelsBf16, UpdatesFarBelowAUnitAreThereOnAverage) {
  constexpr std::int64_t count = 100'000;
  const double unit = 0x1p-7, f = 1.0 / 50;
  const Tensor p = make(DType::bf16, {count}), g = make(DType::f32, {count});
  const Tensor m = make(DType::bf16, {count}), v = make(DType::bf16, {count});
  kernels->fill(p, 1.5), kernels->fill(g, -1), kernels->fill(m, 0), kernels->fill(v, 0);
  const std::vector<LogicalRun> runs{{0, count}};
  const StochasticRounding rounding{weight_rounding(1, "w", 1), runs};
  // The first step of Adam is lr times the gradient's sign; eps and f32 are off by far less than the bound.
  kernels->adamw(p, g, m, v, {.lr = f * unit, .eps = 1e-12, .rounding = &rounding});
  double sum = 0;
  std::int64_t moved = 0;
  for (double x : copy_numbers_to_host(p)) {
    ASSERT_TRUE(x == 1.5 || x == 1.5 + unit) << x;
    sum += x - 1.5;
    moved += x == 1.5 ? 0 : 1;
  }
  EXPECT_GT(moved, 0);
  const double allowed = 6 * unit * std::sqrt(f * (1 - f) / static_cast<double>(count));
  EXPECT_LT(allowed, f * unit / 5);  // the bound tells the mean from none at all
  EXPECT_NEAR(sum / static_cast<double>(count), f * unit, allowed);
}

// To nearest a mean of squares that falls by a thousandth would stay where it is. A rounding to one of two
// neighbours, 2^-8 apart below 1, has a deviation of half of that at most; six of those of the mean over all
// elements are allowed.
TEST_P(KernelsBf16, MeansOfSquaresFall) {
  constexpr std::int64_t count = 4096;
  constexpr int steps = 700;
  const Tensor p = make(DType::bf16, {count}), g = make(DType::f32, {count});
  const Tensor m = make(DType::bf16, {count}), v = make(DType::bf16, {count});
  kernels->fill(p, 1), kernels->fill(g, 0), kernels->fill(m, 0), kernels->fill(v, 1);
  const std::vector<LogicalRun> runs{{0, count}};
  for (int step = 1; step <= steps; ++step) {
    const StochasticRounding rounding{weight_rounding(1, "w", step), runs};
    kernels->adamw(p, g, m, v, {.lr = 0, .beta2 = 0.999, .eps = 1, .step = step, .rounding = &rounding});
  }
  const std::vector<double> squares = copy_numbers_to_host(v);
  const double mean = std::accumulate(squares.begin(), squares.end(), 0.0) / count;
  EXPECT_NEAR(mean, std::pow(0.999, steps), 6 * 0x1p-9 * std::sqrt(double{steps} / count));
}

TEST_P(KernelsBf16, WhatMustBeWideAndWhatMustNotIsChecked) {
  const Tensor x = make(DType::bf16, {2, 4}), f32 = make(DType::f32, {2, 4}), f64 = make(DType::f64, {2, 4});
  const Tensor row = make(DType::bf16, {4}), wide_row = make(DType::f32, {4}), stats = make(DType::bf16, {2});
  const Tensor targets = ids({0, 1}), each = make(DType::f32, {2});
  kernels->fill(x, 0), kernels->fill(f32, 1), kernels->fill(row, 0), kernels->fill(each, 1);
  EXPECT_THROW(f32.host<bf16>(), InvariantError);
  EXPECT_THROW(x.host<float>(), InvariantError);
  EXPECT_THROW(kernels->bias_gradient(x, row), InvariantError);
  EXPECT_THROW(kernels->rms_norm(x, row, 1e-5, x, stats), InvariantError);
  EXPECT_THROW(kernels->rms_norm_backward_weight(x, x, each, row), InvariantError);
  EXPECT_THROW(kernels->embedding_backward(targets, x, 0, x), InvariantError);
  EXPECT_THROW(kernels->row_max(x, stats), InvariantError);
  EXPECT_THROW(kernels->add_bias(wide_row, x), InvariantError);
  EXPECT_THROW(kernels->residual(x, f32, {}, x), InvariantError);
  EXPECT_THROW(kernels->copy(f64, x), InvariantError);
  EXPECT_THROW(kernels->matmul(f64, no, x, yes, make(DType::f64, {2, 2}), false), InvariantError);
  // bf16 where p lies would overwrite what is still to be read.
  EXPECT_THROW(kernels->cross_entropy_backward(f32, each, targets, 0, 1,
                                               Tensor::view_of(f32.host_bytes(), DType::bf16, {2, 4})),
               InvariantError);
  EXPECT_THROW(kernels->adamw(x, f32, x, x, {}), InvariantError);  // no word of how to round
  const std::vector<LogicalRun> some{{0, 7}}, all{{0, 8}};
  const StochasticRounding too_few{weight_rounding(1, "w", 1), some}, right{weight_rounding(1, "w", 1), all};
  EXPECT_THROW(kernels->adamw(x, f32, x, x, {.rounding = &too_few}), InvariantError);
  EXPECT_THROW(kernels->adamw(f32, f32, f32, f32, {.rounding = &right}), InvariantError);
  EXPECT_THROW(kernels->adamw(x, x, x, x, {.rounding = &right}), InvariantError);
  EXPECT_THROW(kernels->adamw(f32, f32, f32, f32, {}, f32), InvariantError);
  const Tensor remainders = make(DType::i16, {2, 4}), few = make(DType::i16, {7});
  EXPECT_THROW(kernels->adamw(f32, f32, f32, f32, {}, remainders), InvariantError);
  EXPECT_THROW(kernels->adamw(x, f32, x, x, {}, remainders), InvariantError);
  EXPECT_THROW(kernels->adamw(x, f32, f32, f32, {}, few), InvariantError);
  EXPECT_THROW(kernels->adamw(x, f32, f32, f32, {.rounding = &right}, remainders), InvariantError);
  EXPECT_THROW(kernels->copy(remainders, x), InvariantError);
  EXPECT_THROW(kernels->add(remainders, remainders), InvariantError);
}

// Also across pieces that threads cut, depths that a processor's own products take at once or do not, and
// what is narrow.
TEST_P(KernelsBf16, BitsOfProductsDoNotDependOnThreads) {
  if (GetParam().threads != 1) GTEST_SKIP() << "one thread is held against several";
  for (const auto& [m, n, depth] : {std::array<std::int64_t, 3>{300, 17, 3000},
                                    {64, 64, 4096},
                                    {130, 768, 1500},
                                    {1, 768, 768},
                                    {770, 129, 901},
                                    {515, 1030, 64}})
    for (DType tb : {DType::bf16, DType::f32})
      for (DType tc : {DType::bf16, DType::f32})
        for (Transpose turn_a : {no, yes})
          for (Transpose turn_b : {no, yes}) {
            if (!checks::is_taken()) continue;
            const Operand a = turn_a == yes ? narrow(depth, m) : narrow(m, depth);
            const Operand b = turn_b == yes ? random(tb, n, depth) : random(tb, depth, n),
                          c = random(tc, m, n);
            const Tensor first = make(tc, {m, n}), again = make(tc, {m, n});
            kernels->copy(c.held, first);
            kernels->matmul(a.held, turn_a, b.held, turn_b, first, true);
            for (int threads : {2, 5}) {
              kernels->copy(c.held, again);
              make_cpu_kernels(arena, DType::bf16, threads)
                  ->matmul(a.held, turn_a, b.held, turn_b, again, true);
              EXPECT_EQ(std::memcmp(first.host_bytes(), again.host_bytes(),
                                    static_cast<std::size_t>(first.bytes())),
                        0)
                  << m << " " << n << " " << depth << " on " << threads;
            }
          }
}

// Of fewer key/value heads than threads, and of more.
TEST_P(KernelsBf16, BitsOfAttentionDoNotDependOnThreads) {
  if (GetParam().threads != 1) GTEST_SKIP() << "one thread is held against several";
  constexpr std::int64_t length = 700, depth = 16;
  for (const std::int64_t kv_heads : {1, 2, 4})
    for (const bool of_queries : {true, false})
      for (const bool of_keys : {true, false}) {
        if (!of_queries && !of_keys) continue;
        const AttentionShape shape{.q_len = length,
                                   .kv_len = length,
                                   .num_heads = 4,
                                   .num_kv_heads = kv_heads,
                                   .head_dim = depth,
                                   .scale = 0.25};
        const Tensor q = narrow(length, 4 * depth).held, k = narrow(length, kv_heads * depth).held,
                     v = narrow(length, kv_heads * depth).held, dout = narrow(length, 4 * depth).held,
                     delta = wide(1, 4 * length).held.flat();
        const auto results = [&](int threads) {
          const auto on = make_cpu_kernels(arena, DType::bf16, threads);
          const Tensor out = make(DType::bf16, {length, 4 * depth}), lse = make(DType::f32, {4 * length}),
                       dq = make(DType::bf16, {length, 4 * depth}),
                       dk = make(DType::bf16, {length, kv_heads * depth}),
                       dv = make(DType::bf16, {length, kv_heads * depth});
          on->attention(q, k, v, shape, out, lse);
          on->attention_backward(q, k, v, dout, lse, delta, shape, of_queries ? dq : Tensor(),
                                 of_keys ? dk : Tensor(), of_keys ? dv : Tensor());
          std::vector<std::vector<double>> all{copy_numbers_to_host(out), copy_numbers_to_host(lse)};
          if (of_queries) all.push_back(copy_numbers_to_host(dq));
          if (of_keys) all.push_back(copy_numbers_to_host(dk)), all.push_back(copy_numbers_to_host(dv));
          return all;
        };
        const auto one = results(1);
        for (const int threads : {2, 3, 5}) EXPECT_EQ(one, results(threads)) << kv_heads << ", " << threads;
      }
}

TEST_P(KernelsBf16, OfNoDeviceTakeWhatTheseWould) {
  Arena real, none(Device::none);
  const auto made = make_kernels(real, recipe("bf16"), 3), dry = make_kernels(none, recipe("bf16"), 3);
  EXPECT_EQ(none.live(), real.live());
  EXPECT_EQ(none.live().total(), kernel_scratch_bytes(recipe("bf16"), 3));
}

std::vector<Maker> makers() {
  std::vector<Maker> all{{"reference", 0}};
  if (has_cpu_kernels()) all.insert(all.end(), {{"one_thread", 1}, {"three_threads", 3}});
  return all;
}
INSTANTIATE_TEST_SUITE_P(On, KernelsBf16, ::testing::ValuesIn(makers()),
                         [](const auto& maker) { return std::string(maker.param.name); });

}  // namespace
}  // namespace echelon::kernels_bf16_test
