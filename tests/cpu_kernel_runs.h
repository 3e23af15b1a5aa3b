// What the tests of the kernels of CPUs share: the same numbers for them and for the reference, and by how
// much they may differ.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "base/philox.h"
#include "tensor/kernels.h"
#include "tensor/normals.h"

namespace echelon::checks {

class OfCpuKernels : public ::testing::Test {
 protected:
  static constexpr double eps = std::numeric_limits<float>::epsilon();
  static constexpr float frame_value = 7.0f;

  // The same numbers three times: f64 for the reference, f32 for the kernels on one thread and on several.
  struct Operand {
    Tensor exact, one, several;
  };

  struct Size {
    std::int64_t rows, cols;
  };
  // Rows and columns around the widths of vectors; the last ones are large enough for threads and for groups
  // of rows.
  static inline const std::vector<Size> sizes{{1, 1}, {3, 7}, {7, 64}, {2, 100}, {70, 257}, {200, 100}};

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

}  // namespace echelon::checks
