// The data movement of a collective of thread ranks, divided into parts; no threads and no locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "comm/call.h"

namespace echelon {

// The work of one collective, in one part per rank. Any thread may do any range of any part; different ranges
// never write the same bytes.
class Movement {
 public:
  // One call per group rank; they must agree.
  explicit Movement(std::vector<Call> calls);

  int num_parts() const { return static_cast<int>(calls_.size()); }
  DType dtype() const { return calls_[0].dtype; }
  std::int64_t part_length(int part) const;      // elements
  std::int64_t bytes() const { return bytes_; }  // of all parts together
  void run(int part, std::int64_t begin, std::int64_t end) const;
  Device device() const { return calls_[0].device; }
  bool reduces() const;
  // In device memory: queues all of it. `streams`, by rank: the stream for its part, on its own device. Gives
  // the same bits.
  void queue_on(std::span<DeviceStream* const> streams) const;

 private:
  // Copies `source` to all destinations but itself.
  void queue_copy(DeviceStream& stream, const std::byte* source, std::span<std::byte* const> destinations,
                  std::int64_t destination_begin, std::int64_t elements) const;
  std::int64_t count(int rank) const { return calls_[0].counts[static_cast<std::size_t>(rank)]; }
  std::int64_t part_begin(int part) const;  // all_reduce, broadcast
  void exchange(int part, std::int64_t begin, std::int64_t end) const;

  std::vector<Call> calls_;
  std::vector<const std::byte*> ins_;
  std::vector<std::byte*> outs_;            // broadcast: without the root's
  std::vector<std::int64_t> offsets_;       // all_gather, reduce_scatter: where each rank's elements begin
  std::vector<std::int64_t> send_offsets_;  // all_to_all: [to * n + from], in the buffer of `from`
  std::int64_t bytes_ = 0;
  bool stream_ = false;
};

}  // namespace echelon
