// A device of blocks with many lanes, on the host: what launches the kernels of a device in tests. The lanes
// of a block share one thread, each with a stack of its own, and each runs up to the next sync(), in rising
// order or in falling: what a lane reads before another has written it is no number, in one order or the
// other. Lanes that do not all come to a sync() are an InvariantError. Under AddressSanitizer what lies
// outside of a block's memory is found.
//
// Four warps are a warpgroup; that one waits for its products (begin_products, end_products) is not played.
//
// 32 lanes are a warp, and play its instructions (tensor/rows/fragments.h) as the PTX ISA lays fragments out:
// each waits for the others of its warp there. A warp runs on to the next sync() before the next one begins,
// so that what it reads or overwrites too early is not what its neighbours have. copy_later() is done at once
// in falling order, and at arrive() in rising order; until then no number is there.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "lane_stack.h"
#include "tensor/rows/fragments.h"
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
        shared_(new (alignment) std::byte[shared_bytes]),
        boards_(2 * ((lanes_.size() + rows::warp_lanes - 1) / rows::warp_lanes)) {}

  int lanes() const { return static_cast<int>(lanes_.size()); }
  bool falling() const { return falling_; }
  std::byte* shared() { return shared_.get(); }
  std::array<std::byte, 8>& slot(std::size_t lane) { return lanes_[lane].slot; }
  // Copies to shared memory that have not arrived.
  struct Copy {
    void* to;
    const void* from;
  };
  std::vector<Copy>& copies(int lane) { return lanes_[static_cast<std::size_t>(lane)].copies; }
  // body(lane) of each of them.
  void run(const std::function<void(int)>& body) {
    std::memset(shared_.get(), 0xff, shared_bytes_);  // as what another kernel left: no number
    body_ = &body;
    for (Lane& lane : lanes_) {
      lane.has_ended = false;
      lane.stack.begin(&EmulatedBlock::enter);
    }
    constexpr std::size_t warp = rows::warp_lanes;
    const std::size_t warps = (lanes_.size() + warp - 1) / warp;
    for (std::size_t ended = 0; ended < lanes_.size();) {
      ended = 0;
      for (std::size_t w = 0; w < warps; ++w) ended += run_warp(warp * (falling_ ? warps - 1 - w : w));
      check(ended == 0 || ended == lanes_.size(), "all lanes of a block come to each sync()");
    }
  }
  void sync() { wait(nullptr); }

  // Each lane of a warp gives an x and gets those of all. `instruction`: which one it is, as all of them do
  // the same.
  template <class X>
  const X* exchange(const char* instruction, const X& x) {
    static_assert(sizeof(X) <= sizeof(Board::bytes) / rows::warp_lanes);
    const std::size_t lane = running_, in_warp = lane % rows::warp_lanes;
    // Of two boards the one that nobody reads any more.
    Board& board = boards_[2 * (lane / rows::warp_lanes) + (lanes_[lane].exchanges++ & 1)];
    auto* const all = reinterpret_cast<X*>(board.bytes);
    std::memcpy(static_cast<void*>(all + in_warp), &x, sizeof x);
    wait(instruction);
    return all;
  }
  // What a lane does that no device can. Thrown when the lanes wait: AddressSanitizer takes an exception on a
  // lane's own stack for a fault.
  bool require(bool holds, const char* what) {
    if (!holds) broken_ = what;
    return holds;
  }
  bool holds(const void* from, std::size_t bytes) const {
    const auto* const at = static_cast<const std::byte*>(from);
    return at >= shared_.get() && at + bytes <= shared_.get() + shared_bytes_;
  }

 private:
  static constexpr std::align_val_t alignment{1024};
  struct Lane {
    LaneStack stack = {};
    std::array<std::byte, 8> slot = {};
    bool has_ended = false;
    const char* instruction = nullptr;  // of the warp, that it waits at; null: at a sync()
    std::size_t exchanges = 0;
    std::vector<Copy> copies = {};
  };
  struct alignas(16) Board {
    std::byte bytes[32 * rows::warp_lanes];
  };
  // The lanes from `first` on, up to the next sync() of all of them. How many of them have ended.
  std::size_t run_warp(std::size_t first) {
    const std::size_t end = std::min(first + rows::warp_lanes, lanes_.size());
    for (;;) {
      std::size_t ended = 0;
      for (std::size_t i = first; i < end; ++i) {
        running_ = falling_ ? end - 1 - (i - first) : i;
        current() = this;
        lanes_[running_].stack.resume();
        if (lanes_[running_].has_ended) ++ended;
      }
      if (error_) std::rethrow_exception(error_);
      check(broken_ == nullptr, broken_);
      const char* const instruction = lanes_[first].instruction;
      for (std::size_t i = first; i < end; ++i)
        check(lanes_[i].instruction == instruction, "all lanes of a warp come to each of its instructions");
      if (instruction == nullptr) return ended;
      check(end - first == rows::warp_lanes, "a warp is 32 lanes");
    }
  }
  void wait(const char* instruction) {
    Lane& lane = lanes_[running_];
    lane.instruction = instruction;
    lane.stack.pause();
  }
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
    block.lanes_[lane].instruction = nullptr;
    block.lanes_[lane].stack.pause();
  }

  std::vector<Lane> lanes_;
  const bool falling_;
  const std::size_t shared_bytes_;
  struct Free {
    void operator()(std::byte* memory) const { operator delete[](memory, alignment); }
  };
  std::unique_ptr<std::byte[], Free> shared_;
  std::vector<Board> boards_;
  const std::function<void(int)>* body_ = nullptr;
  std::size_t running_ = 0;
  std::exception_ptr error_ = {};
  const char* broken_ = nullptr;
};

