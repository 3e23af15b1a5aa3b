// Seconds of single operations on a machine: products of matrices, attention, passes over memory,
// collectives.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/rank_groups.h"
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

  // Of `bytes` in each of these groups at once, by the one that lies worst. all_reduce of n ranks over S
  // bytes in a node: 2(n-1) hops and 2(n-1)/n S over the bandwidth; half of that all_gather and
  // reduce_scatter (S: the whole). Across nodes hierarchically: reduce_scatter inside, all_reduce of each
  // rank's part across on its own link, as many links as the node has members that has fewest, all_gather
  // inside. all_to_all: each rank sends (n-1)/n of its S bytes, those to other nodes over its own link: most
  // from where fewest are.
  double collective(Verb verb, double bytes, const RankGroups& groups) const;
  // The part of a collective's time that rings wait at the links between nodes, which nothing hides.
  double ring_wait(Verb verb, const RankGroups& groups) const;
  // The host's time for calling a collective of `size` ranks.
  double call_seconds(std::int64_t size) const {
    return software_.collective_rank_seconds * static_cast<double>(size);
  }
  // Rows of `bytes` that each rank sends to `ranks` of its group and `nodes` of nodes_of_fewest(), on
  // average: across nodes once, to the rank with the sender's number there, which hands them on inside while
  // more come in.
  double dispatch(double bytes, double ranks, double nodes, const RankGroups& groups) const;
  // What each rank sends for that, with what it hands on; `nodes` of nodes_of().
  double dispatched_bytes(double bytes, double ranks, double nodes, const RankGroups& groups) const;
  std::int64_t nodes_of(const RankGroups& groups) const { return in_nodes(groups).across; }
  // As many as a group would be on if each had as few members as the one that has fewest, into which most
  // comes for each of them.
  double nodes_of_fewest(const RankGroups& groups) const {
    return static_cast<double>(groups.size) / static_cast<double>(in_nodes(groups).fewest);
  }
  // From each rank to its neighbour in the group, all at once: over the farthest links between any two.
  double message(double bytes, const RankGroups& groups) const;

  // Bytes of an element that products read.
  double operand_bytes() const { return operand_; }
  const Machine& machine() const { return machine_; }
  const Software& software() const { return software_; }

 private:
  // What a collective's hops take inside a node and between nodes, and what its bytes take at this rate.
  double near_hops(Verb verb, double ranks) const;
  double far_hops(Verb verb, const RankGroups& groups, const WorstPlaced& nodes, std::size_t outer) const;
  // What a tier has, as the mean over hops between nodes of the tiers that they cross.
  enum class Hops { of_ring, of_tree };
  double far_hop(Hops hops, const RankGroups& groups, const WorstPlaced& nodes, std::size_t outer,
                 double Tier::*of) const;
  static double moved(Verb verb, double bytes, double ranks, double rate, double longer = 1);
  double moved_inside(Verb verb, double bytes, double ranks) const;
  // What bytes take in groups that lie so in nodes.
  double moved_over_nodes(Verb verb, double bytes, const RankGroups& groups, const WorstPlaced& nodes,
                          std::size_t outer) const;
  // Ranks that a tier joins, as far as a job of so many uses them.
  std::int64_t joined(std::size_t tier, std::int64_t job) const;
  // Over what a tier joins.
  WorstPlaced placed(const RankGroups& groups, std::size_t tier) const;
  WorstPlaced in_nodes(const RankGroups& groups) const { return placed(groups, 0); }
  // The outermost that a group needs.
  std::size_t tier_of(const RankGroups& groups, const WorstPlaced& nodes) const;
  // Of each rank that sends, where so large a part of those that the tier below joins sends out at once.
  double bandwidth(std::size_t tier, double sending = 1) const;
  // Of rings over nodes, so many in each group, up to this tier: only hops over a unit's border leave it.
  double slowest_hop(const RankGroups& groups, double rings, std::size_t outer) const;
  // The longest that the bytes which leave each tier's units take, where all ranks send them.
  template <class Leaving>
  double over_tiers(std::size_t outer, const Leaving& leaving) const {
    double longest = 0;
    for (std::size_t tier = 1; tier <= outer; ++tier)
      longest = std::max(longest, leaving(tier) / bandwidth(tier));
    return longest;
  }

  const Machine& machine_;
  const Software& software_;
  double product_flops_, attention_flops_;  // sustained FLOP/s
  double operand_, result_;                 // bytes of an element of a product's operands, and of its result
};

}  // namespace echelon
