// Every fast kernel against the reference in f64, on one thread and on several: the difference is bounded by
// c eps(f32) sqrt(length of the longest sum), and the bits do not depend on the number of threads.
#include <gtest/gtest.h>

#include "attention_shapes.h"
#include "attention_spoiled.h"
#include "case_choice.h"
#include "cpu_kernel_runs.h"

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

class KernelsCpu : public checks::OfCpuKernels {};

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

// oneDNN makes some of these parts and our kernel others, whichever is faster; with AMX, it makes all.
TEST_F(KernelsCpu, MatmulBitsAreThoseOfItsParts) {  // long
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
      RopeTurns part = RopeTurns::plain(1e4, std::max<std::int64_t>(2, head_dim / 4 * 2));
      part.growth = 0.3, part.growth_length = 7, part.factor = 1.5;
      run([&](Kernels& k, auto of) {
        k.rope(of(x), head_dim, late, RopeTurns::plain(1e4, head_dim), false);
        k.rope(of(x), head_dim, jumping, RopeTurns::plain(1e4, head_dim), true);
        k.rope(of(x), head_dim, jumping, growing, true);
        k.rope(of(x), head_dim, late, part, false);
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

TEST_F(KernelsCpu, MomentumAndStepOfWeights) {
  for (std::int64_t n : {1, 7, 100, 40001}) {
    const Operand g = vector(n), m = vector(n), update = vector(n), p = vector(n);
    run([&](Kernels& k, auto of) { k.momentum(of(g), of(m), of(update), {0.9, 0.5}); });
    expect_close(m, 1, 4, "m of momentum"), expect_close(update, 1, 8, "update of momentum");
    run([&](Kernels& k, auto of) {
      k.step_weights(of(p), of(update), {.lr = 0.1, .weight_decay = 0.2, .scale = 3});
    });
    expect_close(p, 1, 16, "step_weights");
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
  for (std::size_t i = 0; i < 2 * shapes.size(); ++i) {
    all.push_back(all[i]);
    all.back().alibi = {.heads = 2 * all[i].num_heads, .first_head = all[i].num_heads / 2};
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

// On all of their threads, and on the one that made them for as long as any of its kernels live.
TEST(KernelsOfTheCpu, TakeSubnormalNumbersForZero) {
#if defined(__x86_64__)
  constexpr float least = std::numeric_limits<float>::min();
  const auto bits_of_half = [] {
    volatile float x = least;
    x = x / 2;
    return std::bit_cast<std::uint32_t>(static_cast<float>(x));
  };
  Arena arena(Device::cpu, std::size_t{0});
  const std::uint32_t kept = bits_of_half();
  EXPECT_EQ(kept, 0x00400000u);
  auto first = make_cpu_kernels(arena, DType::f32, 3);
  const auto scaled = [&arena](Kernels& kernels, std::uint32_t bits, double factor) {
    const Tensor x(arena, MemoryCategory::other, DType::f32, {600, 300});
    std::fill_n(x.host<float>(), x.numel(), std::bit_cast<float>(bits));
    kernels.scale(x, factor);
    std::uint32_t any = 0;
    for (std::int64_t i = 0; i < x.numel(); ++i) any |= std::bit_cast<std::uint32_t>(x.host<float>()[i]);
    return any;
  };
  EXPECT_EQ(scaled(*first, std::bit_cast<std::uint32_t>(least), 0.5), 0u);  // made
  EXPECT_EQ(scaled(*first, kept, 2), 0u);                                   // read
  {
    const auto second = make_cpu_kernels(arena, DType::f32, 1);
    first.reset();
    EXPECT_EQ(scaled(*second, kept, 2), 0u);
    EXPECT_EQ(bits_of_half(), 0u);
  }
  EXPECT_EQ(bits_of_half(), kept);
#else
  GTEST_SKIP() << "this processor takes no longer for them";
#endif
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
