#include "train/dry_run.h"

#include <algorithm>

#include "base/real.h"
#include "comm/imagined.h"
#include "spec/block.h"
#include "train/generate.h"
#include "train/state_copy.h"
#include "train/trainer.h"

namespace echelon {
namespace {

// Tokens that nobody reads; none ends a document.
void imagine_sample(std::int64_t, std::int64_t, std::int32_t*, std::int32_t*) {}

// A step in the middle of a stream is as many steps behind its first one as fill the pipeline.
std::int64_t steps_of_stream(const StepPrograms& programs, std::int64_t steps) {
  return std::min<std::int64_t>(steps, programs.shown_steps() + 1);
}

// Sums over microbatches by their tree hold more the more there are.
bool repeats_itself(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at) {
  return pipeline.programs(at.dp).flushes() && plan.optimizer_barrier &&
         plan.numerics == Numerics::ordinary && are_alike(microbatches(plan, at.dp)) &&
         !(pipeline.ties_on(at.pp) && may_keep_lookups(plan, at.dp));
}

// As generate() goes: the prompt in one pass, then a token at a time, of which the last sees most.
Memory peak_of_text(const Rank& rank, const Trainer& trainer, const SampledText& text) {
  const Arena::PoolUse pool(rank.arena(), trainer.pool_between_steps());
  rank.arena().reset_peak();
  const std::int64_t positions = text.prompt + text.tokens;
  const HeldStages stages(rank, plan_of_text(trainer.plan(), positions), trainer.pipeline(),
                          trainer.parameters(), {});
  const HeldStages::Caches caches = stages.make_caches(positions);
  for (const auto& [begin, count] : {std::pair{std::int64_t{0}, text.prompt}, {positions - 1, 1}}) {
    const Tensor ids(rank.arena(), MemoryCategory::other, DType::i32, {count});
    (void)stages.next_logits(ids, begin, caches);
  }
  return rank.arena().peak();
}

}  // namespace

DryRun dry_run(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at,
               const DryRunOptions& options) {
  const int index = plan.mesh.rank_at(at);
  ImaginedWorld world(plan.mesh.num_ranks(), index);
  Arena arena = Arena::dry(options.device);
  const auto kernels = make_kernels(arena, plan.precision, 0, plan.numerics);
  const Rank rank(world, plan.mesh, index, plan.precision, arena, *kernels);
  // Where nothing is known of numbers nothing is clipped by them.
  OptimizerOptions optimizer;
  optimizer.clip = 0;
  const StepPrograms& programs = pipeline.programs(at.dp);
  const bool ends_each_step = programs.flushes() && plan.optimizer_barrier;
  const std::int64_t steps = ends_each_step ? 1 : steps_of_stream(programs, options.steps);
  // What is counted are the passes of the last step: they find out that the guess before them was wrong.
  TrainerHooks hooks;
  if (options.passes_again) hooks.distrusts_guess = [&](std::int64_t step) { return step + 2 == steps; };
  Trainer trainer(rank, plan, optimizer, 0, hooks, {std::shared_ptr<void>(), &pipeline},
                  options.is_worker ? Moments::elsewhere : Moments::here);
  if (options.is_worker) trainer.set_data_parallel_sums(DataParallelSums::none);
  if (options.graphs) trainer.replay_passes();
  std::optional<StateCopy> copy;
  if (options.keeps_copy) copy.emplace(rank, trainer);
  arena.reset_peak();

  DryRun run;
  const SampleSource samples = imagine_sample;
  trainer.resume(steps - 1, options.updates);
  Traffic before;
  HostActivations moved, all;
  for (std::int64_t step = 0; step < steps; ++step) {
    before = rank.traffic();
    (void)trainer.take_decided();
    if (options.is_worker)
      trainer.compute_gradients(step, samples);
    else
      (void)trainer.step(step, samples, options.steps - step);
    moved = trainer.take_offloaded();
    all = {all.out + moved.out, all.back + moved.back, std::max(all.most, moved.most)};
  }
  run.peak = arena.peak();
  run.traffic = rank.traffic() - before;
  run.copies = trainer.take_decided().copies;
  run.uneven_sums = world.uneven_sums();
  run.host = {moved.out, moved.back, all.most};
  // Of a whole stream, whose first and last steps differ from the others, the mean.
  if (steps == options.steps) run.host.out = all.out / steps, run.host.back = all.back / steps;
  if (options.text.tokens == 0) return run;
  if (ends_each_step) trainer.parameters().drop_gradients();
  run.of_text = peak_of_text(rank, trainer, options.text);
  return run;
}

StepMemory predict_memory(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at,
                          const DryRunOptions& options) {
  DryRun run = dry_run(plan, pipeline, at, options);
  const bool is_stream = !pipeline.programs(at.dp).flushes() || !plan.optimizer_barrier;
  const bool is_whole = steps_of_stream(pipeline.programs(at.dp), options.steps) == options.steps;
  if (is_stream && !is_whole && plan.offloads_activations() && options.steps < many_steps) {
    // What moves in a step is the mean over all; the last one that was walked is near the end, and has less.
    DryRunOptions whole = options;
    whole.steps = many_steps;
    const HostActivations mean = dry_run(plan, pipeline, at, whole).host;
    run.host.out = mean.out, run.host.back = mean.back;
  }
  return {run.peak, run.host};
}

Coordinates with_largest_shard(const Plan& plan, const PipelineLayout& pipeline, Coordinates at) {
  if (plan.zero_stage() == 0) return at;
  const FlatLayout layout =
      flat_layout(pipeline.groups_of(at.pp, plan.mesh.ep_index(at)), plan.mesh.size(Axis::tp), at.tp);
  std::vector<ShardUnit> units = shard_units(layout, plan.all_shards());
  if (plan.zero_stage() == 3)
    for (ShardUnit& unit : frozen_units(layout, plan.all_shards())) units.push_back(std::move(unit));
  std::int64_t most = 0;
  for (int i = 0; i < plan.shards(); ++i) {
    const Coordinates there{at.pp, i / plan.mesh.size(Axis::cp), i % plan.mesh.size(Axis::cp), at.tp};
    const std::int64_t size = shard_size(units, plan.shard_index(there));
    if (size <= most) continue;
    most = size;
    at = there;
  }
  return at;
}

ExactMemory exact_memory() {
  return [](const Plan& plan, const PipelineLayout& pipeline, const Coordinates& of, Device device) {
    const auto held_by = [&](const Coordinates& at) {
      const DryRunOptions options{.device = device};
      if (!repeats_itself(plan, pipeline, at)) return predict_memory(plan, pipeline, at, options);
      const PipelineLayout of_rank = pipeline.of_rank(at.pp);
      StepMemory memory = predict_memory(plan, of_rank, at, options);
      // Its passes are fewer, which move as much each.
      const double repeats = real(num_microbatches(plan)) / of_rank.programs(at.dp).microbatches();
      memory.host.out = static_cast<std::int64_t>(real(memory.host.out) * repeats);
      memory.host.back = static_cast<std::int64_t>(real(memory.host.back) * repeats);
      return memory;
    };
    const StepMemory most = held_by(with_largest_shard(plan, pipeline, of));
    if (plan.optimizer != OptimizerKind::muon || plan.zero_stage() == 0) return most;
    // Whole matrices may be more than what other shards have more of: the first rank makes the largest.
    const StepMemory first = held_by({.pp = of.pp, .tp = of.tp});
    return first.total() > most.total() ? first : most;
  };
}

Traffic predict_traffic(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at,
                        std::int64_t updates, const std::optional<DecidedByData>& decided) {
  const DryRun run =
      dry_run(plan, pipeline, at, {.updates = updates, .passes_again = decided && decided->passes_again});
  if (!decided) return run.traffic;
  Traffic traffic = run.traffic, even, as_decided;
  add_copies(plan, at, run.copies, even);
  add_copies(plan, at, decided->copies, as_decided);
  traffic += as_decided;
  return traffic - even;
}

// Whole rows to the experts and back; the backward pass also brings each copy's weight and takes its
// gradient. Under invariant numerics tp ranks add up rows before they go back, each some columns of them.
void add_copies(const Plan& plan, const Coordinates& at, const MovedCopies& moved, Traffic& traffic) {
  traffic.at(Axis::cp, Verb::all_gather).bytes += moved.gathered_bytes;
  traffic.at(Axis::cp, Verb::all_to_all).bytes += moved.exchanged_bytes;
  if (plan.mesh.ep == 1) return;
  const std::int64_t hidden = plan.model.expert_width();
  const int tp = plan.mesh.size(Axis::tp);
  const bool sums_rows = plan.numerics == Numerics::invariant && tp > 1;
  const std::int64_t back = sums_rows ? split_range(hidden, tp, at.tp).size() : hidden;
  traffic.at(Axis::ep, Verb::all_to_all).bytes +=
      element_bytes(plan.precision.activations) *
          (hidden * (moved.forward_sent + moved.backward_sent + moved.again_sent) +
           back * (moved.forward_received + moved.backward_received + moved.again_received)) +
      element_bytes(plan.precision.statistics) * (moved.backward_sent + moved.backward_received);
  if (sums_rows)
    traffic.at(Axis::tp, Verb::reduce_scatter).bytes +=
        element_bytes(plan.precision.statistics) * (hidden - back) *
        (moved.forward_rows + moved.backward_rows + moved.again_rows);
}

}  // namespace echelon
