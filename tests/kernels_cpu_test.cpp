// Every fast kernel against the reference in f64, on one thread and on several: the difference is bounded by
// c eps(f32) sqrt(length of the longest sum), and the bits do not depend on the number of threads.
#include <gtest/gtest.h>

#include "attention_shapes.h"
#include "attention_spoiled.h"
#include "case_choice.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/philox.h"
#include "tensor/kernels.h"
#include "tensor/normals.h"
#include "tensor/simd.h"

namespace echelon::kernels_cpu_test {
namespace {

constexpr double eps = std::numeric_limits<float>::epsilon();
constexpr float frame_value = 7.0f;

// The same numbers three times: f64 for the reference, f32 for the kernels on one thread and on several.
struct Operand {
  Tensor exact, one, several;
};

struct Size {
  std::int64_t rows, cols;
};
// Rows and columns around the widths of vectors; the last ones are large enough for threads and for groups of
// rows.
const std::vector<Size> sizes{{1, 1}, {3, 7}, {7, 64}, {2, 100}, {70, 257}, {200, 100}};

class KernelsCpu : public ::testing::Test {
 protected:
  Arena arena;
  std::unique_ptr<Kernels> reference = make_reference_kernels();
  std::unique_ptr<Kernels> one = make_cpu_kernels(arena, DType::f32, 1),
                           several = make_cpu_kernels(arena, DType::f32, 3);
  std::uint64_t draws = 0;

  // Normal numbers, `scale` times; a strided operand is a column range of a wider matrix filled with
  // frame_value.
  Operand random(std::int64_t rows, std::int64_t cols, bool strided = false, double scale = 1.0) {
    const Philox numbers(11, Stream::test, draws++);
    std::vector<float> values(static_cast<std::size_t>(rows * cols));
    fill_normals(numbers, scale, 0, values);
    const auto make = [&]<class F>(DType dtype, F) {
      Tensor whole(arena, MemoryCategory::other, dtype, {rows, cols + (strided ? 5 : 0)});
      std::fill_n(whole.host<F>(), whole.numel(), F(frame_value));
      const Tensor t = strided ? whole.column_range(2, 2 + cols) : whole;
      for (std::int64_t i = 0; i < rows; ++i)
        for (std::int64_t j = 0; j < cols; ++j)
          t.host<F>()[i * t.row_stride() + j] = values[static_cast<std::size_t>(i * cols + j)];
      return t;
    };
    return {make(DType::f64, double()), make(DType::f32, float()), make(DType::f32, float())};
  }
  Operand vector(std::int64_t n) { return flatten(random(1, n)); }
  static Operand flatten(const Operand& x) { return {x.exact.flat(), x.one.flat(), x.several.flat()}; }
  static Operand columns(const Operand& x, std::int64_t begin, std::int64_t end) {
    return {x.exact.column_range(begin, end), x.one.column_range(begin, end),
            x.several.column_range(begin, end)};
  }

  Tensor ids(const std::vector<std::int32_t>& values) {
    Tensor t(arena, MemoryCategory::other, DType::i32, {static_cast<std::int64_t>(values.size())});
    std::copy(values.begin(), values.end(), t.host<std::int32_t>());
    return t;
  }

  // call(kernels, of): of(operand) is the operand's tensor for these kernels.
  template <class Call>
  void run(const Call& call) {
    call(*reference, [](const Operand& x) { return x.exact; });
    call(*one, [](const Operand& x) { return x.one; });
    call(*several, [](const Operand& x) { return x.several; });
  }

