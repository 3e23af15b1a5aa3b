// Products through the tiles of AMX, the instructions played in C++, where the processor has none; by those
// themselves where it has. What is packed, cut and stored around them is what runs.
#include "tensor/matmul_amx.h"
#include "case_choice.h"
#include "played_tiles.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/philox.h"
#include "tensor/matmul.h"
#include "tensor/matmul_packed.h"
#include "tensor/matmul_simd.h"
#include "tensor/matmul_sum_blocks.h"
#include "tensor/matmul_team.h"
#include "tensor/simd.h"

namespace echelon::matmul_amx_test {
namespace {

class MatmulAmx : public ::testing::Test {
 protected:
  // Numbers of either sign in a matrix whose rows stand `stride` apart; what lies between them is not a
  // number, and so is what lies behind.
  template <class T>
  std::vector<T> random(std::int64_t rows, std::int64_t cols, std::int64_t stride) {
    std::vector<std::uint32_t> words(static_cast<std::size_t>(rows * cols));
    Philox(17, Stream::test, draws_++).fill_words(0, words.size(), words.data());
    std::vector<T> matrix(static_cast<std::size_t>(rows * stride),
                          T(std::numeric_limits<float>::quiet_NaN()));
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < cols; ++j)
        matrix[static_cast<std::size_t>(i * stride + j)] = T(std::ldexp(
            static_cast<float>(static_cast<std::int32_t>(words[static_cast<std::size_t>(i * cols + j)])),
            -30));
    return matrix;
  }

  template <class T>
  void check(const MicroKernel& kernel, std::int64_t m, std::int64_t n, std::int64_t k, bool turn_a,
             bool turn_b, DType type, float beta, const ThreadTeam* team = nullptr) {
    const std::int64_t a_stride = (turn_a ? m : k) + 3, b_stride = (turn_b ? k : n) + 5, c_stride = n + 1;
    const auto a = random<T>(turn_a ? k : m, turn_a ? m : k, a_stride),
               b = random<T>(turn_b ? n : k, turn_b ? k : n, b_stride);
    const auto before = random<bf16>(m, n, c_stride);
    std::vector<bf16> narrow = before;
    std::vector<float> wide(before.begin(), before.end());
    const auto turn = [](bool on) { return on ? Transpose::yes : Transpose::no; };
    const bool is_wide = type == DType::f32;
    const float alpha = products_ % 2 == 0 ? 0.5f : 1.0f;
    const Product product{.ta = turn(turn_a),
                          .tb = turn(turn_b),
                          .m = m,
                          .n = n,
                          .k = k,
                          .alpha = alpha,
                          .a = {a.data(), a_stride, dtype_of<T>},
                          .b = {b.data(), b_stride, dtype_of<T>},
                          .beta = beta,
                          .c = {is_wide ? static_cast<void*>(wide.data()) : narrow.data(), c_stride, type}};
    ++products_;
    if (team == nullptr)
      multiply_by(kernel, product, scratch_.front().bytes);
    else
      multiply_together(kernel, product, scratch_.front().bytes, scratch_each, *team);
    if (team != nullptr) {  // the bits are those of one thread
      std::vector<bf16> narrow_alone = before;
      std::vector<float> wide_alone(before.begin(), before.end());
      Product alone = product;
      alone.c.data = is_wide ? static_cast<void*>(wide_alone.data()) : narrow_alone.data();
      multiply_by(kernel, alone, scratch_.front().bytes);
      const auto same = [](const auto& x, const auto& y) {
        return std::memcmp(x.data(), y.data(), x.size() * sizeof x[0]) == 0;
      };
      EXPECT_TRUE(same(narrow, narrow_alone) && same(wide, wide_alone)) << m << ", " << n << ", " << k;
    }
    const auto index = [](std::int64_t i) { return static_cast<std::size_t>(i); };
    // Line after line, along k.
    const auto lines = [&](const std::vector<T>& x, std::int64_t count, std::int64_t line,
                           std::int64_t step) {
      std::vector<float> all;
      for (std::int64_t i = 0; i < count; ++i)
        for (std::int64_t l = 0; l < k; ++l) all.emplace_back(x[index(i * line + l * step)]);
      return all;
    };
    const std::vector<float> of_a = lines(a, m, turn_a ? 1 : a_stride, turn_a ? a_stride : 1),
                             of_b = lines(b, n, turn_b ? b_stride : 1, turn_b ? 1 : b_stride);
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; j < n; ++j) {
        const float *const row = of_a.data() + i * k, *const column = of_b.data() + j * k;
        double sum = 0, sizes = 0;
        for (std::int64_t l = 0; l < k; ++l) {
          const double x = double{row[l]} * double{column[l]};
          sum += x, sizes += std::abs(x);
        }
        const double old = beta != 0 ? double{float{before[index(i * c_stride + j)]}} : 0.0;
        const double expected = alpha * sum + old;
        const double got =
            is_wide ? double{wide[index(i * c_stride + j)]} : double{float{narrow[index(i * c_stride + j)]}};
        // A sum of k + 1 terms in any order (Higham 2002, 4.2), with three bf16 of k + 3, whose unit roundoff
        // is eps / 2; and the rounding of what is stored.
        const double eps = std::numeric_limits<float>::epsilon();
        const double bound = static_cast<double>(k + 2) * eps * (alpha * sizes + std::abs(old)) +
                             (is_wide ? 0.0 : std::ldexp(std::abs(expected), -8));
        ASSERT_LE(std::abs(got - expected), bound) << kernel.name << " (" << m << ", " << k << ") x (" << k
                                                   << ", " << n << ") at " << i << ", " << j;
      }
    // What stands between the rows is not touched.
    for (std::int64_t i = 0; i < m; ++i)
      EXPECT_TRUE(
          std::isnan(is_wide ? wide[index(i * c_stride + n)] : float{narrow[index(i * c_stride + n)]}));
  }

