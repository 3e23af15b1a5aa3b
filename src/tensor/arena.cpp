#include "tensor/arena.h"

#include <cstdlib>
#include <utility>

#include "base/error.h"
#include "base/units.h"

namespace echelon {
namespace {

constexpr std::size_t alignment = 64;  // a cache line, and the widest vector

std::size_t rounded(std::size_t bytes) {
  return bytes == 0 ? alignment : (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace

Arena::~Arena() { drop_kept(); }

void Arena::drop_kept() {
  for (auto& [capacity, data] : free_) {
    std::free(data);
    held_bytes_ -= capacity;
  }
  free_.clear();
}

std::shared_ptr<Block> Arena::allocate(std::size_t bytes, MemoryCategory category) {
  auto block = std::make_unique<Block>();
  block->bytes = bytes;
  block->category = category;
  block->arena = this;
  block->device = device_;
  acquire(*block);
  return {block.release(), [](Block* b) {
            if (b->has_memory) b->arena->release(*b);
            delete b;
          }};
}

void Arena::acquire(Block& block) {
  check(!block.has_memory, "a block takes memory while it has some");
  if (limit_bytes_ > 0 && static_cast<std::size_t>(live_.total()) + block.bytes > limit_bytes_)
    fail_for_good("memory limit of {} a rank: {} of {} more on top of {} do not fit",
                  format_bytes(static_cast<double>(limit_bytes_)),
                  format_bytes(static_cast<double>(block.bytes)), memory_category_name(block.category),
                  format_bytes(static_cast<double>(live_.total())));
  if (device_ == Device::cpu) take_bytes(block);
  block.has_memory = true;
  live_[block.category] += static_cast<std::int64_t>(block.bytes);
  if (live_.total() > peak_.total()) peak_ = live_;
}

void Arena::take_bytes(Block& block) {
  const std::size_t wanted = rounded(block.bytes);
  // A kept block may be up to a quarter larger than asked: microbatches of slightly different sizes then
  // share blocks, and little is wasted.
  auto kept = free_.lower_bound(wanted);
  if (kept != free_.end() && kept->first <= wanted + wanted / 4) {
    block.data = kept->second;
    block.capacity = kept->first;
    free_.erase(kept);
  } else {
    block.data = static_cast<std::byte*>(std::aligned_alloc(alignment, wanted));
    if (block.data == nullptr) {  // what is kept for later may be what is missing now
      drop_kept();
      block.data = static_cast<std::byte*>(std::aligned_alloc(alignment, wanted));
    }
    if (block.data == nullptr)
      fail("out of memory: the system has no {} left", format_bytes(static_cast<double>(wanted)));
    block.capacity = wanted;
    held_bytes_ += wanted;
    ++system_allocations_;
  }
}

void Arena::release(Block& block) {
  check(block.has_memory, "a block gives back memory that it has not");
  live_[block.category] -= static_cast<std::int64_t>(block.bytes);
  block.has_memory = false;
  if (block.data != nullptr) free_.emplace(block.capacity, std::exchange(block.data, nullptr));
}

}  // namespace echelon
