// Memory of one rank: every byte is accounted by category, and freed blocks are kept and handed out again, so
// that a steady-state step asks the system for nothing. On Device::none it is accounted and never there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "spec/device.h"
#include "spec/memory.h"

namespace echelon {

class Arena;

// One allocation. Returns itself to its arena when the last Tensor that views it goes. Without an arena:
// memory that somebody else keeps.
struct Block {
  Arena* arena = nullptr;
  Device device = Device::cpu;
  bool has_memory = false;    // not while it is released
  std::byte* data = nullptr;  // on the cpu, while it has memory
  std::size_t bytes = 0;      // as asked: what the account counts
  std::size_t capacity = 0;   // as held
  MemoryCategory category = MemoryCategory::other;
};

// Not thread-safe: a rank's arena is used by that rank's thread alone. Must outlive its blocks.
class Arena {
 public:
  // `limit_bytes` > 0: an allocation that would bring the live total above it throws RunError (what, how
  // much).
  explicit Arena(Device device = Device::cpu, std::size_t limit_bytes = 0)
      : device_(device), limit_bytes_(limit_bytes) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // 64-byte aligned, contents undefined. RunError when the system has no memory left.
  std::shared_ptr<Block> allocate(std::size_t bytes, MemoryCategory category);

  // The block gives its memory back while its views live on, and takes some again, contents undefined. What
  // allocate() throws.
  void release(Block& block);
  void acquire(Block& block);

  Device device() const { return device_; }
  const Memory& live() const { return live_; }
  // Live bytes by category at the moment when their total was largest since the last reset_peak().
  const Memory& peak() const { return peak_; }
  void reset_peak() { peak_ = live_; }
  // How often the system was asked for memory: constant over steady-state steps.
  std::int64_t system_allocations() const { return system_allocations_; }
  // What the system has given: live blocks and those kept for reuse.
  std::size_t held_bytes() const { return held_bytes_; }
  // Gives the kept blocks back to the system.
  void drop_kept();

 private:
  void take_bytes(Block& block);

  Device device_;
  std::size_t limit_bytes_;
  Memory live_, peak_;
  std::multimap<std::size_t, std::byte*> free_;  // by capacity
  std::int64_t system_allocations_ = 0;
  std::size_t held_bytes_ = 0;
};

}  // namespace echelon
