// Products through the tiles of AMX, the instructions played in C++, where the processor has none; by those
// themselves where it has. What is packed, cut and stored around them is what runs.
#include "tensor/matmul_amx.h"
#include "case_choice.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/philox.h"
#include "tensor/matmul.h"
#include "tensor/matmul_simd.h"

namespace echelon::matmul_amx_test {
namespace {

// The two bf16 of a word.
float low(std::uint32_t word) {
  bf16 x;
  x.bits = static_cast<std::uint16_t>(word);
  return float{x};
}
float high(std::uint32_t word) { return low(word >> 16); }

// TILELOADD, TDPBF16PS and TILESTORED as the manual writes them down.
struct PlayedUnit {
  static inline bool ready = false;
  static inline int begins = 0;
  static inline std::uint32_t a[2][16][16], b[2][16][16];
  static inline float sums[2][2][16][16];

  static void begin() {
    EXPECT_FALSE(ready);
    ready = true;
    ++begins;
  }
  static void end() {
    EXPECT_TRUE(ready);
    ready = false;
  }
  static void clear() { std::memset(sums, 0, sizeof sums); }
  static void fetch(std::uint32_t to[16][16], const std::uint32_t* from, std::int64_t stride) {
    for (int row = 0; row < 16; ++row)
      std::memcpy(to[row], reinterpret_cast<const std::byte*>(from) + row * stride, 64);
  }
  static void load(const std::uint32_t* a0, const std::uint32_t* a1, std::int64_t a_stride,
                   const std::uint32_t* b0, const std::uint32_t* b1, std::int64_t b_stride) {
    EXPECT_TRUE(ready);
    fetch(a[0], a0, a_stride), fetch(a[1], a1, a_stride);
    fetch(b[0], b0, b_stride), fetch(b[1], b1, b_stride);
  }
  static void multiply() {
    for (int s = 0; s < 2; ++s)
      for (int t = 0; t < 2; ++t)
        for (int m = 0; m < 16; ++m)
          for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n) {
              float& sum = sums[s][t][m][n];
              sum = std::fma(low(a[s][m][k]), low(b[t][k][n]), sum);
              sum = std::fma(high(a[s][m][k]), high(b[t][k][n]), sum);
            }
  }
  static void store(float* c00, float* c01, float* c10, float* c11, std::int64_t stride) {
    float* const to[2][2] = {{c00, c01}, {c10, c11}};
    for (int s = 0; s < 2; ++s)
      for (int t = 0; t < 2; ++t)
        for (int row = 0; row < 16; ++row)
          std::memcpy(reinterpret_cast<std::byte*>(to[s][t]) + row * stride, sums[s][t][row], 64);
  }
};

constexpr MicroKernel played{.name = "played",
                             .rows = amx_rows,
                             .cols = amx_cols,
                             .pairs = true,
                             .group = amx_group,
                             .a_words = MicroKernel::most_a_words,
                             .tile = amx_tile_by<PlayedUnit>,
                             .begin = PlayedUnit::begin,
                             .end = PlayedUnit::end};

class MatmulAmx : public ::testing::Test {
 protected:
  // Normal numbers that bf16 holds, in a matrix whose rows stand `stride` apart; what lies between them is
  // not a number, and so is what lies behind.
  std::vector<bf16> random(std::int64_t rows, std::int64_t cols, std::int64_t stride) {
    const auto n = static_cast<std::size_t>(rows * cols);
    std::vector<double> values(n);
    Philox(17, Stream::test, draws_++).fill_normal(0, n, values.data());
    std::vector<bf16> matrix(static_cast<std::size_t>(rows * stride),
                             bf16(std::numeric_limits<float>::quiet_NaN()));
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < cols; ++j)
        matrix[static_cast<std::size_t>(i * stride + j)] =
            bf16(values[static_cast<std::size_t>(i * cols + j)]);
    return matrix;
  }

  void check(const MicroKernel& kernel, std::int64_t m, std::int64_t n, std::int64_t k, bool turn_a,
             bool turn_b, DType type, float beta) {
    const std::int64_t a_stride = (turn_a ? m : k) + 3, b_stride = (turn_b ? k : n) + 5, c_stride = n + 1;
    const auto a = random(turn_a ? k : m, turn_a ? m : k, a_stride),
               b = random(turn_b ? n : k, turn_b ? k : n, b_stride), before = random(m, n, c_stride);
    std::vector<bf16> narrow = before;
    std::vector<float> wide(before.begin(), before.end());
    const auto turn = [](bool on) { return on ? Transpose::yes : Transpose::no; };
    const bool is_wide = type == DType::f32;
    const float alpha = 0.5f;
    multiply_by(kernel,
                {.ta = turn(turn_a),
                 .tb = turn(turn_b),
                 .m = m,
                 .n = n,
                 .k = k,
                 .alpha = alpha,
                 .a = {a.data(), a_stride, DType::bf16},
                 .b = {b.data(), b_stride, DType::bf16},
                 .beta = beta,
                 .c = {is_wide ? static_cast<void*>(wide.data()) : narrow.data(), c_stride, type}},
                scratch_.front().bytes);
    const auto index = [](std::int64_t i) { return static_cast<std::size_t>(i); };
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; j < n; ++j) {
        double sum = 0, sizes = 0;
        for (std::int64_t l = 0; l < k; ++l) {
          const double x = double{float{a[index(turn_a ? l * a_stride + i : i * a_stride + l)]}} *
                           double{float{b[index(turn_b ? j * b_stride + l : l * b_stride + j)]}};
          sum += x, sizes += std::abs(x);
        }
        const double old = beta != 0 ? double{float{before[index(i * c_stride + j)]}} : 0.0;
        const double expected = alpha * sum + old;
        const double got =
            is_wide ? double{wide[index(i * c_stride + j)]} : double{float{narrow[index(i * c_stride + j)]}};
        // A sum of k + 1 terms in any order (Higham 2002, 4.2), and the rounding of what is stored.
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
                         {33, 65, 1091}})
      for (const bool turn_a : {false, true})
        for (const bool turn_b : {false, true})
          for (const DType type : {DType::f32, DType::bf16})
            for (const float beta : {0.0f, 1.0f})
              if (checks::is_taken(6)) check(kernel, s.m, s.n, s.k, turn_a, turn_b, type, beta);
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::uint64_t draws_ = 0;
  std::vector<Line> scratch_ =
      std::vector<Line>(static_cast<std::size_t>(product_scratch_bytes(DType::bf16) / 64 + 1));
};

TEST_F(MatmulAmx, PlayedTilesMultiply) {
  check_all(played);
  EXPECT_FALSE(PlayedUnit::ready);
  EXPECT_GT(PlayedUnit::begins, 30);
}

TEST_F(MatmulAmx, TheProcessorsTilesMultiply) {
  if (amx_micro_kernel() == nullptr) GTEST_SKIP() << "this processor has no AMX";
  check_all(*amx_micro_kernel());
}

TEST_F(MatmulAmx, TheProcessorsPairsMultiply) {
  if (avx512_micro_kernel() == nullptr) GTEST_SKIP() << "this processor has no AVX-512 for bf16";
  check_all(*avx512_micro_kernel());
}

}  // namespace
}  // namespace echelon::matmul_amx_test