  template <class T = bf16>
  void check_all(const MicroKernel& kernel) {
    struct Size {
      std::int64_t m, n, k;
    };
    // Around tiles of 32, groups of 32 along k, blocks of 224 rows, pieces of 1024 along k.
    for (const Size s : {Size{1, 1, 1},
                         {32, 32, 32},
                         {31, 33, 31},
                         {33, 31, 33},
                         {16, 48, 64},
                         {5, 7, 130},
                         {100, 70, 37},
                         {193, 40, 65},
                         {230, 34, 1030},
                         {40, 40, 1025},
                         {1, 300, 130},
                         {3, 70, 1091},
                         {4, 33, 64},
                         {33, 65, 1091}})
      for (const bool turn_a : {false, true})
        for (const bool turn_b : {false, true})
          for (const DType type : {DType::f32, DType::bf16})
            for (const float beta : {0.0f, 1.0f})
              if (checks::is_taken(6)) check<T>(kernel, s.m, s.n, s.k, turn_a, turn_b, type, beta);
  }

  // Several blocks of rows and panels of columns for each thread, and rooms of b that are not full; what is
  // summed in f32 before it is rounded, by itself and in two pieces of rows.
  template <class T = bf16>
  void check_teams(const MicroKernel& kernel, std::int64_t most_rows, std::uint64_t share) {
    struct Size {
      std::int64_t m, n, k;
    };
    for (const int threads : {2, most_threads}) {
      const ThreadTeam team(threads);
      for (const Size s :
           {Size{1, 1, 1}, {70, 300, 40}, {33, 65, 1091}, {20, 100, 4200}, {440, 70, 1030}, {520, 9, 4100}})
        for (const bool turn_a : {false, true})
          for (const bool turn_b : {false, true})
            for (const DType type : {DType::f32, DType::bf16})
              for (const float beta : {0.0f, 1.0f})
                if (s.m <= most_rows && checks::is_taken(share))
                  check<T>(kernel, s.m, s.n, s.k, turn_a, turn_b, type, beta, &team);
    }
  }