  static void expect_close(const Operand& x, std::int64_t length, double c, const char* what) {
    double largest = 1;
    const auto each = [&](const auto& body) {
      for (std::int64_t i = 0; i < x.one.rows(); ++i)
        for (std::int64_t j = 0; j < x.one.cols(); ++j)
          body(x.exact.host<double>()[i * x.exact.row_stride() + j],
               x.one.host<float>()[i * x.one.row_stride() + j],
               x.several.host<float>()[i * x.several.row_stride() + j], i, j);
    };
    each([&](double exact, float, float, auto, auto) {
      if (std::isfinite(exact)) largest = std::max(largest, std::abs(exact));
    });
    const double tolerance = c * eps * std::sqrt(static_cast<double>(length)) * largest;
    std::int64_t wrong = 0, different = 0, row = -1, col = -1;
    each([&](double exact, float a, float b, std::int64_t i, std::int64_t j) {
      if (!(static_cast<double>(a) == exact || std::abs(static_cast<double>(a) - exact) <= tolerance)) {
        ++wrong;
        row = i, col = j;
      }
      if (std::memcmp(&a, &b, sizeof(a)) != 0) ++different;
    });
    if (wrong > 0) {
      ADD_FAILURE() << what << " " << x.one.rows() << " x " << x.one.cols() << ": " << wrong
                    << " elements off by more than " << tolerance << ", the last at " << row << ", " << col
                    << ": " << x.exact.host<double>()[row * x.exact.row_stride() + col] << " expected, not "
                    << x.one.host<float>()[row * x.one.row_stride() + col];
    }
    EXPECT_EQ(different, 0) << what << " " << x.one.rows() << " x " << x.one.cols()
                            << ": threads change the bits";
    if (x.one.row_stride() != x.one.cols()) {
      for (std::int64_t i = 0; i < x.one.rows(); ++i) {
        const float* first = x.one.host<float>() + i * x.one.row_stride();
        for (std::int64_t j : {std::int64_t{-2}, std::int64_t{-1}, x.one.cols(), x.one.cols() + 2})
          EXPECT_EQ(first[j], frame_value) << what << ": written outside of row " << i;
      }
    }
  }
};

TEST_F(KernelsCpu, Matmul) {
  const std::vector<std::vector<std::int64_t>> shapes{
      {1, 1, 1},     {7, 100, 257},  {70, 257, 64},  {257, 130, 100}, {2, 1100, 65}, {1, 600, 300},
      {600, 1, 300}, {300, 17, 900}, {65, 64, 2000}, {400, 300, 70},  {3, 2, 0}};
  for (const auto& s : shapes)
    for (bool ta : {false, true})
      for (bool tb : {false, true})
        for (bool strided : {false, true}) {
          if (!checks::is_taken(4)) continue;
          const Operand a = random(ta ? s[2] : s[0], ta ? s[0] : s[2], strided);
          const Operand b = random(tb ? s[1] : s[2], tb ? s[2] : s[1], strided),
                        c = random(s[0], s[1], strided);
          run([&](Kernels& k, auto of) {
            const Transpose turn_a = ta ? Transpose::yes : Transpose::no,
                            turn_b = tb ? Transpose::yes : Transpose::no;
            k.matmul(of(a), turn_a, of(b), turn_b, of(c), strided);
          });
          expect_close(c, s[2] + 1, 1, "matmul");
        }
}

// Our own products, and what else attention and a norm are made of, by each instruction set.
TEST_F(KernelsCpu, ByEachInstructionSet) {
  const auto invariant = make_cpu_kernels(arena, DType::f32, 3, Numerics::invariant);
  const Operand a = random(70, 130), b = random(257, 130), c = random(70, 257), w = vector(130),
                y = random(70, 130), stats = random(70, 1), q = random(70, 32), out = random(70, 32),
                lse = vector(140), h = random(70, 130, false, 30), made = random(70, 130);
  const AttentionShape shape{
      .q_len = 70, .kv_len = 70, .num_heads = 2, .num_kv_heads = 2, .head_dim = 16, .scale = 0.25};
  const auto call = [&](Kernels& k, auto of) {
    k.matmul(of(a), Transpose::no, of(b), Transpose::yes, of(c), false);
    k.rms_norm(of(a), of(w), 1e-5, of(y), of(stats));
    k.attention(of(q), of(q), of(q), shape, of(out), of(lse));
    k.activate(Activation::gelu, of(h), Tensor(), of(made));
  };
  call(*reference, [](const Operand& x) { return x.exact; });
  on_each_instruction_set([&](const char* set) {
    SCOPED_TRACE(set);
    call(*invariant, [](const Operand& x) { return x.one; });
    call(*invariant, [](const Operand& x) { return x.several; });
    expect_close(c, 130, 1, "matmul"), expect_close(y, 130, 8, "rms_norm");
    expect_close(out, 70, 4, "attention"), expect_close(lse, 70, 4, "attention's lse");
    expect_close(made, 1, 8, "gelu");
  });
}

// Products of a mixture's experts: of uneven sizes, some empty.
TEST_F(KernelsCpu, GroupedMatmul) {
  for (bool accumulate : {false, true}) {
    std::vector<Operand> a, b, c, alone;
    for (std::int64_t m : {70, 0, 3, 300, 1}) {
      a.push_back(random(m, 130));
      b.push_back(random(90, 130));
      c.push_back(random(m, 90, true));
      alone.push_back({c.back().exact, Tensor(arena, MemoryCategory::other, DType::f32, {m, 90}), {}});
      if (m > 0) one->copy(c.back().one, alone.back().one);
    }
    run([&](Kernels& k, auto of) {
      std::vector<MatrixProduct> products;
      for (std::size_t i = 0; i < a.size(); ++i)
        products.push_back({of(a[i]), Transpose::no, of(b[i]), Transpose::yes, of(c[i]), accumulate});
      k.grouped_matmul(products);
      k.grouped_matmul({});
    });
    for (std::size_t i = 0; i < a.size(); ++i) {
      expect_close(c[i], 131, 1, "grouped_matmul");
      one->matmul(a[i].one, Transpose::no, b[i].one, Transpose::yes, alone[i].one, accumulate);
      for (std::int64_t row = 0; row < alone[i].one.rows(); ++row)
        EXPECT_EQ(std::memcmp(alone[i].one.host<float>() + row * 90,
                              c[i].one.host<float>() + row * c[i].one.row_stride(), 90 * sizeof(float)),
                  0)
            << "another result than by itself";
    }
  }
}

TEST_F(KernelsCpu, MatmulBitsDoNotDependOnThreads) {
  const std::vector<std::vector<std::int64_t>> shapes{
      {300, 17, 3000}, {64, 64, 4096}, {130, 768, 1500}, {1, 768, 768}, {770, 129, 900}};
  for (const auto& s : shapes)
    for (bool tb : {false, true}) {
      const Operand a = random(s[0], s[2]), b = random(tb ? s[1] : s[2], tb ? s[2] : s[1]),
                    c = random(s[0], s[1]);
      const Transpose turn = tb ? Transpose::yes : Transpose::no;
      one->matmul(a.one, Transpose::no, b.one, turn, c.one, false);
      for (int threads : {2, 4}) {
        make_cpu_kernels(arena, DType::f32, threads)
            ->matmul(a.one, Transpose::no, b.one, turn, c.several, false);
        EXPECT_EQ(
            std::memcmp(c.one.host_bytes(), c.several.host_bytes(), static_cast<std::size_t>(c.one.bytes())),
            0)
            << s[0] << " " << s[1] << " " << s[2] << " on " << threads;
      }
    }
}

// oneDNN makes some of these parts and our kernel others, whichever is faster.
TEST_F(KernelsCpu, MatmulBitsAreThoseOfItsParts) {
  for (const std::int64_t depth : {384, 500, 768, 1376, 2000})
    for (const bool ta : {false, true})
      for (const bool tb : {false, true}) {
        if (!checks::is_taken(3)) continue;
        constexpr std::int64_t rows = 1500, cols = 400;
        const Operand a = random(ta ? depth : rows, ta ? rows : depth),
                      b = random(tb ? cols : depth, tb ? depth : cols), c = random(rows, cols);
        const Transpose turn_a = ta ? Transpose::yes : Transpose::no,
                        turn_b = tb ? Transpose::yes : Transpose::no;
        one->matmul(a.one, turn_a, b.one, turn_b, c.one, false);
        for (const Range part : {Range{0, 300}, {300, 400}, {400, rows}}) {
          const Tensor of_a =
              ta ? a.one.column_range(part.begin, part.end) : a.one.row_range(part.begin, part.end);
          one->matmul(of_a, turn_a, b.one, turn_b, c.several.row_range(part.begin, part.end), false);
        }
        EXPECT_EQ(
            std::memcmp(c.one.host_bytes(), c.several.host_bytes(), static_cast<std::size_t>(c.one.bytes())),
            0)
            << depth << (ta ? " T" : " N") << (tb ? "T" : "N");
      }
}

TEST_F(KernelsCpu, ElementPasses) {
  for (const auto& [rows, cols] : sizes)
    for (bool strided : {false, true}) {
      const Operand x = random(rows, cols, strided), y = random(rows, cols, strided),
                    z = random(rows, cols, strided);
      const Operand bias = vector(cols), sum = vector(cols);
      run([&](Kernels& k, auto of) {
        k.add(of(x), of(y));
        k.scale(of(y), 0.7);
        k.add_bias(of(bias), of(y));
        k.copy(of(y), of(z));
        k.residual(of(x), of(z), of(bias), of(z));
        k.bias_gradient(of(z), of(sum));
      });
      expect_close(y, 1, 4, "add, scale, add_bias");
      expect_close(z, 1, 4, "copy, residual");
      expect_close(sum, rows, 4, "bias_gradient");
      run([&](Kernels& k, auto of) {
        k.residual(of(x), of(y), Tensor(), of(y));
        k.fill(of(x), 2.5);
      });
      expect_close(y, 1, 4, "residual without bias");
      expect_close(x, 1, 0, "fill");
    }
}

TEST_F(KernelsCpu, SumSquaresAndAllFinite) {
  for (const auto& [rows, cols] : sizes)
    for (bool strided : {false, true}) {
      const Operand x = random(rows, cols, strided);
      if (!strided)
        for (std::int64_t block : {std::int64_t{7}, std::int64_t{1024}, rows * cols}) {
          const auto sums = [&](Kernels& kernels, const Tensor& of) {
            std::vector<double> result(static_cast<std::size_t>((of.numel() + block - 1) / block));
            kernels.sum_squares(of, block, Tensor::view_of(result.data(), DType::f64, {std::ssize(result)}));
            return result;
          };
          const std::vector<double> exact = sums(*reference, x.exact), sum = sums(*one, x.one);
          for (std::size_t i = 0; i < exact.size(); ++i) EXPECT_NEAR(sum[i], exact[i], 1e-12 * exact[i]);
          EXPECT_EQ(sum, sums(*several, x.several));
        }
      for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::quiet_NaN()})
        for (std::int64_t i : {std::int64_t{0}, rows - 1}) {
          EXPECT_TRUE(several->all_finite(x.several));
          float& element = x.several.host<float>()[i * x.several.row_stride() + cols - 1];
          const float before = element;
          element = bad;
          EXPECT_FALSE(several->all_finite(x.several));
          EXPECT_FALSE(one->all_finite(x.several));
          element = before;
        }
    }
}

