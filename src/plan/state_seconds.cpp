#include "plan/state_seconds.h"

#include <algorithm>
#include <cmath>

#include "base/real.h"

namespace echelon {

double added_seconds(double compute, double communication, double slowdown) {
  return std::max(0.0, communication - compute) + (slowdown - 1) * std::min(compute, communication);
}

// True of ZeRO 1 in older programs, too: every rank receives the whole sum and uses its part.
bool StateSeconds::reduces_whole(const Plan& c) const {
  return c.zero == 0 || (c.zero == 1 && !work_.software.sharded_states);
}

// The host starts one collective after another: if starting one takes longer than its transfer, calls limit
// the rate.
double StateSeconds::in_calls(Verb verb, double bytes, double calls, const RankGroups& groups) const {
  return calls * std::max(ops_.collective(verb, bytes / calls, groups), ops_.call_seconds(groups.size));
}

StateSeconds::Exchange StateSeconds::exchange(const Plan& c, const ShareCounts& counts, double layers) const {
  const Software& s = work_.software;
  const std::int64_t ranks = std::int64_t{c.mesh.dp_cp_size()}, job = c.mesh.num_ranks();
  const std::int64_t routed_ranks = std::max<std::int64_t>(1, ranks * c.mesh.tp() / c.mesh.expert_ranks());
  const double calls = std::max(1.0, layers * s.layer_reductions);
  Exchange sum;
  const auto add = [&](double elements, std::int64_t size, std::int64_t stride) {
    if (elements <= 0 || size <= 1) return;
    const std::int64_t shard = std::max<std::int64_t>(1, c.zero == 0 ? 1 : size / c.hsdp);
    const double reduced = elements * bytes_.reduced;
    const RankGroups shards{shard, stride, job};
    if (reduces_whole(c)) {
      sum.reduce += in_calls(Verb::all_reduce, reduced, calls, {size, stride, job});
    } else {
      sum.reduce += in_calls(Verb::reduce_scatter, reduced, 1, shards);
      if (c.hsdp > 1)
        sum.reduce += in_calls(Verb::all_reduce, reduced / real(shard), 1, {c.hsdp, stride * shard, job});
    }
    if (c.zero > 0) sum.gather += in_calls(Verb::all_gather, elements * bytes_.gathered, 1, shards);
    if (c.zero > 0) sum.gather += s.shard_copy_seconds * layers * static_cast<double>(shard);
  };
  add(counts.common, ranks, c.mesh.tp());
  add(counts.routed, routed_ranks, c.mesh.expert_ranks());
  return sum;
}

double StateSeconds::over_link(double bytes) const {
  return bytes / (work_.machine.host_bandwidth * work_.machine.host_efficiency);
}

double StateSeconds::in_host_memory(double bytes) const {
  return bytes / (work_.machine.host_memory_bandwidth * work_.machine.host_memory_efficiency);
}

ShareCounts StateSeconds::gathered_again(const ShareCounts& counts) const {
  if (!work_.software.is_this_trainer) return counts;
  return {counts.read_twice, counts.routed};
}

bool StateSeconds::adds_to_passes(const Plan& c) const {
  const OffloadedBytes off = offloaded_bytes(work_, c);
  if (off.value > 0 || off.gradient > 0) return true;
  return c.mesh.dp_cp_size() > 1 && ((gathers_each_microbatch(work_.software, c) && c.shards() > 1) ||
                                     gradient_sums(work_.software, c).each_microbatch);
}

StateSeconds::Added StateSeconds::unit_adds(const Plan& c, const ShareCounts& counts, double forward,
                                            double backward) const {
  const Software& s = work_.software;
  const auto [sum, values] = exchange(c, counts, 1);
  // What is offloaded comes from the host before it is gathered, and gradients go there as they are summed:
  // the host adds them to those of earlier microbatches.
  const OffloadedBytes off = offloaded_bytes(work_, c);
  double over_up = 0, over_down = 0;
  if (const double own = own_elements(c, counts); off.value > 0 || off.gradient > 0) {
    over_up = over_link(own * comes_up(off));
    over_down = over_link(own * off.gradient);
    if (num_microbatches(c) > 1 && off.gradient > 0) over_down += in_host_memory(own * 3 * off.gradient);
  }
  const bool gathers = gathers_each_microbatch(s, c), reduces = gradient_sums(s, c).each_microbatch;
  const double values_again =
      gathers && s.is_this_trainer ? exchange(c, gathered_again(counts), 1).gather : values;
  const auto added = [&, sum = sum, values = values](double up, double down) {
    const double reduce = (reduces ? sum : 0) + down, gather = gathers ? values + up : 0,
                 again = gathers && s.reshards ? values_again + up : 0;
    double alone = 0, beside_forward = 0, beside_backward = 0;
    (s.overlaps_parameters ? beside_forward : alone) += gather;
    (s.overlaps_parameters ? beside_backward : alone) += again;
    (s.overlaps_gradients ? beside_backward : alone) += reduce;
    return alone + added_seconds(forward, beside_forward, s.overlap_slowdown) +
           added_seconds(backward, beside_backward, s.overlap_slowdown);
  };
  const double all = added(over_up, over_down);
  return {all, over_up > 0 || over_down > 0 ? all - added(0, 0) : 0};
}

double StateSeconds::exposed(const Plan& c, const ShareCounts& counts, double layers, double forward,
                             double backward) const {
  const Software& s = work_.software;
  const auto [sum, values] = exchange(c, counts, layers);
  const GradientSums sums = gradient_sums(work_.software, c);
  const double reduce = sums.each_microbatch ? 0 : sum, gather = gathers_each_microbatch(s, c) ? 0 : values;
  const auto left = [&](double seconds, double window, bool overlaps) {
    if (!overlaps) return seconds;
    // The last layer's part has nothing left to hide behind.
    const double last = seconds / layers;
    return last + added_seconds(window * (1 - 1 / layers), seconds - last, s.overlap_slowdown);
  };
  const double gathered = left(gather, forward, s.overlaps_parameters);
  if (sums.groups == 0) return left(reduce, backward, s.overlaps_gradients) + gathered;
  // Each stage's sum overlaps with the next group's passes through another stage; after the last sum there
  // are none.
  const double stages = c.chunks, group = c.mesh.pp(), each = reduce / stages, window = backward / stages;
  const double hidden = s.overlaps_gradients ? added_seconds(group * window, each, s.overlap_slowdown) : each;
  return left(each, window, s.overlaps_gradients) + (real(sums.groups) * stages - 1) * hidden + gathered;
}

StateSeconds::Copies StateSeconds::copies(const Plan& c, const ShareCounts& counts) const {
  const ExpertSkew& load = work_.expert_load;
  if (load.replicas == 0 || c.mesh.ep == 1 || counts.routed <= 0) return {};
  const PlacedExperts placed = placed_experts(load, c.mesh, work_.machine);
  const int ranks = std::min(placed.most_copies, c.mesh.ep);
  if (ranks == 1) return {};
  const double slots = real(std::ssize(load.shares)) / c.mesh.ep + real(load.replicas);
  const double shards =
      c.zero == 0 ? 1 : std::max(1.0, static_cast<double>(c.shards()) * c.mesh.tp() / c.mesh.expert_ranks());
  const double summed = counts.routed * real(placed.shared_slots) / slots * bytes_.reduced / shards;
  // Copies may be anywhere in the group.
  const std::int64_t stride = std::int64_t{c.mesh.ep} / ranks * c.mesh.expert_cut();
  return {ops_.collective(Verb::all_reduce, summed, {ranks, stride, c.mesh.num_ranks()}),
          2 * (ranks - 1.0) / ranks * summed};
}

// This trainer sums whole gradients, before the sums along dp; other programs sum the shards that are left
// after those.
StateSeconds::Copies StateSeconds::of_same_stages(const Plan& c, const ShareCounts& counts,
                                                  const RankGroups& pairs) const {
  const double elements =
      work_.software.is_this_trainer ? counts.common + counts.routed : own_elements(c, counts);
  return of_pairs(elements, pairs);
}

StateSeconds::Copies StateSeconds::of_pairs(double elements, const RankGroups& pairs) const {
  const double bytes = elements * bytes_.reduced;  // half of it is sent, and the other half of the sum
  return {ops_.collective(Verb::all_reduce, bytes, pairs), bytes};
}

StateSeconds::Copies StateSeconds::over_tp(const Plan& c, const ShareCounts& counts) const {
  if (counts.summed_over_tp <= 0) return {};
  const double bytes = counts.summed_over_tp * bytes_.reduced, tp = c.mesh.tp();
  return {ops_.collective(Verb::all_reduce, bytes, {c.mesh.tp(), 1, c.mesh.num_ranks()}),
          2 * (tp - 1) / tp * bytes};
}

double StateSeconds::device_update(const Plan& c, const ShareCounts& counts) const {
  const double elements = own_elements(c, counts);
  // The norm reads gradients; the step reads gradients and state, and writes state and values.
  const Software& s = work_.software;
  if (c.offloads_optimizer() && s.updates_on_host)
    return ops_.memory_pass(elements * (bytes_.gradient - offloaded_bytes(work_, c).gradient));
  const double bytes = elements * (2 * bytes_.gradient + 2 * bytes_.optimizer + bytes_.value) -
                       2 * second_moment_bytes * own_muon_elements(c, counts);
  const double cast =
      ops_.operand_bytes() < 2 && s.narrow_parameters ? elements * (2 + ops_.operand_bytes()) : 0;
  return ops_.memory_pass(bytes * s.optimizer_passes) + ops_.elementwise(cast);
}

// If the device updates, state comes, is used and returns in pieces, in both directions at once: only time
// beyond the update's counts. If the host updates, gradients come first, then the update reads and writes
// what the host keeps, and values go back.
double StateSeconds::host(const Plan& c, const ShareCounts& counts) const {
  if (!c.offloads_optimizer()) return 0;
  const OffloadedBytes off = offloaded_bytes(work_, c);
  const double elements = own_elements(c, counts);
  if (!work_.software.updates_on_host)
    return std::max(0.0, over_link(elements * off.optimizer) - device_update(c, counts));
  return over_link(elements * (update_down(off) + update_up(off))) +
         in_host_memory(elements * (bytes_.gradient + 2 * off.optimizer + bytes_.value));
}

double StateSeconds::host_traffic(const Plan& c, const ShareCounts& counts, double microbatches) const {
  if (!c.offloads_optimizer()) return 0;
  const OffloadedBytes off = offloaded_bytes(work_, c);
  const double once = work_.software.updates_on_host ? update_down(off) + update_up(off) : 2 * off.optimizer;
  const double passes = off.gradient + (work_.software.reshards ? 2 : 1) * comes_up(off);
  return own_elements(c, counts) * (once + microbatches * passes);
}

// A layer's activations go to the host during the next layer's forward pass, and return during the backward
// pass of the layer behind it. Copy engines move them, so computation is not slowed down.
double StateSeconds::activations(const Plan& c, double saved, double forward, double backward) const {
  if (!c.offloads_activations()) return 0;
  const double link = over_link(saved);
  if (!work_.software.activation_offload_overlaps) return 2 * link;
  return std::max(0.0, link - forward) + std::max(0.0, link - backward);
}

double StateSeconds::optimizer(const Plan& c, const ShareCounts& counts) const {
  return device_update(c, counts) + host(c, counts) + muon(c, counts);
}

// Products, shared by the ranks that share state and layers, but each takes at least a matrix; and the
// exchanges, there and back.
double StateSeconds::muon(const Plan& c, const ShareCounts& counts) const {
  if (c.optimizer != OptimizerKind::muon) return 0;
  const double tp = c.mesh.tp(), cut = c.mesh.expert_cut();
  const StateShards shards = state_shards(c);
  // Rounds of whole matrices.
  const auto on_one = [&](const MuonWork& work, double sharing) {
    if (work.matrices <= 0) return 0.0;
    return std::max(std::ceil(work.matrices / sharing) * work.flops / work.matrices,
                    std::min(work.flops, counts.largest_muon_flops));
  };
  const double flops =
      on_one(counts.muon, shards.common * tp) + on_one(counts.muon_routed, shards.routed * cut);
  // At the rate of products as deep as the model is wide.
  const double side = real(c.model.hidden);
  double seconds = flops * ops_.product(side, side, side) / (2 * side * side * side);
  const auto exchanged = [&](const MuonWork& work, double of_dp, double stride, double of_tp) {
    const double bytes = work.elements / of_dp * muon_element_bytes();
    double there = 0;
    const std::int64_t job = c.mesh.num_ranks();
    if (of_dp > 1)
      there += ops_.collective(Verb::all_to_all, bytes,
                               {static_cast<std::int64_t>(of_dp), static_cast<std::int64_t>(stride), job});
    if (of_tp > 1)
      there += ops_.collective(Verb::all_to_all, bytes, {static_cast<std::int64_t>(of_tp), 1, job});
    return 2 * there;
  };
  if (counts.muon.elements > 0) seconds += exchanged(counts.muon, shards.common, tp, tp);
  if (counts.muon_routed.elements > 0)
    seconds += exchanged(counts.muon_routed, shards.routed, c.mesh.expert_ranks(), cut);
  return seconds;
}

// What is made on a rank is as much as what it owns.
double StateSeconds::muon_bytes(const Plan& c, const ShareCounts& counts, Axis axis) const {
  if (c.optimizer != OptimizerKind::muon) return 0;
  const StateShards shards = state_shards(c);
  const auto once = [](double parts) { return (parts - 1) / parts; };
  const bool over_tp = axis == Axis::tp;
  ShareCounts sent;
  sent.common = counts.muon.elements * once(over_tp ? c.mesh.tp() : shards.common);
  sent.routed = counts.muon_routed.elements * once(over_tp ? c.mesh.expert_cut() : shards.routed);
  return 2 * muon_element_bytes() * own_elements(c, sent);
}

double StateSeconds::bytes(const Plan& c, const ShareCounts& counts, double microbatches) const {
  const GradientSums summed = gradient_sums(work_.software, c);
  const double sums = summed.each_microbatch ? microbatches : real(std::max<std::int64_t>(1, summed.groups));
  const bool each = gathers_each_microbatch(work_.software, c);
  const double gathers = each ? microbatches : (c.zero > 0 ? 1 : 0),
               again = each && work_.software.reshards ? microbatches : 0;
  const auto of = [&](double elements, double elements_again, std::int64_t ranks) {
    if (ranks <= 1) return 0.0;
    // As in exchange(): each rank is sent its part of the others once.
    const auto once = [](double parts) { return (parts - 1) / parts; };
    const double gathered = (gathers * elements + again * elements_again) * bytes_.gathered;
    if (reduces_whole(c))
      return once(static_cast<double>(ranks)) * (2 * elements * bytes_.reduced + gathered);
    const auto shards = static_cast<double>(std::max<std::int64_t>(1, ranks / c.hsdp));
    const double reduced = once(shards) + 2 * once(c.hsdp) / shards;
    return elements * sums * reduced * bytes_.reduced + once(shards) * gathered;
  };
  const std::int64_t ranks = std::int64_t{c.mesh.dp_cp_size()};
  const ShareCounts twice = gathered_again(counts);
  return of(counts.common, twice.common, ranks) +
         of(counts.routed, twice.routed, ranks * c.mesh.tp() / c.mesh.expert_ranks());
}

}  // namespace echelon