  // The first rows of a product of `many` rows, computed alone; `between` elements are between rows of b.
  void check_few(const MicroKernel& kernel, std::int64_t many, std::initializer_list<std::int64_t> few,
                 std::int64_t n, std::int64_t k, bool turn_b, DType type, std::int64_t between) {
    const std::int64_t b_stride = (turn_b ? k : n) + between, element = element_bytes(type);
    const auto a = random<bf16>(many, k, k), b = random<bf16>(turn_b ? n : k, turn_b ? k : n, b_stride);
    const auto product = [&](std::int64_t rows) {
      std::vector<std::byte> c(static_cast<std::size_t>(rows * n * element));
      multiply_by(kernel,
                  {.tb = turn_b ? Transpose::yes : Transpose::no,
                   .m = rows,
                   .n = n,
                   .k = k,
                   .a = {a.data(), k, DType::bf16},
                   .b = {b.data(), b_stride, DType::bf16},
                   .beta = 0,
                   .c = {c.data(), n, type}},
                  scratch());
      return c;
    };
    const std::vector<std::byte> all = product(many);
    for (const std::int64_t rows : few) {
      const std::vector<std::byte> alone = product(rows);
      EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin()))
          << kernel.name << ": " << rows << ", " << n << ", " << k;
    }
  }

  // Under invariant numerics a sum is taken in blocks: one block is a plain product, and neither how many
  // rows there are nor which of the blocks a rank has shows in the bits.
  template <class T>
  void check_blocks(const MicroKernel& kernel) {
    constexpr std::int64_t rows = 40, cols = 40, few = 5;
    struct Sums {
      std::int64_t k;
      SumBlocks blocks;  // two ranks have two each
    };
    // Packed at once; deeper than a segment; and deeper than what is packed of all blocks.
    for (const Sums& s : {Sums{90, {{{0, 20}}, {{20, 33}, {40, 47}}, {{33, 40}}, {{47, 90}}}},
                          Sums{1300, {{{0, 1100}}, {{1100, 1150}}, {{1150, 1250}}, {{1250, 1300}}}},
                          Sums{3100, {{{0, 700}}, {{700, 1500}}, {{1500, 1600}}, {{1600, 3100}}}}})
      for (const bool turn_a : {false, true})
        for (const bool turn_b : {false, true}) {
          const std::int64_t a_stride = turn_a ? rows : s.k, b_stride = turn_b ? s.k : cols;
          const auto a = random<T>(turn_a ? s.k : rows, a_stride, a_stride),
                     b = random<T>(turn_b ? cols : s.k, b_stride, b_stride);
          const auto made = [&](std::int64_t m, const SumBlocks* blocks) {
            std::vector<float> c(static_cast<std::size_t>(m * cols));
            const Product p{.ta = turn_a ? Transpose::yes : Transpose::no,
                            .tb = turn_b ? Transpose::yes : Transpose::no,
                            .m = m,
                            .n = cols,
                            .k = s.k,
                            .a = {a.data(), a_stride, dtype_of<T>},
                            .b = {b.data(), b_stride, dtype_of<T>},
                            .c = {c.data(), cols},
                            .blocks = blocks};
            (blocks == nullptr ? multiply_by : multiply_by_blocks)(kernel, p, scratch());
            return c;
          };
          SCOPED_TRACE(std::string(kernel.name) + ", k " + std::to_string(s.k) + (turn_a ? " T" : " N") +
                       (turn_b ? "T" : "N"));
          const std::vector<float> plain = made(rows, nullptr);
          const SumBlocks one{{{0, s.k}}}, first(s.blocks.begin(), s.blocks.begin() + 2),
              last(s.blocks.begin() + 2, s.blocks.end());
          EXPECT_TRUE(made(rows, &one) == plain);
          const std::vector<float> all = made(rows, &s.blocks), top = made(few, &s.blocks);
          EXPECT_TRUE(std::equal(top.begin(), top.end(), all.begin()));
          std::vector<float> sum = made(rows, &first);
          const std::vector<float> other = made(rows, &last);
          std::transform(sum.begin(), sum.end(), other.begin(), sum.begin(), std::plus());
          EXPECT_TRUE(sum == all);
          // Sums of so many terms of any sign have the size of its root, and as many roundings move them by
          // its root again.
          const float apart = 4 * static_cast<float>(s.k) * std::numeric_limits<float>::epsilon();
          for (std::size_t i = 0; i < all.size(); ++i) ASSERT_NEAR(all[i], plain[i], apart) << i;
        }
  }

  int products() const { return products_; }
  std::byte* scratch() { return scratch_.front().bytes; }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  static constexpr int most_threads = 3;
  const std::int64_t scratch_each = (product_scratch_bytes() + 63) / 64 * 64;
  std::uint64_t draws_ = 0;
  int products_ = 0;
  std::vector<Line> scratch_ = std::vector<Line>(static_cast<std::size_t>(most_threads * scratch_each / 64));
};