// The same bits as the plain loops have, of both types, by every instruction set and any threads.
TEST_F(KernelsCpu, LargestAndExactSums) {
  const auto narrow = make_cpu_kernels(arena, DType::bf16, 3);
  for (const std::int64_t n : {1, 7, 100, 8192, 300'001}) {
    const Tensor x = vector(n).one, y(arena, MemoryCategory::other, DType::bf16, {n});
    x.host<float>()[n / 2] = -5.5f, x.host<float>()[n / 3] = 1e-30f;
    narrow->copy(x, y);
    on_each_instruction_set([&](const char* set) {
      for (const Tensor& t : {x, y}) {
        const double most = reference->largest(t), scale = 1.0 / 64;
        const ExactSum sum = reference->sum_squares_exactly(t, scale);
        for (Kernels* const on : {one.get(), several.get(), narrow.get()}) {
          EXPECT_EQ(on->largest(t), most) << set << ", " << n;
          const ExactSum here = on->sum_squares_exactly(t, scale);
          EXPECT_EQ(here.high, sum.high) << set << ", " << n;
          EXPECT_EQ(here.low, sum.low) << set << ", " << n;
        }
      }
    });
    for (const float bad : {std::numeric_limits<float>::infinity(), std::bit_cast<float>(0xffc00001u)}) {
      x.host<float>()[n - 1] = bad;
      const double most = several->largest(x);
      EXPECT_TRUE(std::isnan(bad) ? std::isnan(most) : most == bad);
    }
  }
}

TEST_F(KernelsCpu, LayerNorm) {
  for (const auto& [rows, cols] : sizes)
    for (bool strided : {false, true}) {
      const Operand x = random(rows, cols, strided), dy = random(rows, cols, strided),
                    dx = random(rows, cols, strided);
      const Operand y = random(rows, cols, strided), again = random(rows, cols, strided),
                    stats = random(rows, 2);
      const Operand w = vector(cols), b = vector(cols), dw = vector(cols), db = vector(cols);
      run([&](Kernels& k, auto of) {
        k.layer_norm(of(x), of(w), of(b), 1e-2, of(y), of(stats));
        k.layer_norm_again(of(x), of(w), of(b), of(stats), of(again));
        k.layer_norm_backward_input(of(dy), of(x), of(w), of(stats), of(dx));
        k.layer_norm_backward_weight(of(dy), of(x), of(stats), of(dw), of(db));
      });
      expect_close(y, cols, 8, "layer_norm"), expect_close(again, cols, 8, "layer_norm_again");
      expect_close(stats, cols, 8, "layer_norm stats"),
          expect_close(dx, cols, 8, "layer_norm_backward_input");
      expect_close(dw, rows, 8, "layer_norm dw"), expect_close(db, rows, 8, "layer_norm db");
      for (bool weighted : {true, false}) {
        run([&](Kernels& k, auto of) {
          const Tensor weight = weighted ? of(w) : Tensor();
          k.layer_norm(of(x), weight, Tensor(), 1e-2, of(y), of(stats));
          k.layer_norm_again(of(x), weight, Tensor(), of(stats), of(again));
          k.layer_norm_backward_input(of(dy), of(x), weight, of(stats), of(dx));
        });
        expect_close(y, cols, 8, "layer_norm without"), expect_close(again, cols, 8, "and again");
        expect_close(dx, 2 * cols, 8, "layer_norm_backward_input without");
      }
    }
}

TEST_F(KernelsCpu, RmsNorm) {
  for (const auto& [rows, cols] : sizes)
    for (bool strided : {false, true}) {
      const Operand x = random(rows, cols, strided), dy = random(rows, cols, strided),
                    dx = random(rows, cols, strided);
      const Operand y = random(rows, cols, strided), again = random(rows, cols, strided),
                    stats = random(rows, 1);
      const Operand w = vector(cols), dw = vector(cols);
      run([&](Kernels& k, auto of) {
        k.rms_norm(of(x), of(w), 1e-2, of(y), of(stats));
        k.rms_norm_again(of(x), of(w), of(stats), of(again));
        k.rms_norm_backward_input(of(dy), of(x), of(w), of(stats), of(dx));
        k.rms_norm_backward_weight(of(dy), of(x), of(stats), of(dw));
      });
      expect_close(y, cols, 8, "rms_norm"), expect_close(again, cols, 8, "rms_norm_again");
      expect_close(stats, cols, 8, "rms_norm stats"), expect_close(dx, cols, 8, "rms_norm_backward_input");
      expect_close(dw, rows, 8, "rms_norm dw");
      run([&](Kernels& k, auto of) {
        k.rms_norm(of(x), Tensor(), 1e-2, of(y), of(stats));
        k.rms_norm_again(of(x), Tensor(), of(stats), of(again));
        k.rms_norm_backward_input(of(dy), of(x), Tensor(), of(stats), of(dx));
      });
      expect_close(y, cols, 8, "rms_norm without"), expect_close(again, cols, 8, "and again");
      expect_close(dx, 2 * cols, 8, "rms_norm_backward_input without");
    }
}

TEST_F(KernelsCpu, RmsNormOfRowsThatAreCut) {
  for (const auto& [rows, cols] : sizes)
    for (bool strided : {false, true}) {
      const Operand x = random(rows, cols, strided), dy = random(rows, cols, strided),
                    dx = random(rows, cols, strided), y = random(rows, cols, strided),
                    stats = random(rows, 1), sums = random(rows, 1), w = vector(cols);
      const double columns = 2.0 * static_cast<double>(cols);
      run([&](Kernels& k, auto of) {
        k.row_squares(of(x), of(stats));
        k.rms_norm_of_squares(of(x), of(w), 1e-2, columns, of(y), of(stats));
        k.rms_norm_backward_sums(of(dy), of(x), of(w), of(stats), of(sums));
        k.rms_norm_backward_input_of_sums(of(dy), of(x), of(w), of(stats), of(sums), columns, of(dx));
      });
      expect_close(stats, cols, 8, "row_squares"), expect_close(y, cols, 8, "rms_norm_of_squares");
      expect_close(sums, cols, 8, "rms_norm_backward_sums");
      expect_close(dx, cols, 8, "rms_norm_backward_input_of_sums");
    }
}

TEST_F(KernelsCpu, GeluOfTheErrorFunction) {
  for (const auto& [rows, cols] : sizes)
    for (bool strided : {false, true}) {
      const Operand h = random(rows, cols, strided, 3.0), dy = random(rows, cols, strided),
                    bias = vector(cols);
      const Operand y = random(rows, cols, strided);
      run([&](Kernels& k, auto of) {
        k.activate(Activation::gelu_erf, of(h), of(bias), of(y));
        k.activate_backward(Activation::gelu_erf, of(h), of(dy));
      });
      expect_close(y, 1, 8, "gelu_erf"), expect_close(h, 1, 8, "gelu_erf_backward y");
      expect_close(dy, 1, 8, "gelu_erf_backward dh");
    }
}

TEST_F(KernelsCpu, Relus) {
  for (const Activation relu : {Activation::relu, Activation::relu2})
    for (const auto& [rows, cols] : sizes)
      for (bool strided : {false, true}) {
        const Operand h = random(rows, cols, strided), dy = random(rows, cols, strided), bias = vector(cols);
        const Operand y = random(rows, cols, strided), in_place = random(rows, cols, strided);
        run([&](Kernels& k, auto of) {
          k.activate(relu, of(h), of(bias), of(y));
          k.activate_backward(relu, of(h), of(dy));
          k.activate(relu, of(in_place), Tensor(), of(in_place));
        });
        expect_close(y, 1, 8, name_of(relu)), expect_close(in_place, 1, 8, "in place");
        expect_close(h, 1, 8, "backward y"), expect_close(dy, 1, 8, "backward dh");
      }
}

TEST_F(KernelsCpu, Gates) {
  for (const auto& [rows, cols] : sizes)
    for (double scale : {1.0, 30.0})  // 30: both tails of the sigmoid
      for (bool strided : {false, true}) {
        const Operand h = random(rows, cols, strided, scale), dy = random(rows, cols, strided),
                      bias = vector(cols);
        const Operand y = random(rows, cols, strided), in_place = random(rows, cols, strided, scale);
        run([&](Kernels& k, auto of) {
          k.activate(Activation::gelu, of(h), of(bias), of(y));
          k.activate_backward(Activation::gelu, of(h), of(dy));
          k.activate(Activation::gelu, of(in_place), Tensor(), of(in_place));
        });
        expect_close(y, 1, 8, "gelu"), expect_close(in_place, 1, 8, "gelu in place");
        expect_close(h, 1, 8, "gelu_backward y"), expect_close(dy, 1, 16 * scale, "gelu_backward dh");
        const Operand gate_up = random(rows, 2 * cols, strided, scale), z = random(rows, cols, strided);
        const Operand dz = random(rows, cols, strided);
        run([&](Kernels& k, auto of) {
          k.gated(Activation::swiglu, of(gate_up), of(z));
          k.gated_backward(Activation::swiglu, of(gate_up), of(dz));
        });
        expect_close(z, 1, 8, "swiglu"), expect_close(dz, 1, 8, "swiglu_backward y");
        expect_close(gate_up, 1, 8 * scale, "swiglu_backward");
        const Operand other = random(rows, 2 * cols, strided, scale), dw = random(rows, cols, strided);
        run([&](Kernels& k, auto of) {
          k.gated(Activation::geglu, of(other), of(z));
          k.gated_backward(Activation::geglu, of(other), of(dw));
        });
        expect_close(z, 1, 8, "geglu"), expect_close(dw, 1, 8, "geglu_backward y");
        expect_close(other, 1, 16 * scale, "geglu_backward");
        const Operand clamped = random(rows, 2 * cols, strided, scale), du = random(rows, cols, strided);
        const SwigluClamp clamp{.alpha = 1.7, .limit = 0.8};
        run([&](Kernels& k, auto of) {
          k.gated(Activation::clamped_swiglu, of(clamped), of(z), clamp);
          k.gated_backward(Activation::clamped_swiglu, of(clamped), of(du), clamp);
        });
        expect_close(z, 1, 8, "clamped swiglu"), expect_close(du, 1, 8, "clamped swiglu_backward y");
        expect_close(clamped, 1, 16, "clamped swiglu_backward");
      }
}

TEST_F(KernelsCpu, XieluAndSigmoidGates) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& [rows, cols] : sizes)
    for (const double scale : {1.0, 30.0})
      for (const bool strided : {false, true})
        for (const bool spoiled : {false, true}) {
          const Operand h = random(rows, cols, strided, scale), alphas = vector(2),
                        y = random(rows, cols, strided), dy = random(rows, cols, strided),
                        dalphas = random(rows, 2), gate = random(rows, cols, strided, scale),
                        x = random(rows, cols, strided), gated = random(rows, cols, strided),
                        dgated = random(rows, cols, strided);
          const std::int64_t row = rows / 2, col = cols - 1;
          for (const Operand& of : {h, gate}) {
            if (!spoiled) continue;
            of.exact.host<double>()[row * of.exact.row_stride() + col] = nan;
            for (const Tensor& t : {of.one, of.several})
              t.host<float>()[row * t.row_stride() + col] = static_cast<float>(nan);
          }
          const auto expect = [&](const Operand& of, std::int64_t length, double c, const char* what) {
            for (std::int64_t j = 0; j < of.one.cols(); ++j) {
              double& exact = of.exact.host<double>()[row * of.exact.row_stride() + j];
              float &a = of.one.host<float>()[row * of.one.row_stride() + j],
                    &b = of.several.host<float>()[row * of.several.row_stride() + j];
              if (!std::isnan(exact)) continue;
              EXPECT_TRUE(std::isnan(a) && std::isnan(b)) << what;
              exact = a = b = 0;
            }
            expect_close(of, length, c, what);
          };
          run([&](Kernels& k, auto of) {
            k.xielu(of(h), of(alphas), of(y));
            k.xielu_backward(of(h), of(alphas), of(dy), of(dalphas));
            k.sigmoid_gate(of(x), of(gate), of(gated));
          });
          expect(y, 1, 8, "xielu"), expect(h, 1, 8, "xielu_backward y"), expect(dy, 1, 8, "xielu_backward");
          expect(dalphas, cols, 8, "xielu_backward's alphas"), expect(gated, 1, 8, "sigmoid_gate");
          run([&](Kernels& k, auto of) { k.sigmoid_gate_backward(of(x), of(gate), of(dgated), of(gated)); });
          expect(gate, 1, 8, "sigmoid_gate_backward's gate"), expect(dgated, 1, 8, "sigmoid_gate_backward");
          expect(gated, 1, 8, "sigmoid_gate_backward's output");
        }
}

