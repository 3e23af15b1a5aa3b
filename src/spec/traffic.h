// Bytes that one rank sends, by mesh axis and verb. plan/traffic predicts them; comm/recording measures them.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "spec/mesh.h"

namespace echelon {

enum class Verb { all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, recv, barrier };
inline constexpr std::array<Verb, 8> all_verbs{Verb::all_reduce, Verb::all_gather, Verb::reduce_scatter,
                                               Verb::all_to_all, Verb::broadcast,  Verb::send,
                                               Verb::recv,       Verb::barrier};
const char* verb_name(Verb verb);

struct VerbTraffic {
  std::int64_t calls = 0;
  std::int64_t bytes = 0;  // sent by this rank
  bool operator==(const VerbTraffic&) const = default;
};

struct Traffic {
  std::array<std::array<VerbTraffic, all_verbs.size()>, traffic_axes.size()> cells{};
  VerbTraffic& at(Axis axis, Verb verb) {
    return cells[static_cast<std::size_t>(axis)][static_cast<std::size_t>(verb)];
  }
  const VerbTraffic& at(Axis axis, Verb verb) const {
    return cells[static_cast<std::size_t>(axis)][static_cast<std::size_t>(verb)];
  }
  std::int64_t bytes(Axis axis) const;
  Traffic operator-(const Traffic& before) const;  // what was sent since `before`
  Traffic& operator+=(const Traffic& more);
  Traffic operator/(std::int64_t steps) const;  // of one of `steps` equal steps
  bool operator==(const Traffic&) const = default;
};

// Copies of tokens that a rank exchanges with the others of its expert group in the passes of a step: sent to
// remote experts, and received for experts here.
struct MovedCopies {
  std::int64_t forward_sent = 0, forward_received = 0, backward_sent = 0, backward_received = 0;
  std::int64_t forward_rows = 0, backward_rows = 0;  // that the experts here processed, local copies included
  // The same for recomputation: of the experts' inputs, and of their outputs if an op after them reads these.
  std::int64_t again_sent = 0, again_received = 0, again_rows = 0;
  // Bytes sent over cp when each rank sums part of the experts' gradients from the copies of all cp ranks
  // (parallel/whole_copies.h): as whole rows, and as parts of rows.
  std::int64_t gathered_bytes = 0, exchanged_bytes = 0;
  MovedCopies& operator+=(const MovedCopies& more);
};

// What a step recorded about its traffic that no plan determines.
struct DecidedByData {
  MovedCopies copies;
  bool passes_again = false;  // a speculative optimizer step was undone
};

// The bytes that rank `rank` of a group of n = counts.size() sends, if counts[i] elements belong to rank i.
//   all_gather      own part to n-1 others                      (n-1) counts[rank]
//   reduce_scatter  each other rank's part of its own buffer    total - counts[rank]
//   all_reduce      reduce_scatter + all_gather, even cut       2 (n-1)/n of the buffer
// These are the volumes of the ring algorithms, which are the least possible.
std::int64_t bytes_sent(Verb verb, std::span<const std::int64_t> counts, int rank,
                        std::int64_t element_bytes);

// The same for an all_reduce of `count` elements over `n` ranks, cut by split_range().
std::int64_t all_reduce_bytes_sent(std::int64_t count, int n, int rank, std::int64_t element_bytes);

}  // namespace echelon
