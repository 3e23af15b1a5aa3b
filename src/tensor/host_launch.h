// Runs the function objects of tensor/rows/ on the host: one block after another, each in a single lane, so
// that sums are in index order.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "tensor/rows/team.h"
#include "tensor/tensor.h"

namespace echelon {

class HostLaunch {
 public:
  template <class T>
  static rows::Matrix<T> matrix(const Tensor& t) {
    return {t.host<T>(), t.rows(), t.cols(), t.row_stride()};
  }
  template <class T>
  static T* data(const Tensor& t) {
    return t.host<T>();
  }

  template <class Kernel>
  static void run(const char*, std::int64_t blocks, const Kernel& kernel, std::size_t shared = 0) {
    std::vector<std::max_align_t> memory((shared + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
    auto* const of_block = reinterpret_cast<std::byte*>(memory.data());
    for (std::int64_t block = 0; block < blocks; ++block) kernel(rows::OneLane(block, of_block));
  }

  template <class Kernel>
  static void run_rows(const char* name, std::int64_t rows, std::int64_t, const Kernel& kernel) {
    run(name, rows, kernel);
  }

  // A whole row is one block, and a whole column is one sum.
  static constexpr std::int64_t piece() { return std::int64_t{1} << 62; }
  static constexpr std::int64_t rows_at_once(std::int64_t rows, std::int64_t) { return rows; }
  static constexpr std::int64_t lanes() { return 1; }

  template <class T>
  static std::span<const T> upload(std::span<const T> numbers) {
    return numbers;
  }
  template <class T>
  static std::vector<T> read(const T* from, std::int64_t count) {
    return {from, from + count};
  }
  template <class T>
  class Scratch {
   public:
    explicit Scratch(std::int64_t count) : memory_(static_cast<std::size_t>(count)) {}
    T* data() const { return memory_.data(); }

   private:
    mutable std::vector<T> memory_;
  };
  template <class T>
  static Scratch<T> scratch(std::int64_t count) {
    return Scratch<T>(count);
  }
};

}  // namespace echelon