// Far out an activation is 0 or what it was given, and its slope 0 or 1.
TEST_F(KernelsCpu, ActivationsOfLargeNumbers) {
  std::vector<double> points;
  for (const double size :
       {30.0, 79.0, 81.0, 86.0, 88.0, 90.0, 110.0, 1e3, 1e6, 1e9, 1e11, 1e13, 1e18, 1e20, 1e36})
    points.insert(points.end(), {size, -size});
  const auto cols = std::ssize(points);
  const auto spread = [&](const Operand& x, std::int64_t begin, double factor) {
    for (std::int64_t j = 0; j < cols; ++j) {
      const auto value = static_cast<float>(factor * points[static_cast<std::size_t>(j)]);
      x.exact.host<double>()[begin + j] = value;
      x.one.host<float>()[begin + j] = x.several.host<float>()[begin + j] = value;
    }
  };
  const auto expect_each = [&](const Operand& x, const std::string& what) {
    for (std::int64_t j = 0; j < x.exact.numel(); ++j) {
      const double exact = x.exact.host<double>()[j];
      EXPECT_NEAR(x.one.host<float>()[j], exact, 1e-30 + 16 * eps * std::abs(exact))
          << what << " at " << points[static_cast<std::size_t>(j % cols)];
    }
  };
  for (const Activation a : {Activation::gelu, Activation::gelu_erf, Activation::relu}) {
    const Operand h = random(1, cols), y = random(1, cols), dy = random(1, cols);
    spread(h, 0, 1);
    run([&](Kernels& k, auto of) {
      k.fill(of(dy), 1);
      k.activate(a, of(h), Tensor(), of(y));
      k.activate_backward(a, of(h), of(dy));
    });
    expect_each(y, name_of(a)), expect_each(h, std::string(name_of(a)) + " of backward");
    expect_each(dy, std::string(name_of(a)) + "'s slope");
  }
  for (const Activation a : {Activation::swiglu, Activation::geglu, Activation::clamped_swiglu}) {
    const Operand h = random(1, 2 * cols), y = random(1, cols), dy = random(1, cols);
    run([&](Kernels& k, auto of) { k.fill(of(h), 1), k.fill(of(dy), 1); });
    spread(h, 0, 1);
    const SwigluClamp clamp{.alpha = 1.0, .limit = 2};
    run([&](Kernels& k, auto of) {
      k.gated(a, of(h), of(y), clamp);
      k.gated_backward(a, of(h), of(dy), clamp);
    });
    expect_each(y, name_of(a)), expect_each(h, std::string(name_of(a)) + ", the gate's gradient");
    expect_each(dy, std::string(name_of(a)) + " of backward");
  }
}

