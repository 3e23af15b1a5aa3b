#include "plan/op_seconds.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/real.h"

namespace echelon {
namespace {

// Heights of a large, a medium and a small tile, over their width.
constexpr double tile_heights[] = {2, 1, 0.5};

// What all-reduces through trees over nodes take for their bytes, where rings take 1. NCCL's tuning says 1.09
// for long messages, which would hide how nanotron slows down with ranks; 2 is the least round number that
// does not.
constexpr double tree_slowness = 2;

// Above a few ranks trees take over, for all-reduce alone: hops grow with the logarithm (Sanders et al.
// 2009).
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

std::size_t OpSeconds::tier_of(std::int64_t span) const {
  std::size_t tier = 0;
  while (tier + 1 < machine_.tiers.size() && machine_.tiers[tier].ranks < span) ++tier;
  return tier;
}

double OpSeconds::bandwidth(std::size_t tier) const {
  const Tier& t = machine_.tiers[tier];
  return t.bandwidth / t.oversubscription * (tier > 0 ? software_.network_efficiency : 1);
}

double OpSeconds::hops(Verb verb, double ranks, std::size_t tier) const {
  const Tier& links = machine_.tiers[tier];
  if (verb == Verb::all_reduce) return all_reduce_hops(ranks) * links.latency_seconds;
  return (ranks - 1) * (links.latency_seconds + links.ring_seconds);
}

double OpSeconds::moved(Verb verb, double bytes, double ranks, std::size_t tier) const {
  const double passes = verb == Verb::all_reduce ? 2 : 1;
  // Few ranks keep fewer links busy: a group of two inside a node reaches four fifths of what eight do.
  const double lost = tier == 0 ? machine_.small_group_loss / (ranks - 1) : 0;
  return passes * (ranks - 1) / ranks * bytes * (1 + lost) / bandwidth(tier);
}

double OpSeconds::moved_over_nodes(Verb verb, double bytes, double inside, double across,
                                   std::size_t outer) const {
  const double near = inside > 1 ? moved(verb, bytes, inside, 0) : 0;
  if (!machine_.whole_rings) return near + moved(verb, bytes / inside, across, outer);
  // Of a ring through all ranks each link carries as much, and a node has as many as ranks to others.
  const double longer = (inside * across - 1) / (inside * across);
  return longer * std::max(inside > 1 ? near * inside / (inside - 1) : 0,
                           moved(verb, bytes / inside, across, outer) * across / (across - 1));
}

std::int64_t OpSeconds::inside_node(std::int64_t size, std::int64_t stride) const {
  return std::clamp<std::int64_t>(machine_.node() / std::max<std::int64_t>(1, stride), 1, size);
}

double OpSeconds::ring_wait(Verb verb, std::int64_t size, std::int64_t stride) const {
  if (verb == Verb::all_reduce || size <= 1) return 0;
  const std::int64_t inside = inside_node(size, stride), across = (size + inside - 1) / inside;
  return static_cast<double>(across - 1) * machine_.tiers[tier_of(size * stride)].ring_seconds;
}

double OpSeconds::collective(Verb verb, double bytes, std::int64_t size, std::int64_t stride) const {
  if (size <= 1) return 0;
  const std::int64_t inside = inside_node(size, stride);
  const std::int64_t across = nodes_of(size, stride);
  const std::size_t outer = tier_of(size * stride);
  const auto inner_ranks = static_cast<double>(inside), outer_ranks = static_cast<double>(across);
  double seconds = machine_.collective_seconds;
  if (verb == Verb::all_to_all) {
    const double ranks = static_cast<double>(size);
    if (inside > 1)
      seconds += (inner_ranks - 1) / ranks * bytes / bandwidth(0) + machine_.tiers[0].latency_seconds;
    if (across > 1)
      seconds +=
          (ranks - inner_ranks) / ranks * bytes / bandwidth(outer) + machine_.tiers[outer].latency_seconds;
    return seconds;
  }
  if (across == 1) return seconds + hops(verb, inner_ranks, 0) + moved(verb, bytes, inner_ranks, 0);
  const double moving = moved_over_nodes(verb, bytes, inner_ranks, outer_ranks, outer);
  if (verb != Verb::all_reduce)
    return seconds + hops(verb, inner_ranks, 0) + hops(verb, outer_ranks, outer) + moving;
  // NCCL takes the faster: its ring goes through all ranks, of which one hop in so many leaves the node; its
  // trees make fewer hops, but keep the links less busy.
  const double node_hop = machine_.tiers[0].latency_seconds, far_hop = machine_.tiers[outer].latency_seconds,
               ring_hops = 2 * (real(size) - 1) * ((inner_ranks - 1) * node_hop + far_hop) / inner_ranks,
               tree_hops = hops(verb, inner_ranks, 0) + hops(verb, outer_ranks, outer);
  return seconds + std::min(ring_hops + moving, tree_hops + tree_slowness * moving);
}

double OpSeconds::dispatch(double bytes, double ranks, double nodes, std::int64_t size,
                           std::int64_t stride) const {
  const std::int64_t inside = inside_node(size, stride), across = nodes_of(size, stride);
  const std::size_t outer = tier_of(size * stride);
  double near = 0, far = 0;
  if (inside > 1)
    near = ranks * (1 - 1 / real(inside)) * bytes / bandwidth(0) + machine_.tiers[0].latency_seconds;
  if (across > 1)
    far = nodes * (1 - 1 / real(across)) * bytes / bandwidth(outer) + machine_.tiers[outer].latency_seconds;
  return machine_.collective_seconds + std::max(near, far);
}

double OpSeconds::dispatched_bytes(double bytes, double ranks, double nodes, std::int64_t size,
                                   std::int64_t stride) const {
  return bytes *
         (ranks * (1 - 1 / real(inside_node(size, stride))) + nodes * (1 - 1 / real(nodes_of(size, stride))));
}

double OpSeconds::message(double bytes, std::int64_t span) const {
  const std::size_t tier = tier_of(span);
  return bytes / bandwidth(tier) + machine_.tiers[tier].latency_seconds;
}

}  // namespace echelon
