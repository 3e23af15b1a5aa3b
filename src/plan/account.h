#pragma once

#include <cstdint>

#include "spec/memory.h"

namespace echelon {

// Counts what is live while a walk over a step allocates and frees as the run does: what Arena does, without
// memory.
class Account {
 public:
  explicit Account(const Memory& kept) : live_(kept), peak_(kept) {}
  void allocate(std::int64_t bytes, MemoryCategory category = MemoryCategory::activations) {
    live_[category] += bytes;
    if (live_.total() > peak_.total()) peak_ = live_;
  }
  void free(std::int64_t bytes, MemoryCategory category = MemoryCategory::activations) {
    live_[category] -= bytes;
  }
  const Memory& peak() const { return peak_; }

 private:
  Memory live_, peak_;
};

}  // namespace echelon
