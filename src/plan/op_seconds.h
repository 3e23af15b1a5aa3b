// Seconds of single operations on a machine: products of matrices, attention, passes over memory,
// collectives.
#pragma once

#include <cstdint>

#include "spec/machine.h"
#include "spec/software.h"
#include "spec/traffic.h"

namespace echelon {

// Of an element that products in this precision read.
double operand_bytes(Precision precision);

// What a machine's products reach at most, as a program has them made.
double product_peak(const Machine& machine, const Software& software, Precision precision);

// Prices operations of one training program on one machine.
class OpSeconds {
 public:
  OpSeconds(const Machine& machine, const Software& software, Precision precision);

  // `count` products of (rows x depth) by (depth x cols): the smallest time over the tile sizes, or of moving
  // operands and result, whichever is longer.
  double product(double rows, double depth, double cols, double count = 1) const;
  // The same within a kernel that reads and writes for several: without moving, and without its launch.
  double multiplying(double rows, double depth, double cols, double count = 1) const;
  // How many times as long a product takes whose matrices have rows of `columns` elements: 1 where they begin
  // at multiples of 16 bytes, which is what tensor cores' fastest kernels load at once.
  double unaligned(double columns) const;
  // Fused attention of `flops` over sequences of `length` keys.
  double attention_forward(double flops, double length) const;
  double attention_backward(double flops, double length) const;
  double memory_pass(double bytes) const;
  double elementwise(double bytes) const { return memory_pass(bytes * software_.elementwise_passes); }

  // A group of `size` ranks that are `stride` ranks apart. all_reduce of n ranks over S bytes in a node:
  // 2(n-1) hops and 2(n-1)/n S over the bandwidth; half of that all_gather and reduce_scatter (S: the whole).
  // Across nodes hierarchically: reduce_scatter inside, all_reduce of each rank's part across on its own
  // link, all_gather inside. all_to_all: each rank sends (n-1)/n of its S bytes, those to other nodes over
  // its own link.
  double collective(Verb verb, double bytes, std::int64_t size, std::int64_t stride) const;
  // The part of a collective's time that rings wait at the links between nodes, which nothing hides.
  double ring_wait(Verb verb, std::int64_t size, std::int64_t stride) const;
  // The host's time for calling a collective of `size` ranks.
  double call_seconds(std::int64_t size) const {
    return software_.collective_rank_seconds * static_cast<double>(size);
  }
  // Rows of `bytes` that each of `size` ranks sends to `ranks` of them and `nodes` of theirs, on average:
  // across nodes once, to the rank with the sender's number there, which hands them on inside while more come
  // in.
  double dispatch(double bytes, double ranks, double nodes, std::int64_t size, std::int64_t stride) const;
  // What each rank sends for that, with what it hands on.
  double dispatched_bytes(double bytes, double ranks, double nodes, std::int64_t size,
                          std::int64_t stride) const;
  std::int64_t nodes_of(std::int64_t size, std::int64_t stride) const {
    const std::int64_t inside = inside_node(size, stride);
    return (size + inside - 1) / inside;
  }
  // From one rank to its neighbour in a group that spans so many ranks: over the links that join all of them.
  double message(double bytes, std::int64_t span) const;

  // Bytes of an element that products read.
  double operand_bytes() const { return operand_; }
  const Machine& machine() const { return machine_; }
  const Software& software() const { return software_; }

 private:
  // Of a collective among ranks that one tier joins: what its hops take, and what its bytes take.
  double hops(Verb verb, double ranks, std::size_t tier) const;
  double moved(Verb verb, double bytes, double ranks, std::size_t tier) const;
  // What bytes take among so many ranks in each of so many nodes.
  double moved_over_nodes(Verb verb, double bytes, double inside, double across, std::size_t outer) const;
  std::size_t tier_of(std::int64_t span) const;
  std::int64_t inside_node(std::int64_t size, std::int64_t stride) const;
  double bandwidth(std::size_t tier) const;

  const Machine& machine_;
  const Software& software_;
  double product_flops_, attention_flops_;  // sustained FLOP/s
  double operand_, result_;                 // bytes of an element of a product's operands, and of its result
};

}  // namespace echelon