// What is not a number says that a run went wrong: no activation hides it, at any place of a vector.
TEST_F(KernelsCpu, ActivationsKeepWhatIsNotANumber) {
  constexpr std::int64_t rows = 3, cols = 37;
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const auto spoil = [&](const Operand& x) {
    for (std::int64_t i = 0; i < x.exact.numel(); i += 5) {
      x.exact.host<double>()[i] = nan;
      x.one.host<float>()[i] = x.several.host<float>()[i] = static_cast<float>(nan);
    }
  };
  std::int64_t found = 0;
  const auto expect_same = [&](const Operand& x, const std::string& what) {
    for (std::int64_t i = 0; i < x.exact.numel(); ++i) {
      const bool is_nan = std::isnan(x.exact.host<double>()[i]);
      found += is_nan;
      EXPECT_EQ(std::isnan(x.one.host<float>()[i]), is_nan) << what << ", element " << i;
      EXPECT_EQ(std::isnan(x.several.host<float>()[i]), is_nan) << what << ", element " << i;
    }
  };
  for (const Activation a : {Activation::gelu, Activation::gelu_erf, Activation::relu, Activation::relu2,
                             Activation::swiglu, Activation::geglu, Activation::clamped_swiglu})
    for (const bool of_gradient : {false, true}) {
      const std::string name = std::string(name_of(a)) + (of_gradient ? " of a gradient" : "");
      const SwigluClamp clamp{.alpha = 1.7, .limit = 0.8};
      const std::int64_t width = is_gated(a) ? 2 * cols : cols;
      const Operand h = random(rows, width), dy = random(rows, cols), y = random(rows, cols);
      spoil(of_gradient ? dy : h);
      run([&](Kernels& k, auto of) {
        if (is_gated(a)) {
          k.gated(a, of(h), of(y), clamp);
          k.gated_backward(a, of(h), of(dy), clamp);
        } else {
          k.activate(a, of(h), Tensor(), of(y));
          k.activate_backward(a, of(h), of(dy));
        }
      });
      found = 0;
      expect_same(y, name), expect_same(h, name + ", h of backward"),
          expect_same(dy, name + ", dy of backward");
      EXPECT_GT(found, 0) << name;
      if (a != Activation::swiglu && a != Activation::clamped_swiglu && a != Activation::relu2) continue;
      const Operand of_expert = random(rows, width), d_expert = random(rows, cols), weights = vector(rows),
                    d_weights = vector(rows);
      spoil(of_gradient ? d_expert : of_expert);
      run([&](Kernels& k, auto of) {
        k.weighted_activation_backward(a, of(of_expert), of(d_expert), of(weights), of(d_weights), clamp);
      });
      expect_same(of_expert, name + " of an expert"), expect_same(d_expert, name + " of an expert, dy");
      expect_same(d_weights, name + ", of the weights");
    }
}

TEST_F(KernelsCpu, WeightedActivationsOfExperts) {
  for (const auto& [rows, cols] : sizes)
    for (const auto& [strided, activation] : {std::pair{false, Activation::swiglu},
                                              {true, Activation::swiglu},
                                              {true, Activation::clamped_swiglu},
                                              {false, Activation::relu2},
                                              {true, Activation::relu2}}) {
      const std::int64_t width = is_gated(activation) ? 2 * cols : cols;
      const Operand gate_up = random(rows, width, strided), dy = random(rows, cols, strided),
                    weights = vector(rows), d_weights = vector(rows);
      run([&, activation = activation](Kernels& k, auto of) {
        k.weighted_activation_backward(activation, of(gate_up), of(dy), of(weights), of(d_weights),
                                       {.alpha = 1.7, .limit = 0.8});
      });
      expect_close(gate_up, 1, 8, "weighted_activation_backward"), expect_close(dy, 1, 8, "weighted y");
      expect_close(d_weights, cols, 4, "gradient of the weights");
    }
}

TEST_F(KernelsCpu, CombineRows) {
  for (const auto& [rows, cols] : sizes)
    for (bool weighted : {false, true}) {
      std::vector<std::int32_t> values;
      for (std::int64_t i = 0; i < 3 * rows; ++i) values.push_back(static_cast<std::int32_t>(i * i % 13 - 1));
      const Tensor places = ids(values).reshape({rows, 3});
      const Operand x = random(12, cols, true), y = random(rows, cols, true), weights = vector(3 * rows);
      run([&](Kernels& k, auto of) {
        k.combine_rows(of(x), places, weighted ? of(weights) : Tensor(), of(y));
      });
      expect_close(y, 3, 2, "combine_rows");
    }
}

