// Loops of one rank's compute threads (OpenMP). The work is cut by its size alone, so a loop body that owns
// its outputs gives the same bits on any number of threads. A body must not throw.
#pragma once

#include <algorithm>
#include <cstdint>

#include "tensor/reference_view.h"

namespace echelon {

class ThreadTeam {
 public:
  explicit ThreadTeam(int threads) : threads_(threads) {}
  int threads() const { return threads_; }

  // body(i) for each i in [0, rows), each of about `cols` elements.
  template <class Body>
  void each_row(std::int64_t rows, std::int64_t cols, const Body& body) const {
    // Below this many elements a region of threads costs more than it saves.
    constexpr std::int64_t worth_threads = 16384;
    if (threads_ == 1 || rows * cols < worth_threads) {
      for (std::int64_t i = 0; i < rows; ++i) body(i);
    } else {
#pragma omp parallel for num_threads(threads_) schedule(static)
      for (std::int64_t i = 0; i < rows; ++i) body(i);
    }
  }

  // body(pointer, row, column, count) for pieces of x. When `whole` (every operand is contiguous) x is one
  // long row 0.
  template <class T, class Body>
  void each_span(const Matrix<T>& x, bool whole, const Body& body) const {
    if (!whole) return each_row(x.rows, x.cols, [&](std::int64_t i) { body(x[i], i, 0, x.cols); });
    constexpr std::int64_t piece = 8192;
    const std::int64_t length = x.rows * x.cols;
    each_row((length + piece - 1) / piece, piece, [&](std::int64_t i) {
      body(x.data + i * piece, 0, i * piece, std::min(piece, length - i * piece));
    });
  }

 private:
  int threads_;
};

}  // namespace echelon
