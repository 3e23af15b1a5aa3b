#include "plan/memory.h"

#include <algorithm>

#include "plan/step_walk.h"
#include "schedule/simulate.h"
#include "spec/reduction_buckets.h"
#include "spec/shard_layout.h"

namespace echelon {

StateBytes state_bytes(const Plan& plan) {
  const std::int64_t e = element_bytes(plan.dtype);
  return {e, e, plan.offload == Offload::optimizer ? 0 : 2 * e};
}

Memory kept_state(std::int64_t whole, std::int64_t own, int zero, const StateBytes& bytes) {
  Memory memory;
  memory[MemoryCategory::parameters] = bytes.value * (zero >= 3 ? own : whole);
  memory[MemoryCategory::gradients] = bytes.gradient * (zero >= 2 ? own : whole);
  memory[MemoryCategory::optimizer] = bytes.optimizer * (zero >= 1 ? own : whole);
  return memory;
}

Memory predict_memory(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at,
                      std::int64_t steps) {
  const int tp = plan.mesh.size(Axis::tp), zero = plan.zero_stage();
  const auto& groups = pipeline.groups_of(at.pp, plan.mesh.ep_index(at));
  const std::int64_t e = element_bytes(plan.dtype);
  const FlatLayout layout = flat_layout(groups, tp, at.tp);
  const StepPrograms& programs = pipeline.programs(at.dp);
  Memory kept =
      kept_state(layout.size(), shard_size(shard_units(layout, plan.all_shards()), plan.shard_index(at)),
                 zero, state_bytes(plan));
  kept[MemoryCategory::parameters] *= weight_versions(programs.schedule())[static_cast<std::size_t>(at.pp)];
  if (!plan.optimizer_barrier) {  // those of a guessed step
    kept[MemoryCategory::parameters] *= 2;
    kept[MemoryCategory::optimizer] += 2 * guessed_moments * e;
  }
  if (zero < 2 && keeps_tied_gradient_apart(plan, pipeline, at.dp, at.pp))
    kept[MemoryCategory::gradients] += local_numel(embedding_parameters(plan.model).front(), tp, at.tp) * e;
  for (const int stage : pipeline.stages_of(at.pp)) {  // losses that add up
    const StageSlice& slice = pipeline.slices()[static_cast<std::size_t>(stage)];
    if (slice.head) kept[MemoryCategory::other] += loss_bytes;
    for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer)
      if (plan.model.has_experts(layer) && plan.balancing.has_losses())
        kept[MemoryCategory::other] += loss_bytes;
  }
  const int index = plan.mesh.dp_cp_index(at);
  for (const GradientBucket& bucket : reduction_buckets(plan, groups, at.tp)) {
    const int ep = bucket.experts ? plan.mesh.ep : 1;
    const Memory held =
        reduction_memory(plan.compression, bucket, plan.dtype, plan.mesh.dp_cp_size() / ep, index / ep);
    for (MemoryCategory category : all_memory_categories) kept[category] += held[category];
  }

  std::vector<MicrobatchSizes> sizes;
  for (const Range& batch : microbatches(plan, at.dp)) sizes.emplace_back(plan, batch.size(), at);
  std::vector<std::int64_t> copies;
  for (const auto& group : groups)
    for (const ParamSpec& spec : group)
      if (pipeline.holders_of(spec.name).size() > 1) copies.push_back(local_numel(spec, tp, at.tp) * e);
  const ContextLayout context(plan);
  const std::int64_t token_bytes =
      4 * (3 * context.tokens_here() + (plan.mask == AttentionMask::document ? context.core_tokens() : 0));
  const std::int64_t ids = dp_samples(plan, at.dp).size() * token_bytes;
  Account account(kept);
  ZeroWalk state(plan, pipeline, at, account);
  StepWalk walk(plan, pipeline, at.pp, account, state);
  // A stream's steady state, behind a step that it follows.
  const int walked =
      programs.flushes() ? 1 : static_cast<int>(std::min<std::int64_t>(steps, programs.shown_steps() + 1));
  for (int step = 0; step < walked; ++step) walk.run(programs.program(step, walked - step), sizes, ids);
  if (programs.flushes()) walk.end_step(ids, copies);
  return account.peak();
}

}  // namespace echelon
