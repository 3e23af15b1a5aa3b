#include "plan/traffic.h"

#include <algorithm>

#include "plan/context_costs.h"
#include "plan/expert_costs.h"
#include "schedule/group_uses.h"
#include "spec/gather_window.h"
#include "spec/reduction_buckets.h"
#include "spec/shard_layout.h"

namespace echelon {
namespace {

class Counter {
 public:
  Counter(Traffic& traffic, Axis axis, int size, int index)
      : traffic_(traffic), axis_(axis), size_(size), index_(index) {}

  void all_reduce(std::int64_t count, std::int64_t width) {
    add(Verb::all_reduce, all_reduce_bytes_sent(count, size_, index_, width));
  }
  void message(Verb verb, std::int64_t bytes) { add(verb, bytes); }
  void parts(Verb verb, const std::vector<std::int64_t>& counts, std::int64_t width) {
    if (size_ > 1) add(verb, bytes_sent(verb, counts, index_, width));
  }
  // A matrix of rows x cols whose rows are cut over the group.
  void rows(Verb verb, std::int64_t count, std::int64_t cols, std::int64_t width) {
    std::vector<std::int64_t> parts;
    for (int i = 0; i < size_; ++i) parts.push_back(split_range(count, size_, i).size() * cols);
    add(verb, bytes_sent(verb, parts, index_, width));
  }

 private:
  void add(Verb verb, std::int64_t bytes) {
    if (size_ == 1) return;
    traffic_.at(axis_, verb).calls += 1;
    traffic_.at(axis_, verb).bytes += bytes;
  }