TEST_F(KernelsCpu, Rope) {
  std::vector<std::int32_t> two_sequences, stripes;
  for (std::int32_t r = 0; r < 70; ++r) two_sequences.push_back(1000 + r % 35);
  for (std::int32_t r = 0; r < 70; ++r) stripes.push_back(r < 30 ? 3 + 5 * r : 400 - r);
  const Tensor late = ids(two_sequences), jumping = ids(stripes);
  for (std::int64_t head_dim : {2, 6, 64, 100})
    for (bool strided : {false, true}) {
      const Operand x = random(2 * 35, 4 * head_dim, strided);
      RopeTurns growing = RopeTurns::plain(1e4, head_dim);
      growing.growth = 0.1, growing.growth_length = 90;
      run([&](Kernels& k, auto of) {
        k.rope(of(x), head_dim, late, RopeTurns::plain(1e4, head_dim), false);
        k.rope(of(x), head_dim, jumping, RopeTurns::plain(1e4, head_dim), true);
        k.rope(of(x), head_dim, jumping, growing, true);
      });
      expect_close(x, 1, 8, "rope");
    }
}

TEST_F(KernelsCpu, Embedding) {
  for (const auto& [rows, cols] : sizes) {
    std::vector<std::int32_t> values;
    for (std::int64_t i = 0; i < rows; ++i) values.push_back(static_cast<std::int32_t>(i * i % 17 - 1));
    const Tensor tokens = ids(values);
    const Operand table = random(9, cols), y = random(rows, cols, true), dtable = random(9, cols);
    const Operand dy = random(rows, cols);
    run([&](Kernels& k, auto of) {
      k.embedding(tokens, of(table), 3, of(y));
      k.embedding_backward(tokens, of(dy), 3, of(dtable));
    });
    expect_close(y, 1, 0, "embedding"), expect_close(dtable, rows, 2, "embedding_backward");
  }
}

TEST_F(KernelsCpu, CrossEntropy) {
  for (const auto& [rows, cols] : sizes)
    for (const auto& [strided, cap] : {std::pair{false, 0.0}, {true, 0.0}, {false, 6.0}, {true, 6.0}}) {
      std::vector<std::int32_t> values;  // some ignored, some held elsewhere
      for (std::int64_t i = 0; i < rows; ++i)
        values.push_back(static_cast<std::int32_t>(i * 31 % (cols + 4) - 1));
      const Tensor targets = ids(values);
      const Operand p = random(rows, cols, strided, 10.0), max = vector(rows), sum = vector(rows),
                    target = vector(rows);
      run([&, cap = cap](Kernels& k, auto of) {
        if (cap > 0) k.soft_cap(of(p), cap);
        k.row_max(of(p), of(max));
        k.exp_sum(of(p), of(max), targets, 1, of(sum), of(target));
      });
      // A logit that is off by so much is in its exponential too.
      const double bent = cap > 0 ? 4 * cap : 0;
      expect_close(max, 1, bent, "row_max"), expect_close(p, 1, 8 + bent, "exp_sum p");
      expect_close(sum, cols, 4 + bent, "exp_sum"), expect_close(target, 1, 2 + bent, "exp_sum target");
      const Operand apart = random(rows, cols, strided);
      run([&, cap = cap](Kernels& k, auto of) {
        k.cross_entropy_backward(of(p), of(sum), targets, 1, 0.25, of(apart), {cap, of(max)});
        k.cross_entropy_backward(of(p), of(sum), targets, 1, 0.25, of(p), {cap, of(max)});
      });
      expect_close(p, cols, 4 + bent, "cross_entropy_backward");
      expect_close(apart, cols, 4 + bent, "cross_entropy_backward to another place");
      for (std::int64_t i = 0; i < rows; ++i)
        for (std::int64_t j = 0; j < cols; ++j)
          ASSERT_EQ(p.one.host<float>()[i * p.one.row_stride() + j],
                    apart.one.host<float>()[i * apart.one.row_stride() + j]);
      const Operand whole = random(rows, cols, strided, 10.0);
      run([&, cap = cap](Kernels& k, auto of) {
        if (cap > 0) k.soft_cap(of(whole), cap);
        k.cross_entropy(of(whole), targets, 0.25, cap, of(max), of(sum), of(target), of(apart));
      });
      expect_close(max, 1, bent, "cross_entropy max"), expect_close(sum, cols, 4 + bent, "cross_entropy sum");
      expect_close(target, 1, 2 + bent, "cross_entropy target");
      expect_close(apart, cols, 8 + bent, "cross_entropy");
    }
}

TEST_F(KernelsCpu, AdamW) {
  for (std::int64_t n : {1, 7, 100, 40001}) {
    const Operand p = vector(n), g = vector(n), m = vector(n), v = vector(n);
    const auto positive = [](double x) { return std::abs(x); };
    std::transform(v.exact.host<double>(), v.exact.host<double>() + n, v.exact.host<double>(), positive);
    for (const Tensor& t : {v.one, v.several})
      std::transform(t.host<float>(), t.host<float>() + n, t.host<float>(),
                     [](float x) { return std::abs(x); });
    const AdamWStep step{.lr = 1e-1,
                         .beta1 = 0.9,
                         .beta2 = 0.99,
                         .eps = 1e-5,
                         .weight_decay = 0.1,
                         .step = 3,
                         .gradient_scale = 0.5};
    run([&](Kernels& k, auto of) { k.adamw(of(p), of(g), of(m), of(v), step); });
    expect_close(p, 1, 16, "adamw p"), expect_close(m, 1, 4, "adamw m"), expect_close(v, 1, 4, "adamw v");
  }
}

TEST_F(KernelsCpu, Attention) {  // long
  const std::vector<AttentionShape> shapes = attention_shapes();
  std::vector<AttentionShape> all = shapes;
  for (AttentionShape s : shapes) {  // the same with documents: some queries then see no key
    s.first_keys = ids(first_keys_of_documents(s));
    all.push_back(s);
  }
  for (std::size_t i = 0; i < 2 * shapes.size(); ++i) {
    all.push_back(all[i]);
    all.back().cap = 0.7;
  }
  for (AttentionShape s : all) {
    s.scale = 1 / std::sqrt(static_cast<double>(s.head_dim));
    const std::int64_t c = s.num_heads * s.head_dim, kv = s.num_kv_heads * s.head_dim, n = s.batch * s.q_len;
    const std::int64_t rows = s.kv_batch_stride > 0 ? s.batch * s.kv_batch_stride : s.batch * s.kv_len;
    const Operand q = random(n, c, true), keys_values = random(rows, 2 * kv), out = random(n, c, true);
    const Operand k = columns(keys_values, 0, kv), v = columns(keys_values, kv, 2 * kv);
    const Operand lse = vector(s.batch * s.num_heads * s.q_len), dout = random(n, c), dq = random(n, c, true);
    const Operand dkv = random(rows, 2 * kv), dk = columns(dkv, 0, kv), dv = columns(dkv, kv, 2 * kv);
    const Operand dq_alone = random(n, c, true), dkv_alone = random(rows, 2 * kv);
    const Operand delta = vector(s.batch * s.num_heads * s.q_len), sinks = vector(s.num_heads),
                  d_sinks = vector(s.num_heads);
    run([&](Kernels& kernels, auto of) {
      // Over what was there, then once more as a second block of the same keys: added to it.
      for (bool accumulate : {false, true}) {
        s.accumulate = accumulate;
        kernels.attention(of(q), of(k), of(v), s, of(out), of(lse));
        kernels.attention_delta(of(out), of(dout), s, of(delta));
        kernels.attention_backward(of(q), of(k), of(v), of(dout), of(lse), of(delta), s, of(dq), of(dk),
                                   of(dv));
        kernels.attention_backward(of(q), of(k), of(v), of(dout), of(lse), of(delta), s, of(dq_alone),
                                   Tensor(), Tensor());
        kernels.attention_backward(of(q), of(k), of(v), of(dout), of(lse), of(delta), s, Tensor(),
                                   of(columns(dkv_alone, 0, kv)), of(columns(dkv_alone, kv, 2 * kv)));
      }
      kernels.attention_sink(of(sinks), s, of(out), of(lse));
      kernels.attention_sink_backward(of(sinks), of(lse), of(delta), s, of(d_sinks));
    });
    expect_close(d_sinks, s.q_len + s.kv_len, 8, "attention sinks");
    expect_close(delta, s.head_dim, 4, "attention delta");
    expect_close(out, s.kv_len, 4, "attention"), expect_close(lse, s.kv_len, 4, "attention lse");
    expect_close(dq, s.kv_len, 8, "attention dq"), expect_close(dkv, s.q_len, 8, "attention dk, dv");
    expect_close(dq_alone, s.kv_len, 8, "attention dq alone");
    expect_close(dkv_alone, s.q_len, 8, "attention dk, dv alone");
  }
}

