// The kernels of a device against the reference kernels on the same numbers: in threads of the host as lanes,
// several to a block, with few elements to each, so that tails, strides and empty parts are met; and on a
// CUDA device where there is one.
//
// A result may be off by what another order of its sums makes, c eps sqrt(length) of the largest element,
// and in bf16 by one unit of the last place, as both are rounded once from what may lie on either side.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/philox.h"
#include "devices_under_test.h"
#include "tensor/host.h"
#include "tensor/kernels.h"

namespace echelon::checks {

class OfDeviceKernels : public ::testing::TestWithParam<DeviceUnderTest> {
 protected:
  static constexpr Transpose no = Transpose::no, yes = Transpose::yes;

  // The same numbers for the reference kernels and for those under test.
  struct Operand {
    Tensor expected, tested;
  };

  struct Size {
    std::int64_t rows, cols;
  };
  static inline const std::vector<Size> sizes{{1, 1}, {3, 7}, {14, 33}, {0, 5}};
  // Of what takes several columns at once: more of them than lanes keep, with and without a rest.
  static inline const std::vector<Size> with_long_rows{{1, 1}, {3, 7}, {14, 33}, {0, 5}, {6, 320}, {2, 601}};
  static inline const std::vector<DType> stored{DType::f64, DType::f32, DType::bf16};

  void SetUp() override {
    if (const std::string why = GetParam().why_not(); !why.empty()) GTEST_SKIP() << why;
    device = GetParam().use();
    tested = device.kernels.get();
  }

  Arena arena;
  std::unique_ptr<Kernels> reference = make_reference_kernels();
  checks::DeviceInUse device;
  Kernels* tested = nullptr;
  std::uint64_t draws = 0;

  Operand make(DType dtype, std::vector<std::int64_t> shape) {
    return {Tensor(arena, MemoryCategory::other, dtype, shape),
            Tensor(*device.arena, MemoryCategory::other, dtype, shape)};
  }
  Operand of(const std::vector<double>& numbers, Operand x) {
    copy_numbers_from_host(numbers, x.expected);
    copy_numbers_from_host(copy_numbers_to_host(x.expected), x.tested);
    return x;
  }
  std::vector<double> normal(std::int64_t count, double scale = 1) {
    std::vector<double> numbers(static_cast<std::size_t>(count));
    Philox(17, Stream::test, draws++).fill_normal(0, numbers.size(), numbers.data());
    for (double& x : numbers) x *= scale;
    return numbers;
  }
  // A column range of a wider matrix: whose rows begin at multiples of 16 bytes, or hardly ever.
  bool is_aligned = false;
  Operand random(DType dtype, std::int64_t rows, std::int64_t cols, double scale = 1) {
    return of(normal(rows * cols, scale), range_of_wider(dtype, rows, cols));
  }
  Operand range_of_wider(DType dtype, std::int64_t rows, std::int64_t cols) {
    const std::int64_t before = is_aligned ? 8 : 1, width = is_aligned ? (cols + 15) / 8 * 8 : cols + 3;
    const Operand wide =
        of(std::vector<double>(static_cast<std::size_t>(rows * width), 0.25), make(dtype, {rows, width}));
    return {wide.expected.column_range(before, before + cols),
            wide.tested.column_range(before, before + cols)};
  }
  Operand vector(DType dtype, std::int64_t count, double scale = 1) {
    return of(normal(count, scale), make(dtype, {count}));
  }
  Operand ids(const std::vector<std::int32_t>& values) {
    const Operand x = make(DType::i32, {std::ssize(values)});
    copy_from_host(values, x.expected);
    copy_from_host(values, x.tested);
    return x;
  }
  Operand shaped(const Operand& x, std::vector<std::int64_t> shape) {
    return {x.expected.reshape(shape), x.tested.reshape(shape)};
  }
  // As a matrix whose rows follow each other.
  Operand of_flat(DType dtype, std::int64_t rows, std::int64_t cols) {
    return of(normal(rows * cols), make(dtype, {rows, cols}));
  }
  Operand number(double value) { return of({value}, make(DType::f64, {1})); }