  Traffic& traffic_;
  Axis axis_;
  int size_, index_;
};

// Over the ranks that hold the same, and over those that hold the same routed experts.
struct Counters {
  Counter all, experts;
  Counter of(bool is_expert) const { return is_expert ? experts : all; }
};

// The tp traffic of one direction of a stage, for a microbatch of `rows` tokens.
void count_stage(const Plan& plan, const StageSlice& slice, std::int64_t rows, bool backward, Counter& tp) {
  const std::int64_t width = element_bytes(plan.dtype), hidden = plan.model.hidden;
  const bool sp = plan.shards_sequence();
  const auto enter = [&] {
    if (sp)
      tp.rows(backward ? Verb::reduce_scatter : Verb::all_gather, rows, hidden, width);
    else if (backward)
      tp.all_reduce(rows * hidden, width);
  };
  const auto leave = [&] {
    if (sp)
      tp.rows(backward ? Verb::all_gather : Verb::reduce_scatter, rows, hidden, width);
    else if (!backward)
      tp.all_reduce(rows * hidden, width);
  };
  if (slice.embedding) leave();
  for (std::int64_t regions = 2 * slice.layers.size(); regions > 0; --regions) {  // attention and MLP
    enter();
    leave();
  }
  if (backward && plan.recompute == Recompute::full)  // each layer again up to the MLP's hidden values
    for (std::int64_t layers = slice.layers.size(); layers > 0; --layers) {
      if (sp) {
        tp.rows(Verb::all_gather, rows, hidden, width);
        tp.rows(Verb::reduce_scatter, rows, hidden, width);
        tp.rows(Verb::all_gather, rows, hidden, width);
      } else {
        tp.all_reduce(rows * hidden, width);
      }
    }
  if (!slice.head || !backward) return;
  // The output layer runs forward and backward in the backward instruction.
  if (sp) {
    tp.rows(Verb::all_gather, rows, hidden, width);
    tp.rows(Verb::reduce_scatter, rows, hidden, width);
  } else {
    tp.all_reduce(rows * hidden, width);
  }
  // Cross-entropy: the maxima, then sums and targets' logits.
  for (std::int64_t begin = 0; begin < rows; begin += logits_chunk_rows) {
    const std::int64_t chunk = std::min(logits_chunk_rows, rows - begin);
    tp.all_reduce(chunk, width);
    tp.all_reduce(2 * chunk, width);
  }
}

// ZeRO 3: values of a step, gathered for their uses.
void count_gathers(const Plan& plan, const PipelineLayout& pipeline, int pp_rank,
                   const StepPrograms& programs, const std::vector<ShardUnit>& units, const Counters& block) {
  const std::vector<int> uses = group_uses(pipeline, programs.program(0, 1), pp_rank);
  GatherWindow window(uses, plan.zero_prefetch);
  const auto gather_unit = [&](const ShardUnit& u) {
    if (u.range.size() > 0)
      block.of(u.experts).parts(Verb::all_gather, u.counts(), element_bytes(plan.dtype));
  };
  const auto gather = [&](const std::vector<int>& groups) {
    for (int group : groups)
      for (std::size_t unit : units_of_group(units.size(), group)) gather_unit(units[unit]);
  };
  gather_unit(units.back());
  gather(window.begin());
  for (int unit : uses) {
    gather(window.use(unit));
    window.done();
  }
}

}  // namespace

// Whole rows to the experts and back; the backward pass also brings each copy's weight and takes its
// gradient.
void add_copies(const Plan& plan, const MovedCopies& moved, Traffic& traffic) {
  const std::int64_t hidden = plan.model.hidden;
  const std::int64_t again = plan.recompute == Recompute::full ? hidden : 0;
  traffic.at(Axis::ep, Verb::all_to_all).bytes +=
      element_bytes(plan.dtype) *
      (hidden * (moved.forward_sent + moved.forward_received) + again * moved.backward_sent +
       (hidden + 1) * (moved.backward_sent + moved.backward_received));
}

Traffic predict_traffic(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at,
                        std::int64_t updates, const std::optional<DecidedByData>& decided) {
  Traffic traffic;
  const StepPrograms& programs = pipeline.programs(at.dp);
  const int tp = plan.mesh.size(Axis::tp), pp = plan.mesh.size(Axis::pp);
  const int dp_cp = plan.mesh.dp_cp_size(), index = plan.mesh.dp_cp_index(at);
  const std::int64_t width = element_bytes(plan.dtype);
  Counter along_tp(traffic, Axis::tp, tp, at.tp), along_dp(traffic, Axis::dp, dp_cp, index),
      along_pp(traffic, Axis::pp, pp, at.pp),
      along_ep(traffic, Axis::ep, plan.mesh.ep, plan.mesh.ep_index(at));
  const std::vector<Range> batches = microbatches(plan, at.dp);
  MovedCopies even;
  const auto count = [&](const Instruction& i) {
    const auto microbatch = static_cast<std::size_t>(i.microbatch) % batches.size();
    const std::int64_t rows = batches[microbatch].size() * plan.tokens_here();
    const StageSlice& slice = pipeline.slices()[static_cast<std::size_t>(i.stage)];
    const std::int64_t here = plan.shards_sequence() ? split_range(rows, tp, at.tp).size() : rows;
    if (i.op == Op::send) along_pp.message(Verb::send, here * plan.model.hidden * width);
    if (i.op == Op::recv) along_pp.message(Verb::recv, 0);
    const ContextCosts context(plan, batches[microbatch].size(), at);
    const ExpertCosts experts(plan, batches[microbatch].size(), at);
    if (i.op == Op::F) {
      count_stage(plan, slice, rows, false, along_tp);
      for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer) {
        context.add_forward_traffic(traffic, true);
        if (!plan.model.has_experts(layer)) continue;
        experts.add_forward_traffic(traffic, true);
        even += {.forward_sent = experts.away(), .forward_received = experts.away()};
      }
    }
    if (plan.shards_sequence() && (i.op == Op::W || i.op == Op::BW))  // the inputs, for the weights
      for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer) {
        const bool mlp = !plan.model.has_experts(layer) || experts.needs_input_again();
        for (int regions = mlp ? 2 : 1; regions > 0; --regions)
          along_tp.rows(Verb::all_gather, rows, plan.model.hidden, width);
      }
    if (i.op == Op::B || i.op == Op::BW) {
      count_stage(plan, slice, rows, true, along_tp);
      for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer) {
        if (plan.model.has_experts(layer)) {
          if (plan.recompute == Recompute::full) experts.add_forward_traffic(traffic, false);
          experts.add_backward_traffic(traffic);
          even += {.backward_sent = experts.away(), .backward_received = experts.away()};
        }
        if (plan.recompute != Recompute::none)
          context.add_forward_traffic(traffic, plan.recompute == Recompute::full);
        context.add_backward_traffic(traffic);
      }
    }
  };
  constexpr int middle = 1 << 20;
  const std::vector<Instruction>& list =
      programs.program(middle, middle).lowered->ranks[static_cast<std::size_t>(at.pp)];
  std::for_each(list.begin(), list.end(), count);
  if (decided && decided->passes_again)  // those before the guess was found wrong
    std::for_each(
        list.begin(),
        std::find_if(list.begin(), list.end(), [](const Instruction& i) { return i.op == Op::validate; }),
        count);
  add_copies(plan, decided ? decided->copies : even, traffic);

  const auto& groups = pipeline.groups_of(at.pp, plan.mesh.ep_index(at));
  const FlatLayout layout = flat_layout(groups, tp, at.tp);
  for (int update = 0; update < programs.updates_per_step(); ++update) {
    for (const auto& group : groups)
      for (const ParamSpec& spec : group) {
        const int replicas = tp_replicas(spec, tp);
        const std::int64_t local = local_numel(spec, tp, at.tp);
        if (spec.shard_dim >= 0 && replicas > 1)  // key/value heads that several ranks share
          Counter(traffic, Axis::tp, replicas, at.tp % replicas).all_reduce(local, width);
        // Both ends of a tied embedding, copies of a DualPipe stage.
        if (pipeline.holders_of(spec.name).size() > 1) {
          along_pp.message(Verb::send, local * width);
          along_pp.message(Verb::recv, 0);
        }
      }
    if (plan.shards_sequence() && layout.whole_range.size() > 0)
      along_tp.all_reduce(layout.whole_range.size(), width);
    const int ranks = plan.zero_stage() == 0 ? dp_cp : plan.shards(), ep = plan.mesh.ep;
    const Shards reducing{ranks, ranks / ep}, place{index % ranks, index % ranks / ep};
    const Counters block{{traffic, Axis::dp, reducing.all, place.all},
                         {traffic, Axis::dp, reducing.experts, place.experts}};
    Counter across(traffic, Axis::dp, dp_cp / ranks, index / ranks);
    for (const GradientBucket& bucket : reduction_buckets(plan, groups, at.tp)) {
      const int shard = bucket.experts ? place.experts : place.all;
      add_reduction_traffic(plan.compression, bucket, plan.dtype,
                            bucket.experts ? reducing.experts : reducing.all, shard, updates + update,
                            Axis::dp, traffic);
      if (!bucket.shards.empty()) across.all_reduce(bucket.shards[static_cast<std::size_t>(shard)], width);
    }
    if (plan.zero_stage() == 0) continue;
    const std::vector<ShardUnit> units = shard_units(layout, plan.all_shards());
    if (plan.zero < 3)
      for (const ShardUnit& unit : units)
        if (unit.range.size() > 0) block.of(unit.experts).parts(Verb::all_gather, unit.counts(), width);
    if (plan.zero == 3) count_gathers(plan, pipeline, at.pp, programs, units, block);
    for (const bool experts : {false, true}) {
      std::int64_t blocks = 0, i = 0;
      for (const auto& group : groups)
        for (const ParamSpec& spec : group) {
          const std::int64_t size = layout.sizes[static_cast<std::size_t>(i++)];
          if ((spec.expert >= 0) == experts) blocks += norm_blocks(size);
        }
      if (blocks > 0) block.of(experts).all_reduce(blocks, 8);
    }
  }
  if (programs.flushes()) {  // squares of the gradient norm
    const auto num_parameters = static_cast<std::int64_t>(all_parameters(plan.model).size());
    for (Counter* axis : {&along_tp, &along_pp, &along_ep}) axis->all_reduce(num_parameters, 8);
  }
  // What the losses of the global batch count, in the backward pass of the first microbatch.
  if (plan.balancing.has_counts() && plan.balancing.scope == BalanceScope::batch)
    for (const int stage : pipeline.stages_of(at.pp)) {
      const Range layers = pipeline.slices()[static_cast<std::size_t>(stage)].layers;
      for (std::int64_t layer = layers.begin; layer < layers.end; ++layer)
        if (plan.model.has_experts(layer))
          along_dp.all_reduce(plan.model.num_experts + plan.model.router.groups, 8);
    }
  // What the routers did.
  if (const std::int64_t layers = plan.model.num_expert_layers();
      layers > 0 && programs.flushes() && plan.optimizer_barrier) {
    if (plan.shards_sequence()) along_tp.all_reduce(layers, 8);
    for (Counter* axis : {&along_dp, &along_pp})
      axis->all_reduce(layers * routing_report_size(plan.model.num_experts), 8);
  }
  along_dp.all_reduce(programs.updates_per_step(), 8);                  // number of targets
  for (Counter* axis : {&along_dp, &along_pp}) axis->all_reduce(1, 8);  // the loss
  return traffic;
}

}  // namespace echelon
