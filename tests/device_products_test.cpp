// Products by the kernels of a device, and what they do to a product as they store it, as
// device_kernels_test.cpp tests the others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/philox.h"
#include "case_choice.h"
#include "device_kernel_runs.h"

namespace echelon::device_products_test {
namespace {

class DeviceProducts : public checks::OfDeviceKernels {};

// Products of which several tiles and parts of them are, whatever the layout, types and blocks of sums.
TEST_P(DeviceProducts, Products) {
  struct Shape {
    std::int64_t m, n, depth;
  };
  for (const auto& [m, n, depth] : {Shape{3, 37, 5}, {33, 2, 70}, {1, 1, 1}, {2, 3, 0}, {0, 4, 3}})
    for (bool ta : {false, true})
      for (bool tb : {false, true})
        for (const auto& [a_type, b_type, c_type] :
             {std::array{DType::f64, DType::f64, DType::f64}, std::array{DType::f32, DType::f32, DType::f32},
              std::array{DType::bf16, DType::bf16, DType::bf16},
              std::array{DType::bf16, DType::bf16, DType::f32},
              std::array{DType::f32, DType::bf16, DType::bf16}}) {
          const bool accumulate = ta != tb;
          const Operand a = ta ? random(a_type, depth, m) : random(a_type, m, depth),
                        b = tb ? random(b_type, n, depth) : random(b_type, depth, n),
                        c = random(c_type, m, n);
          const auto multiply = [&](const SumBlocks& blocks) {
            run([&](Kernels& on, auto of) {
              on.matmul(of(a), ta ? yes : no, of(b), tb ? yes : no, of(c), accumulate, blocks);
            });
            expect_close(c, depth + 1, "matmul");
          };
          multiply({});
          // A block of two ranges, not in order, and two of one.
          if (depth == 70) multiply({{{60, 70}, {0, 10}}, {{10, 25}}, {{25, 60}}});
        }
}

// What follows a product, in its tiles or in passes behind it: a device may round c before each of these or
// once.
TEST_P(DeviceProducts, ProductsAndWhatFollows) {
  struct Shape {
    std::int64_t m, n, depth;
  };
  for (const auto& [m, n, depth] : {Shape{3, 37, 5}, {33, 2, 70}, {16, 40, 24}, {2, 3, 0}, {0, 4, 3}})
    for (bool turned : {false, true})
      for (DType t : stored) {
        // A vendor's library wants memory that begins at multiples of 16 bytes.
        const auto matrix = [&, n = n](DType type, std::int64_t rows, std::int64_t cols) {
          return n == 40 ? of_flat(type, rows, cols) : random(type, rows, cols);
        };
        const double roundings = t == DType::bf16 ? 3 : 1;
        const Operand a = turned ? matrix(t, depth, m) : matrix(t, m, depth), b = matrix(t, depth, n),
                      bias = vector(t, n);
        const auto product = [&](auto of, const Operand& c, bool accumulate) {
          return MatrixProduct{of(a), turned ? yes : no, of(b), no, of(c), accumulate};
        };
        const SumBlocks blocks = depth == 70 ? SumBlocks{{{60, 70}, {0, 10}}, {{10, 60}}} : SumBlocks();
        const Operand c = matrix(t, m, n);
        run([&](Kernels& on, auto of) {
          MatrixProduct p = product(of, c, false);
          p.blocks = blocks;
          on.matmul(p, {.bias = of(bias)});
        });
        expect_followed(c, depth + 1, roundings, "the bias");
        const Operand x = matrix(t, m, n);
        for (bool biased : {false, true}) {
          run([&](Kernels& on, auto of) {
            on.matmul(product(of, c, false), {.bias = biased ? of(bias) : Tensor(), .added = of(x)});
          });
          expect_followed(c, depth + 2, roundings, "what is added to");
        }
        for (Activation activation :
             {Activation::gelu, Activation::gelu_erf, Activation::relu, Activation::relu2}) {
          const Operand y = matrix(t, m, n);
          for (bool biased : {false, true}) {
            run([&](Kernels& on, auto of) {
              on.matmul(product(of, c, false),
                        {.bias = biased ? of(bias) : Tensor(), .activation = activation, .activated = of(y)});
            });
            expect_followed(c, depth + 1, roundings, "what an activation is given");
            expect_followed(y, 2 * depth + 4, 4 * roundings, "the activation");
          }
          run([&](Kernels& on, auto of) {
            on.matmul(product(of, c, false), {.activation = activation, .hidden = of(y)});
          });
          expect_followed(c, depth + 16, 2 * roundings, "the gradient");
          expect_followed(y, 4, roundings, "the activation again");
        }
        const Operand d = matrix(wide(t), m, n), of_b = vector(wide(t), n), of_a = vector(wide(t), m);
        run([&](Kernels& on, auto of) {
          on.matmul(product(of, d, true), {.column_sums = of(of_b), .sums_of_b = true});
          if (turned) on.matmul(product(of, d, true), {.column_sums = of(of_a)});
        });
        expect_close(d, 2 * depth + 1, "the product");
        expect_close(of_b, depth + 1, "column sums of b");
        expect_close(of_a, depth + 1, "column sums of a");
      }
}

// Of several types, some of them empty, some with sums in blocks: each as if it were alone.
TEST_P(DeviceProducts, GroupsOfProducts) {
  struct One {
    Operand a, b, c;
    bool ta, tb, accumulate;
    SumBlocks blocks;
  };
  std::vector<One> all;
  const auto add = [&](DType of_a, DType of_b, DType of_c, std::int64_t m, std::int64_t n, std::int64_t k,
                       SumBlocks blocks = {}) {
    const bool ta = all.size() % 2 == 1, tb = all.size() % 3 == 1, accumulate = all.size() % 4 < 2;
    all.push_back({ta ? random(of_a, k, m) : random(of_a, m, k), tb ? random(of_b, n, k) : random(of_b, k, n),
                   random(of_c, m, n), ta, tb, accumulate, std::move(blocks)});
  };
  for (const std::int64_t rows : {5, 33, 0, 1, 70}) add(DType::f32, DType::f32, DType::f32, rows, 40, 9);
  for (const std::int64_t rows : {4, 40, 2}) add(DType::bf16, DType::bf16, DType::bf16, 8, rows, 16);
  for (const std::int64_t rows : {3, 0, 35}) add(DType::bf16, DType::bf16, DType::f32, 6, 34, rows);
  add(DType::f64, DType::f64, DType::f64, 2, 3, 4);
  add(DType::f32, DType::bf16, DType::f32, 3, 5, 20, equal_blocks(20, 4));
  add(DType::f32, DType::f32, DType::f32, 3, 5, 20, equal_blocks(20, 2));
  run([&](Kernels& on, auto of) {
    std::vector<MatrixProduct> products;
    for (const One& one : all)
      products.push_back({of(one.a), one.ta ? yes : no, of(one.b), one.tb ? yes : no, of(one.c),
                          one.accumulate, one.blocks});
    on.grouped_matmul(products);
    on.grouped_matmul({});
  });
  for (const One& one : all) expect_close(one.c, 71, "grouped_matmul");
}

// Rounded and as codes, in every orientation: sizes that tensor cores have products of, and others.
TEST_P(DeviceProducts, ProductsInFp8) {
  struct One {
    Operand a, b, c, room_a, room_b;
    bool ta, tb, accumulate;
    OperandFormats formats;
  };
  std::vector<One> all;
  const auto room = [&](const Operand& x) {
    return make(DType::bf16, {x.expected.rows(), x.expected.cols()});
  };
  for (const auto& [m, n, k] : {std::array<std::int64_t, 3>{48, 32, 64}, {34, 35, 3}, {3, 0, 16}})
    for (int turns = 0; turns < 4; ++turns)
      for (DType of_c : {DType::bf16, DType::f32}) {
        const bool ta = turns % 2 == 1, tb = turns >= 2;
        One one{ta ? random(DType::bf16, k, m, 1e-6) : random(DType::bf16, m, k, 1e-6),
                tb ? random(DType::bf16, n, k) : random(DType::bf16, k, n),
                random(of_c, m, n, 1e-6),
                {},
                {},
                ta,
                tb,
                turns != 0,
                {true, turns < 2 ? Fp8::e5m2 : Fp8::e4m3, tb ? Fp8::e4m3 : Fp8::e5m2}};
        one.room_a = room(one.a), one.room_b = room(one.b);
        all.push_back(one);
      }
  run([&](Kernels& on, const auto& of) {
    std::vector<Fp8Product> products;
    for (const One& one : all)
      products.push_back(
          {{of(one.a), one.ta ? yes : no, of(one.b), one.tb ? yes : no, of(one.c), one.accumulate},
           one.formats,
           of(one.room_a),
           of(one.room_b)});
    on.fp8_matmul(products);
    on.fp8_matmul({});
    for (const One& one : all) on.round_to_fp8(of(one.a), one.formats.a, of(one.room_a));
  });
  for (const One& one : all) {
    expect_close(one.c, 64, "fp8_matmul");
    expect_same_bytes(one.room_a, "round_to_fp8");
  }
}

TEST_P(DeviceProducts, ProductsOfAnyShape) {
  const Philox draw(23, Stream::test, 1);
  const std::vector<std::array<DType, 3>> types{{DType::f64, DType::f64, DType::f64},
                                                {DType::f32, DType::f32, DType::f32},
                                                {DType::bf16, DType::bf16, DType::f32},
                                                {DType::bf16, DType::f32, DType::f32}};
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(checks::so_many(10, 300)); ++i) {
    auto upto = [&, at = 16 * i](std::int64_t most) mutable {
      return static_cast<std::int64_t>(draw.below(at++, static_cast<std::uint64_t>(most) + 1));
    };
    const std::int64_t m = upto(70), n = upto(70), depth = upto(100);
    const bool ta = upto(1) == 1, tb = upto(1) == 1, accumulate = upto(1) == 1;
    const auto& [a_type, b_type, c_type] = types[static_cast<std::size_t>(upto(3))];
    SumBlocks blocks;  // none, or as many as up to 9 cuts make
    if (upto(1) == 1)
      for (std::int64_t begin = 0; begin < depth;) {
        const std::int64_t end = std::min(depth, begin + 1 + upto(depth / 9 + 8));
        blocks.push_back({{begin, end}});
        begin = end;
      }
    SCOPED_TRACE(::testing::Message() << "case " << i << ": " << m << " x " << n << " x " << depth << ", "
                                      << blocks.size() << " blocks");
    const Operand a = ta ? random(a_type, depth, m) : random(a_type, m, depth),
                  b = tb ? random(b_type, n, depth) : random(b_type, depth, n), c = random(c_type, m, n);
    run([&](Kernels& on, auto of) {
      on.matmul(of(a), ta ? yes : no, of(b), tb ? yes : no, of(c), accumulate, blocks);
    });
    expect_close(c, depth + 1, "matmul");
  }
}

INSTANTIATE_TEST_SUITE_P(On, DeviceProducts, ::testing::ValuesIn(checks::devices_under_test()),
                         [](const auto& of) { return of.param.name; });

}  // namespace
}  // namespace echelon::device_products_test
