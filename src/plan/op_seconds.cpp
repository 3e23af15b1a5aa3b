#include "plan/op_seconds.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/real.h"

namespace echelon {
namespace {

// Heights of a large, a medium and a small tile, as multiples of their width.
constexpr double tile_heights[] = {2, 1, 0.5};

// Time of all-reduces through trees over nodes for their bytes, relative to rings. NCCL's tuning says 1.09
// for long messages, which would hide how nanotron slows down with more ranks; 2 is the smallest round number
// that does not.
constexpr double tree_slowness = 2;

// Beyond a few ranks, all-reduce (and only all-reduce) uses trees, whose hops grow with the logarithm
// (Sanders et al. 2009).
double all_reduce_hops(double ranks) { return std::min(2 * (ranks - 1), 4 * std::log2(ranks) + 8); }

}  // namespace

double operand_bytes(Precision precision) {
  switch (precision) {
    case Precision::f32:
      return 4;
    case Precision::bf16:
      return 2;
    case Precision::fp8:
      return 1;
    case Precision::fp4:
      return 0.5;
  }
  return 2;
}

double product_peak(const Machine& machine, const Software& software, Precision precision) {
  return precision == Precision::f32 && software.tf32 && machine.peak_tf32 > 0 ? machine.peak_tf32
                                                                               : machine.peak(precision);
}

OpSeconds::OpSeconds(const Machine& machine, const Software& software, Precision precision)
    : machine_(machine), software_(software) {
  const double peak = product_peak(machine, software, precision);
  if (peak <= 0)
    refuse("--precision {}: machine {} does not say how fast it is in it", precision_name(precision),
           machine.name);
  const bool narrow = precision == Precision::fp8 || precision == Precision::fp4;
  const double efficiency = precision == Precision::fp8   ? machine.gemm_fp8_efficiency
                            : precision == Precision::fp4 ? machine.gemm_fp4_efficiency
                                                          : machine.gemm_efficiency;
  product_flops_ = peak * efficiency * software.product_efficiency;
  const Precision wide = narrow ? Precision::bf16 : precision;
  attention_flops_ = product_peak(machine, software, wide) * software.attention_efficiency *
                     (software.older_attention ? machine.older_attention : 1) *
                     (wide == Precision::f32 ? machine.f32_attention : 1);
  result_ = precision == Precision::f32 ? 4 : 2;
  operand_ = echelon::operand_bytes(precision);
}

double OpSeconds::multiplying(double rows, double depth, double cols, double count) const {
  const double cores = machine_.cores;
  const double rates[] = {1, machine_.gemm_medium_tile, machine_.gemm_small_tile};
  double least = 1e300;
  const double width = machine_.gemm_tile;
  for (int i = 0; i < 3; ++i) {
    const double height = tile_heights[i] * width;
    const double waves = std::ceil(rows / height) * std::ceil(cols / width) * count / cores;
    const double even = std::max(1.0, waves);
    const double counted = even + machine_.gemm_wave_rounding * (std::ceil(waves) - even);
    least = std::min(least, counted * height * width / rates[i]);
  }
  return 2 * least * cores * (depth + machine_.gemm_half_depth) / product_flops_;
}

double OpSeconds::product(double rows, double depth, double cols, double count) const {
  const double moved = count * (operand_ * (rows * depth + depth * cols) + result_ * rows * cols);
  return std::max(multiplying(rows, depth, cols, count), memory_pass(moved)) + machine_.launch_seconds;
}

double OpSeconds::unaligned(double columns) const {
  const auto whole = static_cast<std::int64_t>(std::ceil(columns));
  double halvings = 0;
  for (auto elements = static_cast<std::int64_t>(16 / operand_); whole % elements != 0; elements /= 2)
    halvings += 1;
  return std::pow(machine_.gemm_unaligned, -std::min(halvings, 3.0) / 3);
}

double OpSeconds::attention_forward(double flops, double length) const {
  return flops * (1 + machine_.attention_half_length / length) /
             (attention_flops_ * machine_.attention_forward) +
         machine_.launch_seconds;
}

double OpSeconds::attention_backward(double flops, double length) const {
  return flops * (1 + machine_.attention_half_length / length) /
             (attention_flops_ * machine_.attention_backward) +
         machine_.launch_seconds;
}

double OpSeconds::memory_pass(double bytes) const {
  return bytes / (machine_.memory_bandwidth * machine_.memory_efficiency);
}

std::int64_t OpSeconds::joined(std::size_t tier, std::int64_t job) const {
  const std::int64_t node = machine_.node_of(job);
  return tier == 0 ? node : machine_.tiers[tier].ranks * node / machine_.node();
}

WorstPlaced OpSeconds::placed(const RankGroups& groups, std::size_t tier) const {
  return placements_.worst(groups, joined(tier, groups.job));
}

std::size_t OpSeconds::tier_of(const RankGroups& groups, const WorstPlaced& nodes) const {
  std::size_t tier = nodes.across > 1 && machine_.tiers.size() > 1 ? 1 : 0;
  while (tier > 0 && tier + 1 < machine_.tiers.size() && placed(groups, tier).across > 1) ++tier;
  return tier;
}

double OpSeconds::bandwidth(std::size_t tier, double sending) const {
  const Tier& t = machine_.tiers[tier];
  return t.bandwidth / std::max(1.0, t.oversubscription * sending) *
         (tier > 0 ? software_.network_efficiency : 1);
}

double OpSeconds::slowest_hop(const RankGroups& groups, double rings, std::size_t outer) const {
  double least = 1e300;
  for (std::size_t tier = 1; tier <= outer; ++tier) {
    // Each group leaves a unit once for each of its rings; if a unit has parts of two blocks, both blocks'
    // groups leave it.
    const double unit = real(joined(tier - 1, groups.job)),
                 blocks = placed(groups, tier - 1).is_broken ? 2 : 1,
                 leaving = std::min(unit, std::min(unit, real(groups.num_at_once())) * rings * blocks);
    least = std::min(least, bandwidth(tier, leaving / unit));
  }
  return least;
}

double OpSeconds::near_hops(Verb verb, double ranks) const {
  const Tier& links = machine_.tiers[0];
  if (verb == Verb::all_reduce) return all_reduce_hops(ranks) * links.latency_seconds;
  return (ranks - 1) * (links.latency_seconds + links.ring_seconds);
}

// A ring leaves each unit of a tier once; each level of a tree joins twice as many units.
double OpSeconds::far_hop(Hops hops, const RankGroups& groups, const WorstPlaced& nodes, std::size_t outer,
                          double Tier::*of) const {
  if (outer == 0) return machine_.tiers[0].*of;  // a machine whose file has one tier only
  double sum = 0, all = 0, units = real(nodes.across);
  for (std::size_t tier = 1; tier <= outer; ++tier) {
    const double joined = tier < outer ? real(placed(groups, tier).across) : 1,
                 crossing = hops == Hops::of_tree ? std::log2(units / joined)
                            : tier < outer        ? units - joined
                                                  : units;
    sum += crossing * machine_.tiers[tier].*of;
    all += crossing;
    units = joined;
  }
  return sum / all;
}

double OpSeconds::far_hops(Verb verb, const RankGroups& groups, const WorstPlaced& nodes,
                           std::size_t outer) const {
  const double across = real(nodes.across);
  if (verb == Verb::all_reduce)
    return all_reduce_hops(across) * far_hop(Hops::of_tree, groups, nodes, outer, &Tier::latency_seconds);
  return (across - 1) * (far_hop(Hops::of_ring, groups, nodes, outer, &Tier::latency_seconds) +
                         far_hop(Hops::of_ring, groups, nodes, outer, &Tier::ring_seconds));
}

double OpSeconds::moved(Verb verb, double bytes, double ranks, double rate, double longer) {
  const double passes = verb == Verb::all_reduce ? 2 : 1;
  return passes * (ranks - 1) / ranks * bytes * longer / rate;
}

double OpSeconds::moved_inside(Verb verb, double bytes, double ranks) const {
  // Few ranks keep fewer links busy: a group of two inside a node reaches four fifths of the rate of eight.
  return moved(verb, bytes, ranks, bandwidth(0), 1 + machine_.small_group_loss / (ranks - 1));
}

double OpSeconds::moved_over_nodes(Verb verb, double bytes, const RankGroups& groups,
                                   const WorstPlaced& nodes, std::size_t outer) const {
  const double most = real(nodes.most), across = real(nodes.across),
               near = nodes.most > 1 ? moved_inside(verb, bytes, most) : 0, rings = real(nodes.fewest),
               far = moved(verb, bytes / rings, across, slowest_hop(groups, rings, outer));
  if (!machine_.whole_rings) return near + far;
  // In a ring through all ranks each link carries the same bytes, and a node has as many links to others as
  // it has ranks.
  return (real(groups.size) - 1) / real(groups.size) *
         std::max(nodes.most > 1 ? near * most / (most - 1) : 0, far * across / (across - 1));
}

double OpSeconds::ring_wait(Verb verb, const RankGroups& groups) const {
  const WorstPlaced nodes = in_nodes(groups);
  if (verb == Verb::all_reduce || nodes.across == 1) return 0;
  return real(nodes.across - 1) *
         far_hop(Hops::of_ring, groups, nodes, tier_of(groups, nodes), &Tier::ring_seconds);
}

double OpSeconds::collective(Verb verb, double bytes, const RankGroups& groups) const {
  if (groups.size <= 1) return 0;
  const WorstPlaced nodes = in_nodes(groups);
  const std::size_t outer = tier_of(groups, nodes);
  const double ranks = real(groups.size), most = real(nodes.most), across = real(nodes.across);
  const Tier &links = machine_.tiers[0], &far_links = machine_.tiers[outer];
  const double start = machine_.collective_seconds;
  if (verb == Verb::all_to_all) {
    const auto sending = [&](double inside) {
      double seconds = start;
      if (inside > 1) seconds += (inside - 1) / ranks * bytes / bandwidth(0) + links.latency_seconds;
      if (nodes.across > 1)
        seconds += far_links.latency_seconds + over_tiers(outer, [&](std::size_t tier) {
                     const double stay = tier == 1 ? inside : real(placed(groups, tier - 1).fewest);
                     return (ranks - stay) / ranks * bytes;
                   });
      return seconds;
    };
    return std::max(sending(real(nodes.fewest)), sending(most));
  }
  if (nodes.across == 1) return start + near_hops(verb, most) + moved_inside(verb, bytes, most);
  const double moving = moved_over_nodes(verb, bytes, groups, nodes, outer);
  const double by_units = near_hops(verb, most) + far_hops(verb, groups, nodes, outer);
  if (verb != Verb::all_reduce) return start + by_units + moving;
  // NCCL takes the faster of two algorithms. Its ring goes through all ranks, and one hop per node leaves the
  // node; its trees have fewer hops, but use the links less fully.
  const double of_node = ranks / across,
               far_latency = far_hop(Hops::of_ring, groups, nodes, outer, &Tier::latency_seconds),
               ring_hops = 2 * (ranks - 1) * ((of_node - 1) * links.latency_seconds + far_latency) / of_node;
  return start + std::min(ring_hops + moving, by_units + tree_slowness * moving);
}

double OpSeconds::dispatch(double bytes, double ranks, double nodes, const RankGroups& groups) const {
  const WorstPlaced at = in_nodes(groups);
  const std::size_t outer = tier_of(groups, at);
  double near = 0, far = 0;
  if (at.most > 1)
    near = ranks * (1 - 1 / real(at.most)) * bytes / bandwidth(0) + machine_.tiers[0].latency_seconds;
  if (at.across > 1)
    far = machine_.tiers[outer].latency_seconds + over_tiers(outer, [&](std::size_t tier) {
            return nodes * (1 - real(placed(groups, tier - 1).fewest) / real(groups.size)) * bytes;
          });
  return machine_.collective_seconds + std::max(near, far);
}

double OpSeconds::dispatched_bytes(double bytes, double ranks, double nodes, const RankGroups& groups) const {
  const WorstPlaced at = in_nodes(groups);
  return bytes * (ranks * (1 - 1 / real(at.most)) + nodes * (1 - 1 / real(at.across)));
}

double OpSeconds::message(double bytes, const RankGroups& groups) const {
  const std::size_t tier = tier_of(groups, in_nodes(groups));
  const auto over = [&](double rate, const Tier& links) { return bytes / rate + links.latency_seconds; };
  const double inside = over(bandwidth(0), machine_.tiers[0]);
  if (tier == 0) return inside;
  const double outside = over(slowest_hop(groups, 1, tier), machine_.tiers[tier]);
  // Most hops may stay inside nodes, whose links can be the slower ones (PCIe beside a fast network).
  return groups.stride < joined(0, groups.job) ? std::max(inside, outside) : outside;
}

}  // namespace echelon
