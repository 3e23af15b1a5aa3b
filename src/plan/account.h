#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "spec/memory.h"

namespace echelon {

// Counts what is live while a walk over a step allocates and frees as the run does: what Arena does, without
// memory.
class Account {
 public:
  explicit Account(const Memory& kept) : live_(kept), peak_(kept) {}
  void allocate(std::int64_t bytes, MemoryCategory category = MemoryCategory::activations) {
    count({bytes, category});
  }
  void free(std::int64_t bytes, MemoryCategory category = MemoryCategory::activations) {
    count({-bytes, category});
  }
  const Memory& peak() const { return peak_; }

  // Computations that run together change places where they pause (base/work.h): each is recorded by itself,
  // and then they are counted in that order.
  struct Change {
    std::int64_t bytes = 0;
    MemoryCategory category = MemoryCategory::activations;
    bool pauses = false;
  };
  using Recording = std::vector<Change>;
  template <class Body>
  Recording record(const Body& body) {
    Recording recording;
    recording_ = &recording;
    body();
    recording_ = nullptr;
    return recording;
  }
  void pause() {
    if (recording_ != nullptr) recording_->push_back({.pauses = true});
  }
  void count_together(const std::vector<Recording>& parts) {
    std::vector<std::size_t> at(parts.size());
    for (bool more = true; std::exchange(more, false);)
      for (std::size_t p = 0; p < parts.size(); ++p) {
        while (at[p] < parts[p].size() && !parts[p][at[p]].pauses) count(parts[p][at[p]++]);
        more |= at[p]++ < parts[p].size();
      }
  }

 private:
  void count(const Change& change) {
    if (recording_ != nullptr) return recording_->push_back(change);
    live_[change.category] += change.bytes;
    if (change.bytes > 0 && live_.total() > peak_.total()) peak_ = live_;
  }

  Memory live_, peak_;
  Recording* recording_ = nullptr;
};

}  // namespace echelon