TEST_F(MatmulAmx, PlayedTilesMultiply) {
  check_all(played_kernel);
  EXPECT_FALSE(PlayedUnit::ready);
  EXPECT_GE(PlayedUnit::begins, products());  // at least once for each
}

TEST_F(MatmulAmx, TeamsMultiplyTogether) {
  check_teams(played_kernel, 100, 48);
  for (const MicroKernel* kernel : {amx_micro_kernel(), avx512_micro_kernel()})
    if (kernel != nullptr) check_teams(*kernel, 1000, 16);
}

TEST_F(MatmulAmx, TheProcessorsTilesMultiply) {
  if (amx_micro_kernel() == nullptr) GTEST_SKIP() << "this processor has no AMX";
  check_all(*amx_micro_kernel());
}

// For which b is not packed.
TEST_F(MatmulAmx, FewRowsHaveTheBitsOfMany) {
  if (avx512_micro_kernel() == nullptr) GTEST_SKIP() << "this processor has no AVX-512 for bf16";
  for (const std::int64_t k : {1, 33, 700, 1025, 5000})
    for (const std::int64_t n : {15, 100, 300})
      for (const bool turn_b : {false, true})
        for (const DType type : {DType::f32, DType::bf16})
          check_few(*avx512_micro_kernel(), 6, {1, 2, 3, 4}, n, k, turn_b, type, 5);
}

// Kernels of columns: an odd stride is not read where it lies, nor are parts of groups.
TEST_F(MatmulAmx, FewRowsOfColumnsHaveTheBitsOfMany) {
  for (const MicroKernel* kernel : {&played_kernel, amx_micro_kernel(), avx512_column_kernel()})
    for (const std::int64_t k : {33, 64, 1056, 4992})
      for (const std::int64_t n : {15, 32, 100, 300})
        for (const bool turn_b : {false, true})
          for (const DType type : {DType::f32, DType::bf16})
            for (const std::int64_t between : {5, 6})
              if (kernel != nullptr && checks::is_taken(kernel == &played_kernel ? 24 : 4))
                check_few(*kernel, 40, {1, 2, 3, 4, 31, 32}, n, k, turn_b, type, between);
}

TEST_F(MatmulAmx, BlocksShowNoCuts) {  // long
  check_blocks<bf16>(played_kernel);
  for (const MicroKernel* kernel : {amx_micro_kernel(), avx512_micro_kernel()})
    if (kernel != nullptr) check_blocks<bf16>(*kernel);
  if (avx512_part_passes() != nullptr) check_blocks<float>(played_parts_kernel);
  if (parts_micro_kernel() != nullptr) check_blocks<float>(*parts_micro_kernel());
  on_each_instruction_set([this](const char* set) {
    SCOPED_TRACE(set);
    check_blocks<float>(f32_micro_kernel());
  });
}