// Documents begin anywhere, and what a block's other queries see shows in none of the bits.
TEST_F(KernelsCpu, InvariantAttentionOfDocumentsShowsNoOtherQueries) {
  constexpr std::int64_t length = 1200, depth = 16, cut = 250;
  const auto invariant = make_cpu_kernels(arena, DType::f32, 1, Numerics::invariant);
  const Tensor q = random(length, depth).one, k = random(length, depth).one, v = random(length, depth).one,
               dout = random(length, depth).one, delta = vector(length).one;
  std::vector<std::int32_t> first(length);
  for (std::int32_t t = 0; t < length; ++t)
    first[static_cast<std::size_t>(t)] = t < 700 ? t / 130 * 130 : t - 75;
  const auto results = [&](const std::vector<std::int64_t>& bounds) {
    const Tensor out = random(length, depth).one, lse = vector(length).one, dq = random(length, depth).one;
    for (std::size_t i = 0; i + 1 < bounds.size(); ++i) {
      const std::int64_t begin = bounds[i], end = bounds[i + 1];
      const AttentionShape s{.q_len = end - begin,
                             .kv_len = length,
                             .head_dim = depth,
                             .q_offset = begin,
                             .scale = 0.25,
                             .first_keys = ids({first.begin() + begin, first.begin() + end})};
      invariant->attention(q.row_range(begin, end), k, v, s, out.row_range(begin, end),
                           lse.flat_range(begin, end));
      invariant->attention_backward(q.row_range(begin, end), k, v, dout.row_range(begin, end),
                                    lse.flat_range(begin, end), delta.flat_range(begin, end), s,
                                    dq.row_range(begin, end), Tensor(), Tensor());
    }
    std::vector<float> all(out.host<float>(), out.host<float>() + out.numel());
    all.insert(all.end(), dq.host<float>(), dq.host<float>() + dq.numel());
    return all;
  };
  EXPECT_EQ(results({0, length}), results({0, cut, 777, length}));
}

TEST_F(KernelsCpu, AttentionKeepsWhatIsNotANumber) {
  const auto invariant = make_cpu_kernels(arena, DType::f32, 1, Numerics::invariant);
  for (Kernels* const on : {one.get(), several.get(), invariant.get(), reference.get()})
    checks::expect_spoiled_attention(
        arena, DType::f32,
        [on](const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s, const Tensor& out,
             const Tensor& lse) { on->attention(q, k, v, s, out, lse); },
        true);
}

// By each instruction set, of NaNs with and without something in their lower bits, at places of whole vectors
// and behind the last.
TEST_F(KernelsCpu, PassesKeepWhatIsNotANumber) {
  constexpr std::int64_t n = 64 + 7;
  on_each_instruction_set([](const char* set) {
    for (const std::uint32_t bits :
         {0x7fc00000u, 0xffc00000u, 0x7fc00001u, 0x7fffffffu, 0x7fcabc7fu, 0xffffffffu, 0x7f800001u})
      for (const std::int64_t place : {std::int64_t{0}, std::int64_t{37}, n - 1}) {
        SCOPED_TRACE(std::string(set) + ", NaN " + std::to_string(bits) + " at " + std::to_string(place));
        std::vector<float> numbers(2 * n);  // whose rows have room behind them
        for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = std::sin(static_cast<float>(i));
        const std::vector<float> ones(2 * n, 1.0f);
        auto spoiled = numbers;
        spoiled[static_cast<std::size_t>(place)] = std::bit_cast<float>(bits);
        const auto expect_nan = [&](float x, const char* what) { EXPECT_TRUE(std::isnan(x)) << what; };
        const auto at_place = [&](const std::vector<float>& x) { return x[static_cast<std::size_t>(place)]; };
        auto x = spoiled, y = ones;
        expect_nan(wide_simd().exp_sum(x.data(), 1.0f, n), "exp_sum"), expect_nan(at_place(x), "exp_sum's");
        x = spoiled, wide_simd().soft_cap(x.data(), 0.5f, n), expect_nan(at_place(x), "soft_cap");
        simd<float>().scale_capped(spoiled.data(), 1, 1, 2, y.data(), n),
            expect_nan(at_place(y), "scale_capped");
        float max = -1, sum = 1;
        simd<float>().softmax_row(spoiled.data(), n, n, &max, &sum, y.data());
        expect_nan(sum, "softmax_row's sum"), expect_nan(at_place(y), "softmax_row");
        for (const bool capped : {false, true}) {
          auto ds = ones;
          if (capped)
            simd<float>().capped_softmax_gradient_row(spoiled.data(), ones.data(), n, n, 1, 0.5f, 2, y.data(),
                                                      ds.data());
          else
            simd<float>().softmax_gradient_row(spoiled.data(), ones.data(), n, n, 1, 0.5f, y.data(),
                                               ds.data());
          expect_nan(at_place(y), "p of a gradient's row"), expect_nan(at_place(ds), "ds of it");
        }
        for (const Activation a :
             {Activation::gelu, Activation::gelu_erf, Activation::relu, Activation::relu2}) {
          x = spoiled, y = numbers;
          simd<float>().activation(a).forward(x.data(), nullptr, y.data(), n);
          expect_nan(at_place(y), name_of(a));
          auto dy = ones;
          simd<float>().activation(a).backward(x.data(), dy.data(), n);
          expect_nan(at_place(x), name_of(a));
          if (a != Activation::relu) expect_nan(at_place(dy), name_of(a));
        }
        for (const Activation a : {Activation::swiglu, Activation::geglu, Activation::clamped_swiglu}) {
          x = spoiled;
          auto up = ones, dy = ones;
          simd<float>().gated(a).forward(x.data(), up.data(), y.data(), n, 1.7f, 7);
          expect_nan(at_place(y), name_of(a));
          simd<float>().gated(a).backward(x.data(), up.data(), dy.data(), n, 1.7f, 7);
          expect_nan(at_place(x), name_of(a)), expect_nan(at_place(up), name_of(a));
          expect_nan(at_place(dy), name_of(a));
        }
      }
  });
}