  // call(kernels, of): of(operand) is what these kernels work on.
  template <class Call>
  void run(const Call& call) {
    call(*reference, [](const Operand& x) { return x.expected; });
    call(*tested, [](const Operand& x) { return x.tested; });
  }

  static double largest_of(const Operand& x) {
    double largest = 0;
    for (const double value : copy_numbers_to_host(x.expected))
      if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
    return largest;
  }
  // `length`: of the longest sum. `summand`: the largest of what is summed, where too few sums are compared
  // to rely on one of them being as large. Afterwards both sides go on with the same numbers.
  static void expect_close(const Operand& x, std::int64_t length, const char* what, double c = 4,
                           double summand = 0) {
    const std::vector<double> expected = copy_numbers_to_host(x.expected),
                              tested = copy_numbers_to_host(x.tested);
    const DType dtype = x.tested.dtype();
    const double eps = wide(dtype) == DType::f64 ? std::numeric_limits<double>::epsilon()
                                                 : std::numeric_limits<float>::epsilon();
    const double unit = dtype == DType::bf16 ? 0x1p-7 : 0;
    const double sums = c * eps * std::sqrt(static_cast<double>(length)) * std::max(largest_of(x), summand);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(tested[i] == expected[i] ||
                  std::abs(tested[i] - expected[i]) <= unit * std::abs(expected[i]) + sums)
          << what << " in " << dtype_name(dtype) << ", element " << i << ": " << expected[i]
          << " expected, not " << tested[i];
    copy_numbers_from_host(expected, x.tested);
  }
  // What a norm's backward pass adds up: what is in dx, and rstd dy w with means of as much taken from it. Of
  // one column these are the same number: all that is left is its rounding, which rstd (of LayerNorm 316
  // there) has made as large as that of a number of this size. `each`: at which places of stats rstd stands.
  static double backward_summand(const Operand& dy, const Operand& w, const Operand& stats, std::size_t each,
                                 const Operand& dx) {
    const std::vector<double> numbers = copy_numbers_to_host(stats.expected);
    double rstd = 0;
    for (std::size_t i = each - 1; i < numbers.size(); i += each) rstd = std::max(rstd, std::abs(numbers[i]));
    return largest_of(dx) + rstd * largest_of(dy) * (w.expected.defined() ? largest_of(w) : 1);
  }
  // As expect_close, with so many roundings in bf16 on each side, each of a number at most as large as the
  // largest.
  static void expect_followed(const Operand& x, std::int64_t length, double roundings, const char* what) {
    const std::vector<double> expected = copy_numbers_to_host(x.expected),
                              tested = copy_numbers_to_host(x.tested);
    if (x.tested.dtype() != DType::bf16) return expect_close(x, length, what);
    const double largest = largest_of(x);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_LE(std::abs(tested[i] - expected[i]), roundings * 0x1p-8 * largest)
          << what << ", element " << i << ": " << expected[i] << " expected, not " << tested[i];
    copy_numbers_from_host(expected, x.tested);
  }
  static void expect_same_bytes(const Operand& x, const char* what) {
    const auto bytes_of = [](const Tensor& t) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(t.bytes()));
      copy_bytes_to_host(t, bytes);
      return bytes;
    };
    EXPECT_EQ(bytes_of(x.tested), bytes_of(x.expected)) << what;
  }
  // To the bit, but of a NaN that it is one: which NaN an addition gives is the processor's choice.
  static void expect_same_numbers(const Operand& x, const char* what) {
    const std::vector<double> expected = copy_numbers_to_host(x.expected),
                              tested = copy_numbers_to_host(x.tested);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(std::isnan(expected[i])
                      ? std::isnan(tested[i])
                      : std::bit_cast<std::uint64_t>(tested[i]) == std::bit_cast<std::uint64_t>(expected[i]))
          << what << ", element " << i << ": " << expected[i] << " expected, not " << tested[i];
  }
  static void expect_same_ids(const Operand& x, const char* what) {
    EXPECT_EQ(copy_to_host<std::int32_t>(x.tested), copy_to_host<std::int32_t>(x.expected)) << what;
  }
};

}  // namespace echelon::checks
