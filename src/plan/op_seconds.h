// Seconds of single operations on a machine: matrix products, attention, passes over memory, and collectives.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plan/rank_groups.h"
#include "spec/machine.h"
#include "spec/software.h"
#include "spec/traffic.h"

namespace echelon {

// Bytes of an element that products in this precision read.
double operand_bytes(Precision precision);

// The peak FLOP/s of a machine's products, given how a program computes them.
double product_peak(const Machine& machine, const Software& software, Precision precision);

// Prices operations of one training program on one machine. For one thread at a time.
class OpSeconds {
 public:
  OpSeconds(const Machine& machine, const Software& software, Precision precision);

  // `count` products of (rows x depth) by (depth x cols): the longer of the smallest time over the tile
  // sizes, and the time to move operands and result.
  double product(double rows, double depth, double cols, double count = 1) const;
  // The same inside a kernel that reads and writes for several products: without moving data, and without a
  // launch.
  double multiplying(double rows, double depth, double cols, double count = 1) const;
  // How many times longer a product takes if its matrices have rows of `columns` elements: 1 if rows begin at
  // multiples of 16 bytes, which the fastest tensor core kernels load at once.
  double unaligned(double columns) const;
  // Fused attention of `flops`, over sequences of `length` keys.
  double attention_forward(double flops, double length) const;
  double attention_backward(double flops, double length) const;
  double memory_pass(double bytes) const;
  double elementwise(double bytes) const { return memory_pass(bytes * software_.elementwise_passes); }

  // A collective over `bytes` in each of these groups at once; the worst placed group decides.
  //  * all_reduce of S bytes over n ranks in a node: at most 2(n-1) hops, and 2(n-1)/n S bytes at the
  //    bandwidth; all_gather and reduce_scatter: half of that (S: the whole buffer).
  //  * Across nodes hierarchically: reduce_scatter inside, all_reduce across of each rank's part over the
  //    rank's own link (as many links as the node with the fewest members has), and all_gather inside.
  //  * all_to_all: each rank sends (n-1)/n of its S bytes, those to other nodes over its own link. Ranks on
  //    the node with the fewest members send most to others.
  double collective(Verb verb, double bytes, const RankGroups& groups) const;
  // How long rings wait at the links between nodes in a collective, which nothing hides.
  double ring_wait(Verb verb, const RankGroups& groups) const;
  // The host's time to call a collective of `size` ranks.
  double call_seconds(std::int64_t size) const {
    return software_.collective_rank_seconds * static_cast<double>(size);
  }
  // Each rank sends rows of `bytes` to, on average, `ranks` ranks of its group on `nodes` nodes (counted as
  // nodes_of_fewest()). Rows go to each other node once, to the rank with the sender's index there, which
  // forwards them inside the node while further rows arrive.
  double dispatch(double bytes, double ranks, double nodes, const RankGroups& groups) const;
  // Bytes that each rank sends for that, including forwarded ones; `nodes` counted as nodes_of().
  double dispatched_bytes(double bytes, double ranks, double nodes, const RankGroups& groups) const;
  std::int64_t nodes_of(const RankGroups& groups) const { return in_nodes(groups).across; }
  // The number of nodes if a group had as few members on each as on the node with the fewest, whose members
  // receive most.
  double nodes_of_fewest(const RankGroups& groups) const {
    return static_cast<double>(groups.size) / static_cast<double>(in_nodes(groups).fewest);
  }
  // From each rank to its neighbour in the group, all at once, over the slowest links between any two
  // neighbours.
  double message(double bytes, const RankGroups& groups) const;

  // Bytes of an element that products read.
  double operand_bytes() const { return operand_; }
  const Machine& machine() const { return machine_; }
  const Software& software() const { return software_; }

 private:
  // near_hops, far_hops: time of a collective's hops inside a node and between nodes. moved: time of its
  // bytes at a rate.
  double near_hops(Verb verb, double ranks) const;
  double far_hops(Verb verb, const RankGroups& groups, const WorstPlaced& nodes, std::size_t outer) const;
  // A member of the tiers, averaged over the hops between nodes by the tiers that they cross.
  enum class Hops { of_ring, of_tree };
  double far_hop(Hops hops, const RankGroups& groups, const WorstPlaced& nodes, std::size_t outer,
                 double Tier::*of) const;
  static double moved(Verb verb, double bytes, double ranks, double rate, double longer = 1);
  double moved_inside(Verb verb, double bytes, double ranks) const;
  // Time of a collective's bytes in groups that are placed on nodes in this way.
  double moved_over_nodes(Verb verb, double bytes, const RankGroups& groups, const WorstPlaced& nodes,
                          std::size_t outer) const;
  // How many ranks a tier joins, as far as a job of `job` ranks uses them.
  std::int64_t joined(std::size_t tier, std::int64_t job) const;
  // How groups lie over the units that a tier joins.
  WorstPlaced placed(const RankGroups& groups, std::size_t tier) const;
  WorstPlaced in_nodes(const RankGroups& groups) const { return placed(groups, 0); }
  // The outermost tier that a group needs.
  std::size_t tier_of(const RankGroups& groups, const WorstPlaced& nodes) const;
  // For each sending rank, if this fraction of the ranks that the tier below joins sends to the outside at
  // once.
  double bandwidth(std::size_t tier, double sending = 1) const;
  // The bandwidth of rings over nodes, `rings` in each group, up to tier `outer`: only hops over a unit's
  // border leave it.
  double slowest_hop(const RankGroups& groups, double rings, std::size_t outer) const;
  // The longest time, over the tiers, for the bytes that leave a tier's units when all ranks send.
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
  mutable Placements placements_;
};

}  // namespace echelon
