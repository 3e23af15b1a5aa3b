// A device of blocks with many lanes, on the host: what launches the kernels of a device in tests. The lanes
// of a block are contexts of one thread, each of which runs up to the next sync(), in rising order or in
// falling: what a lane reads before another has written it is no number, in one order or the other. Lanes
// that do not all come to a sync() are an InvariantError. Under AddressSanitizer what lies outside of a
// block's memory is found.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "tensor/rows/team.h"
#include "tensor/tensor.h"

namespace echelon::checks {

// Of one launch.
class EmulatedBlock {
 public:
  EmulatedBlock(int lanes, bool falling, std::size_t shared_bytes)
      : lanes_(static_cast<std::size_t>(lanes)),
        falling_(falling),
        shared_bytes_(shared_bytes),
        shared_(new std::byte[shared_bytes]) {
    for (Lane& lane : lanes_) lane.stack.reset(new std::byte[stack_bytes]);
  }

  int lanes() const { return static_cast<int>(lanes_.size()); }
  std::byte* shared() { return shared_.get(); }
  std::array<std::byte, 8>& slot(std::size_t lane) { return lanes_[lane].slot; }
  // body(lane) of each of them.
  void run(const std::function<void(int)>& body) {
    std::memset(shared_.get(), 0xff, shared_bytes_);  // as what another kernel left: no number
    body_ = &body;
    for (Lane& lane : lanes_) {
      lane.has_ended = false;
      getcontext(&lane.context);
      lane.context.uc_stack.ss_sp = lane.stack.get();
      lane.context.uc_stack.ss_size = stack_bytes;
      lane.context.uc_link = &scheduler_;
      makecontext(&lane.context, &EmulatedBlock::enter, 0);
    }
    for (std::size_t ended = 0; ended < lanes_.size();) {
      ended = 0;
      for (std::size_t i = 0; i < lanes_.size(); ++i) {
        running_ = falling_ ? lanes_.size() - 1 - i : i;
        current() = this;
        swapcontext(&scheduler_, &lanes_[running_].context);
        if (lanes_[running_].has_ended) ++ended;
      }
      if (error_) std::rethrow_exception(error_);
      check(ended == 0 || ended == lanes_.size(), "all lanes of a block come to each sync()");
    }
  }
  void sync() {
    const std::size_t lane = running_;
    swapcontext(&lanes_[lane].context, &scheduler_);
  }

 private:
  static constexpr std::size_t stack_bytes = 256 << 10;
  struct Lane {
    ucontext_t context = {};
    std::unique_ptr<std::byte[]> stack = {};
    std::array<std::byte, 8> slot = {};
    bool has_ended = false;
  };
  static EmulatedBlock*& current() {
    static thread_local EmulatedBlock* block = nullptr;
    return block;
  }
  static void enter() {
    EmulatedBlock& block = *current();
    const std::size_t lane = block.running_;
    try {
      (*block.body_)(static_cast<int>(lane));
    } catch (...) {
      block.error_ = std::current_exception();
    }
    block.lanes_[lane].has_ended = true;
  }

  std::vector<Lane> lanes_;
  const bool falling_;
  const std::size_t shared_bytes_;
  std::unique_ptr<std::byte[]> shared_;
  ucontext_t scheduler_ = {};
  const std::function<void(int)>* body_ = nullptr;
  std::size_t running_ = 0;
  std::exception_ptr error_ = {};
};

class EmulatedTeam {
 public:
  EmulatedTeam(EmulatedBlock& of, std::int64_t block, int lane) : of_(of), block_(block), lane_(lane) {}
  std::int64_t block() const { return block_; }
  std::int64_t lane() const { return lane_; }
  std::int64_t lanes() const { return of_.lanes(); }
  void sync() const { of_.sync(); }
  template <class X, class Op>
  X reduce(X x, const Op& op) const {
    static_assert(sizeof(X) <= 8);
    std::memcpy(of_.slot(static_cast<std::size_t>(lane_)).data(), &x, sizeof x);
    sync();
    std::vector<X> all(static_cast<std::size_t>(lanes()));
    for (std::size_t i = 0; i < all.size(); ++i) std::memcpy(&all[i], of_.slot(i).data(), sizeof(X));
    sync();
    for (std::size_t apart = 1; apart < all.size(); apart *= 2)
      for (std::size_t i = 0; i + apart < all.size(); i += 2 * apart) all[i] = op(all[i], all[i + apart]);
    return all[0];
  }
  std::byte* shared() const { return of_.shared(); }

 private:
  EmulatedBlock& of_;
  std::int64_t block_;
  int lane_;
};

class EmulatedLaunch {
 public:
  // `rows` of a column sum and `piece` elements of a row are a block's.
  EmulatedLaunch(int lanes, bool falling, std::int64_t piece, std::int64_t rows,
                 std::size_t most_shared_bytes)
      : lanes_(lanes), falling_(falling), piece_(piece), rows_(rows), most_shared_bytes_(most_shared_bytes) {}

  template <class T>
  static rows::Matrix<T> matrix(const Tensor& t) {
    return {t.host<T>(), t.rows(), t.cols(), t.row_stride()};
  }
  template <class T>
  static T* data(const Tensor& t) {
    return t.host<T>();
  }

  template <class Kernel>
  void run(const char*, std::int64_t blocks, const Kernel& kernel, std::size_t shared = 0) const {
    EmulatedBlock block(lanes_, falling_, shared);
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t at = falling_ ? blocks - 1 - b : b;
      block.run([&](int lane) { kernel(EmulatedTeam(block, at, lane)); });
    }
  }

  std::int64_t piece() const { return piece_; }
  std::int64_t rows_at_once(std::int64_t, std::int64_t) const { return rows_; }
  std::int64_t column_blocks(std::int64_t cols) const { return (cols + lanes_ - 1) / lanes_; }
  std::int64_t lanes() const { return lanes_; }
  std::size_t most_shared_bytes() const { return most_shared_bytes_; }

  // Memory of its own, which is gone with the call.
  template <class T>
  class Memory {
   public:
    explicit Memory(std::int64_t count) : memory_(new T[static_cast<std::size_t>(count)]) {}
    T* data() const { return memory_.get(); }

   private:
    std::unique_ptr<T[]> memory_;
  };
  template <class T>
  static Memory<T> upload(std::span<const T> numbers) {
    Memory<T> memory(static_cast<std::int64_t>(numbers.size()));
    std::copy(numbers.begin(), numbers.end(), memory.data());
    return memory;
  }
  template <class T>
  static Memory<T> scratch(std::int64_t count) {
    return Memory<T>(count);
  }
  template <class T>
  static std::vector<T> read(const T* from, std::int64_t count) {
    return {from, from + count};
  }

 private:
  int lanes_;
  bool falling_;
  std::int64_t piece_, rows_;
  std::size_t most_shared_bytes_;
};

}  // namespace echelon::checks