TEST_F(MatmulAmx, FloatsMultiplyInThreeParts) {
  if (avx512_part_passes() == nullptr) GTEST_SKIP() << "this processor has no AVX-512, which packs parts";
  check_all<float>(played_parts_kernel);
  check_teams<float>(played_parts_kernel, 100, 48);
  if (parts_micro_kernel() == nullptr) return;
  check_all<float>(*parts_micro_kernel());
  check_teams<float>(*parts_micro_kernel(), 1000, 16);
}

// Operands that begin or end where memory does.
TEST_F(MatmulAmx, PackingPartsReadsNothingElse) {
  if (avx512_part_passes() == nullptr) GTEST_SKIP() << "this processor has no AVX-512, which packs parts";
  const PartPasses& pass = *avx512_part_passes();
  constexpr std::int64_t guard = 64 * 1024, room = 64 * 1024;  // bytes, whole pages
  void* const mapped =
      ::mmap(nullptr, room + 2 * guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  float* const first = static_cast<float*>(mapped) + guard / 4;
  ASSERT_EQ(::mprotect(first, room, PROT_READ | PROT_WRITE), 0);
  std::vector<std::uint32_t> to(3 * MicroKernel::most_tile * parts_of_f32 / 2);
  for (const std::int64_t k : {1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 65, 70})
    for (const std::int64_t lines : {1, 2, 15, 16, 17, 31, 32})
      for (const std::int64_t between : {0, 3})
        for (const bool ends : {false, true}) {
          const auto operand = [&](std::int64_t rows, std::int64_t cols) {
            const std::int64_t floats = (rows - 1) * (cols + between) + cols;
            return ends ? first + room / 4 - floats : first;
          };
          const std::int64_t along = k + between, across = lines + between;
          pass.words_along(operand(lines, k), along, lines, k, amx_cols, to.data());
          pass.groups_along(operand(lines, k), along, lines, k, amx_rows, to.data());
          pass.words_across(operand(k, lines), across, lines, k, amx_cols, to.data());
          pass.groups_across(operand(k, lines), across, lines, k, amx_rows, to.data());
        }
  ::munmap(mapped, room + 2 * guard);
}

// Operands, products and sums of parts below 2^-126 are 0: each term loses at most as much in each of its six
// products, beside what is lost of its operands.
TEST_F(MatmulAmx, ThreePartsOfTinyNumbersLoseWhatIsSubnormal) {
  if (parts_micro_kernel() == nullptr) GTEST_SKIP() << "this processor has no AMX";
  constexpr std::int64_t m = 33, n = 34, k = 100;
  const double least = std::numeric_limits<float>::min(), eps = std::numeric_limits<float>::epsilon();
  const auto index = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  for (const auto& [of_a, of_b] : {std::pair{-60, -60}, {-120, 0}, {-126, 20}, {-64, -64}, {-140, 100}}) {
    std::vector<float> a = random<float>(m, k, k), b = random<float>(k, n, n), c(m * n);
    for (float& x : a) x = std::ldexp(x, of_a);
    for (float& x : b) x = std::ldexp(x, of_b);
    multiply_by(*parts_micro_kernel(),
                {.m = m, .n = n, .k = k, .a = {a.data(), k}, .b = {b.data(), n}, .c = {c.data(), n}},
                scratch());
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; j < n; ++j) {
        double sum = 0, sizes = 0, lost = 0;
        for (std::int64_t l = 0; l < k; ++l) {
          const double x = a[index(i * k + l)], y = b[index(l * n + j)];
          sum += x * y, sizes += std::abs(x * y);
          lost += (std::size(part_products) + 2 * (std::abs(x) + std::abs(y))) * least;
        }
        ASSERT_NEAR(c[index(i * n + j)], sum, static_cast<double>(k + 2) * eps * sizes + lost)
            << of_a << ", " << of_b << " at " << i << ", " << j;
      }
  }
}

