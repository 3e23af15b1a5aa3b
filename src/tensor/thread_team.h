// The compute threads of one rank: the calling thread and others, which wait for work between its kernels.
// Work is divided by its size alone, so a loop body that owns its outputs gives the same bits on any number
// of threads. A body must not throw.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

#include "base/split.h"
#include "tensor/reference_view.h"

namespace echelon {

class ThreadTeam {
 public:
  // Each of the other threads calls `begin_thread` before its first work. RunError if the system provides no
  // thread.
  explicit ThreadTeam(int threads, const std::function<void()>& begin_thread = {});
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int threads() const { return threads_; }

  // Calls body(i, thread) for each i < count on whichever thread is free; with a single thread, in the order
  // of i.
  template <class Body>
  void each_task(std::int64_t count, const Body& body) const {
    if (threads_ == 1 || count <= 1) {
      for (std::int64_t i = 0; i < count; ++i) body(i, 0);
      return;
    }
    std::atomic<std::int64_t> next{0};
    together([&](int thread) {
      for (std::int64_t i = next++; i < count; i = next++) body(i, thread);
    });
  }

  // The same for a body that may throw. Rethrows the exception of the lowest i, after running bodies have
  // finished; none with a higher i is started.
  template <class Body>
  void each_task_that_may_throw(std::int64_t count, const Body& body) const {
    std::atomic<std::int64_t> failed{count};
    std::exception_ptr thrown;
    std::mutex mutex;
    each_task(count, [&](std::int64_t i, int thread) {
      if (i > failed) return;
      try {
        body(i, thread);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (i > failed) return;
        failed = i;
        thrown = std::current_exception();
      }
    });
    if (thrown) std::rethrow_exception(thrown);
  }

  // Calls body(i) for each i in [0, rows), each with about `cols` elements; groups of neighbours go to
  // whichever thread is free.
  template <class Body>
  void each_row(std::int64_t rows, std::int64_t cols, const Body& body) const {
    // Below this many elements it costs more to wake the others than it saves.
    constexpr std::int64_t worth_threads = 16384;
    if (threads_ == 1 || rows * cols < worth_threads) {
      for (std::int64_t i = 0; i < rows; ++i) body(i);
      return;
    }
    // Small parts, so that a thread whose core is busy leaves more to the others.
    constexpr std::int64_t parts_of_thread = 8, smallest = 4096;
    const std::int64_t parts = std::min<std::int64_t>(
        {rows, parts_of_thread * threads_, std::max<std::int64_t>(rows * cols / smallest, threads_)});
    each_task(parts, [&](std::int64_t part, int) {
      const Range mine = split_range(rows, parts, part);
      for (std::int64_t i = mine.begin; i < mine.end; ++i) body(i);
    });
  }

  // Calls body(pointer, row, column, count) for pieces of x. If `whole` (every operand is contiguous), x is
  // one long row 0.
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
  struct Others;
  // Runs act(thread) on every thread; 0 is this one.
  template <class Act>
  void together(const Act& act) const {
    run([](const void* of, int thread) { (*static_cast<const Act*>(of))(thread); }, &act);
  }
  void run(void (*act)(const void* of, int thread), const void* of) const;

  int threads_;
  std::unique_ptr<Others> others_;
};

}  // namespace echelon