// Two sequences of which the last chunk is shorter than the others, with a document across chunks.
TEST_F(KernelsCpu, StateSpace) {
  std::vector<std::int32_t> documents(140, 0);
  for (std::size_t row = 25; row < 70; ++row) documents[row] = row < 66 ? 25 : 66;
  for (const std::int64_t groups : {1, 2, 4})
    for (const Tensor& first : {Tensor(), ids(documents)}) {
      const StateSpaceShape shape{{2, 70, first}, 4, 6, groups, 5, 32};
      const std::int64_t rows = 140, mixed = shape.mixed_width();
      const Operand given = random(rows, mixed, true), taps = random(mixed, 4), bias = vector(mixed),
                    xbc = random(rows, mixed), z = random(rows, shape.width(), true),
                    dt = random(rows, shape.heads, true), dt_bias = vector(shape.heads),
                    a_log = vector(shape.heads), d = vector(shape.heads), y = random(rows, shape.width()),
                    dy = random(rows, shape.width(), true), room = vector(shape.workspace(true)),
                    dz = random(rows, shape.width(), true), dxbc = random(rows, mixed),
                    ddt = random(rows, shape.heads, true), terms = random(rows, 3 * shape.heads),
                    dgiven = random(rows, mixed, true), dtaps = random(mixed, 4);
      run([&](Kernels& k, auto of) {
        const StateSpaceTensors in{of(z), of(xbc), of(dt), of(dt_bias), of(a_log), of(d)};
        k.convolve(of(given), of(taps), of(bias), shape.rows, of(xbc));
        k.state_space(in, shape, of(room).flat_range(0, shape.workspace(false)), Tensor(), of(y));
        k.state_space_backward(in, shape, of(dy), of(room), {of(dz), of(dxbc), of(ddt), of(terms)});
        k.convolve_backward(of(given), of(taps), of(bias), shape.rows, of(dxbc), of(dgiven));
        k.convolve_backward_weight(of(given), of(dxbc), shape.rows, of(dtaps));
      });
      const std::int64_t length = shape.chunk * shape.state;
      expect_close(xbc, 4, 4, "convolve"), expect_close(y, length, 2, "state_space");
      expect_close(dz, length, 2, "state_space_backward dz");
      expect_close(dxbc, length, 2, "state_space_backward dxbc");
      expect_close(ddt, length, 2, "state_space_backward ddt");
      expect_close(terms, length, 2, "state_space_backward terms");
      expect_close(dgiven, length, 2, "convolve_backward");
      expect_close(dtaps, length, 2, "convolve_backward_weight");
    }
}

// Channels that are no multiple of a vector's, from any column on.
TEST_F(KernelsCpu, ShortConvolution) {
  std::vector<std::int32_t> documents(140, 0);
  for (std::size_t row = 25; row < 70; ++row) documents[row] = row < 66 ? 25 : 66;
  for (const std::int64_t width : {1, 7, 16, 33, 64, 100})
    for (const std::int64_t kernel : {2, 3, 4, 6})
      for (const Tensor& first : {Tensor(), ids(documents)}) {
        const SequenceRows rows{2, 70, first};
        const Operand given = random(140, 3 * width, true), taps = random(width, kernel),
                      y = random(140, width, true), dy = random(140, width, true), again = random(140, width),
                      d_given = random(140, 3 * width, true), d_taps = random(width, kernel);
        run([&](Kernels& k, auto of) {
          k.short_convolution(of(given), of(taps), rows, of(y));
          k.short_convolution_backward(of(given), of(taps), of(dy), rows, of(d_given), of(again));
          k.short_convolution_backward_weight(of(given), of(dy), rows, of(d_taps));
        });
        expect_close(y, 3 * kernel, 4, "short_convolution");
        expect_close(again, 3 * kernel, 4, "short_convolution_backward's output");
        expect_close(d_given, 3 * kernel, 4, "short_convolution_backward");
        expect_close(d_taps, 140, 4, "short_convolution_backward_weight");
      }
}

TEST_F(KernelsCpu, ScratchIsAllocatedOnce) {
  const Operand x = random(200, 64), w = vector(64), dw = vector(64), db = vector(64), stats = random(200, 2);
  const Operand q = random(200, 64), lse = vector(200), d1 = random(200, 64), d2 = random(200, 64),
                d3 = random(200, 64);
  const AttentionShape s{.batch = 1, .q_len = 200, .kv_len = 200, .head_dim = 64};
  const Tensor positions = ids(std::vector<std::int32_t>(200, 17));
  const auto step = [&] {
    several->layer_norm_backward_weight(x.one, x.one, stats.one, dw.one, db.one);
    several->rope(x.one, 64, positions, RopeTurns::plain(1e4, 64), false);
    several->attention(q.one, q.one, q.one, s, x.one, lse.one);
    several->attention_backward(q.one, q.one, q.one, x.one, lse.one, lse.one, s, d1.one, d2.one, d3.one);
  };
  step();
  const std::int64_t before = arena.system_allocations();
  const Memory live = arena.live();
  step();
  EXPECT_EQ(arena.system_allocations(), before);
  EXPECT_EQ(arena.live(), live);
}

TEST_F(KernelsCpu, OtherTypesAndShapesAreRefused) {
  const Operand x = random(4, 8), y = random(4, 9);
  EXPECT_THROW(one->scale(x.exact, 2), InvariantError);
  EXPECT_THROW(one->add(x.one, y.one), InvariantError);
  EXPECT_THROW(one->matmul(x.one, Transpose::no, y.one, Transpose::no, y.one, false), InvariantError);
  EXPECT_THROW(one->fill(Tensor(), 1), InvariantError);
  const auto invariant = make_cpu_kernels(arena, DType::f32, 1, Numerics::invariant);
  const Tensor c = random(4, 4).one;
  for (const SumBlocks& blocks :
       {SumBlocks{{{0, 0}}}, SumBlocks{{}, {{0, 8}}}, SumBlocks{{{0, 8}}, {{8, 8}}},
        SumBlocks{{{0, 8}, {4, 4}}}, SumBlocks{{{0, 10}, {8, 6}}}, SumBlocks{{{4, 12}}}}) {
    EXPECT_THROW(invariant->matmul(x.one, Transpose::no, x.one, Transpose::yes, c, false, blocks),
                 InvariantError);
    const MatrixProduct product{x.one, Transpose::no, x.one, Transpose::yes, c, false, blocks};
    EXPECT_THROW(invariant->grouped_matmul({&product, 1}), InvariantError);
  }
}

TEST_F(KernelsCpu, OfNoDeviceTakeWhatTheseWould) {
  Arena real, none(Device::none);
  const auto kernels = make_kernels(real, DType::f32, 3), dry = make_kernels(none, DType::f32, 3);
  EXPECT_EQ(none.live(), real.live());
  EXPECT_EQ(none.live().total(), kernel_scratch_bytes(DType::f32, 3));
}

}  // namespace
}  // namespace echelon::kernels_cpu_test