// Beside the same sums in f64: no further off than plain sums in f32. Where few terms of very different sizes
// make up a sum, each is added as six products, and as many roundings have six times the variance of one.
TEST_F(MatmulAmx, ThreePartsAreAsCloseAsFloats) {
  if (parts_micro_kernel() == nullptr) GTEST_SKIP() << "this processor has no AMX";
  constexpr std::int64_t m = 64, n = 32;
  for (const std::int64_t k : {32, 700, 2048})
    for (const int exponents : {0, 40}) {  // of 2; between so many and as many negative ones
      const auto spread = [&](std::vector<float> x) {
        for (std::size_t i = 0; i < x.size() && exponents > 0; ++i)
          x[i] = std::ldexp(x[i], static_cast<int>(i * 7919 % (2 * exponents + 1)) - exponents);
        return x;
      };
      const std::vector<float> a = spread(random<float>(m, k, k)), b = spread(random<float>(k, n, n));
      std::vector<float> c(m * n);
      multiply_by(*parts_micro_kernel(),
                  {.m = m, .n = n, .k = k, .a = {a.data(), k}, .b = {b.data(), n}, .c = {c.data(), n}},
                  scratch());
      double squares = 0, squares_of_floats = 0;  // of errors, relative to the sum of the terms' sizes
      for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < n; ++j) {
          double sum = 0, sizes = 0;
          float of_floats = 0;
          for (std::int64_t l = 0; l < k; ++l) {
            const float x = a[static_cast<std::size_t>(i * k + l)],
                        y = b[static_cast<std::size_t>(l * n + j)];
            sum += double{x} * double{y}, sizes += std::abs(double{x} * double{y});
            of_floats = std::fma(x, y, of_floats);
          }
          squares += std::pow((double{c[static_cast<std::size_t>(i * n + j)]} - sum) / sizes, 2);
          squares_of_floats += std::pow((double{of_floats} - sum) / sizes, 2);
        }
      EXPECT_LE(squares, (exponents == 0 ? 1 : 6) * squares_of_floats)
          << k << ", exponents up to " << exponents;
    }
}

TEST_F(MatmulAmx, ThreePartsKeepWhatIsNotFinite) {
  if (avx512_part_passes() == nullptr) GTEST_SKIP() << "this processor has no AVX-512, which packs parts";
  constexpr std::int64_t m = 40, n = 35, k = 70, row = 33, column = 34, at = 69;
  const float infinity = std::numeric_limits<float>::infinity();
  std::uint32_t all_ones = 0x7fffffff;  // a NaN that rounding would take for a number
  float full_nan;
  std::memcpy(&full_nan, &all_ones, sizeof full_nan);
  for (const MicroKernel* kernel : {&played_parts_kernel, parts_micro_kernel()})
    for (const float bad : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), full_nan})
      for (const bool in_a : {false, true}) {
        if (kernel == nullptr) continue;
        std::vector<float> a = random<float>(m, k, k), b = random<float>(k, n, n), c(m * n);
        (in_a ? a[row * k + at] : b[at * n + column]) = bad;
        multiply_by(*kernel,
                    {.m = m, .n = n, .k = k, .a = {a.data(), k}, .b = {b.data(), n}, .c = {c.data(), n}},
                    scratch());
        for (std::int64_t i = 0; i < m; ++i)
          for (std::int64_t j = 0; j < n; ++j)
            ASSERT_EQ(std::isnan(c[static_cast<std::size_t>(i * n + j)]), in_a ? i == row : j == column)
                << kernel->name << ": " << bad << " at " << i << ", " << j;
      }
}

// bf16 are widened to f32.
TEST_F(MatmulAmx, FloatsMultiplyByEachInstructionSet) {  // long
  on_each_instruction_set([this](const char* name) {
    SCOPED_TRACE(name);
    check_all(f32_micro_kernel());
    check_teams(f32_micro_kernel(), 1000, 24);
  });
}

TEST_F(MatmulAmx, TheProcessorsPairsMultiply) {
  if (avx512_micro_kernel() == nullptr) GTEST_SKIP() << "this processor has no AVX-512 for bf16";
  check_all(*avx512_micro_kernel());
  check_all(*avx512_column_kernel());
}

}  // namespace
}  // namespace echelon::matmul_amx_test