// The instructions of one lane's warp.
class EmulatedWarp {
 public:
  EmulatedWarp(EmulatedBlock& of, int lane) : of_(of), lane_(lane) {}

  int lane() const { return lane_ % rows::warp_lanes; }
  int number() const { return lane_ / rows::warp_lanes; }
  int count() const { return of_.lanes() / rows::warp_lanes; }

  void multiply(rows::SumFragment& c, const rows::LeftFragment& a, const rows::RightFragment& b) const {
    struct Operands {
      rows::LeftFragment a;
      rows::RightFragment b;
    };
    const Operands* const all = of_.exchange("multiply", Operands{a, b});
    for (int i = 0; i < 4; ++i) {
      const int row = lane() / 4 + (i < 2 ? 0 : 8), column = lane() % 4 * 2 + (i & 1);
      for (int k = 0; k < 16; ++k) {
        const int upper = k / 8, in_group = k % 8 / 2;  // lane 4 group + in_group has k of a row or column
        const float x = half(all[row % 8 * 4 + in_group].a.words[row / 8 + 2 * upper], k & 1);
        const float y = half(all[column * 4 + in_group].b.words[upper], k & 1);
        c.sums[i] = std::fma(x, y, c.sums[i]);
      }
    }
  }
  void load(const bf16* row, std::uint32_t (&to)[4]) const {
    const bf16* const* const rows = rows_of("load", row);
    for (int i = 0; i < 4; ++i) {
      const bf16* const two = rows[8 * i + lane() / 4] + lane() % 4 * 2;
      to[i] = two[0].bits | static_cast<std::uint32_t>(two[1].bits) << 16;
    }
  }
  void load_turned(const bf16* row, std::uint32_t (&to)[4]) const {
    const bf16* const* const rows = rows_of("load_turned", row);
    for (int i = 0; i < 4; ++i) {
      const bf16 *const one = rows[8 * i + lane() % 4 * 2], *const next = rows[8 * i + lane() % 4 * 2 + 1];
      to[i] = one[lane() / 4].bits | static_cast<std::uint32_t>(next[lane() / 4].bits) << 16;
    }
  }
  static constexpr bool has_warpgroups = true;
  template <class... Registers>
  void begin_products(Registers&...) const {}
  template <class... Sums>
  void end_products(Sums&...) const {}
  template <int wide>
  void multiply_turned(bool first, rows::SumFragment* sums, const rows::SharedRows& left, int row,
                       const rows::SharedRows& right, int column, int depth) const {
    of_.require(row % 64 == number() % 4 * 16, "a warpgroup's rows begin at a multiple of 64");
    multiply_together<wide>(first, sums, rows::left_fragment(*this, left, row, depth),
                            [&](int k, int col) { return right.at(column + col, depth + k); });
  }
  template <int wide>
  void multiply_rows(bool first, rows::SumFragment* sums, const rows::LeftFragment& left,
                     const rows::SharedRows& right, int depth, int column) const {
    multiply_together<wide>(first, sums, left,
                            [&](int row, int col) { return right.at(depth + row, column + col); });
  }
  float across(float x, int apart) const { return of_.exchange("across", x)[lane() ^ apart]; }
  std::uint32_t pair(float low, float high) const {
    return bf16(low).bits | static_cast<std::uint32_t>(bf16(high).bits) << 16;
  }
  float power_of_two(float x) const { return std::exp2(x); }
  float reciprocal(float x) const { return 1 / x; }
  void meet() const { of_.exchange("meet", '.'); }
  void copy_later(void* to, const void* from, bool is) const {
    alignas(16) static const std::byte zeros[16] = {};
    if (!is) from = zeros;
    if (!of_.require(of_.holds(to, 16) && reinterpret_cast<std::uintptr_t>(to) % 16 == 0 &&
                         reinterpret_cast<std::uintptr_t>(from) % 16 == 0,
                     "a copy of 16 bytes begins at multiples of 16"))
      return;
    std::memset(to, 0xff, 16);
    of_.copies(lane_).push_back({to, from});
    if (of_.falling()) std::memcpy(to, from, 16);
  }
  void arrive() const {
    for (const EmulatedBlock::Copy& copy : of_.copies(lane_)) std::memcpy(copy.to, copy.from, 16);
    of_.copies(lane_).clear();
  }

 private:
  // right(row, column): where an element of the right operand is.
  template <int wide, class Right>
  void multiply_together(bool first, rows::SumFragment* sums, const rows::LeftFragment& left,
                         const Right& right) const {
    of_.require(of_.lanes() % (4 * rows::warp_lanes) == 0, "a warpgroup is four warps");
    for (int j = 0; j < wide / 8; ++j) {
      rows::RightFragment b;
      const int column = 8 * j + lane() / 4, row = lane() % 4 * 2;
      for (int i = 0; i < 2; ++i)
        b.words[i] = right(row + 8 * i, column)->bits |
                     static_cast<std::uint32_t>(right(row + 8 * i + 1, column)->bits) << 16;
      if (first) sums[j] = {};
      multiply(sums[j], left, b);
    }
  }
  static float half(std::uint32_t word, int which) {
    return bf16::of_bits(static_cast<std::uint16_t>(word >> 16 * which));
  }
  const bf16* const* rows_of(const char* instruction, const bf16* row) const {
    const bool is = of_.require(of_.holds(row, 16) && reinterpret_cast<std::uintptr_t>(row) % 16 == 0,
                                "a row of a matrix begins at a multiple of 16 bytes of shared memory");
    return of_.exchange(instruction, is ? row : reinterpret_cast<const bf16*>(of_.shared()));
  }

  EmulatedBlock& of_;
  int lane_;
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
  EmulatedWarp warp() const { return {of_, lane_}; }

 private:
  EmulatedBlock& of_;
  std::int64_t block_;
  int lane_;
};

class EmulatedLaunch {
 public:
  // `rows` of a column sum and `piece` elements of a row are a block's.
  EmulatedLaunch(int lanes, bool falling, std::int64_t piece, std::int64_t rows,
                 std::size_t most_shared_bytes, bool has_warpgroups = false)
      : lanes_(lanes),
        falling_(falling),
        piece_(piece),
        rows_(rows),
        most_shared_bytes_(most_shared_bytes),
        has_warpgroups_(has_warpgroups) {}

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
      block.run([&](int lane) {
        kernel(EmulatedTeam(block, at, lane));
        block.require(block.copies(lane).empty(), "no copy is under way when a kernel ends");
      });
    }
  }

  // Half of the lanes for a row that is short.
  template <class Kernel>
  void run_rows(const char* name, std::int64_t rows, std::int64_t cols, const Kernel& kernel) const {
    EmulatedLaunch launch = *this;
    if (cols < 2 * lanes_) launch.lanes_ = (lanes_ + 1) / 2;
    launch.run(name, rows, kernel);
  }

  std::int64_t piece() const { return piece_; }
  std::int64_t rows_at_once(std::int64_t, std::int64_t) const { return rows_; }
  std::int64_t lanes() const { return lanes_; }
  std::size_t most_shared_bytes() const { return most_shared_bytes_; }
  bool has_warpgroups() const { return has_warpgroups_; }

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
  bool has_warpgroups_;
};

}  // namespace echelon::checks
