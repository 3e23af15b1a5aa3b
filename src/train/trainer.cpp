#include "train/trainer.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/halving_tree.h"
#include "train/optimistic_driver.h"
#include "train/stream_driver.h"

namespace echelon {

void refuse_clipping(const OptimizerOptions& optimizer, const PipelineLayout& pipeline) {
  const StepPrograms& programs = pipeline.programs(0);
  if (!programs.flushes() && optimizer.clip > 0)
    refuse(
        "--clip {}: {} steps each stage by itself, before the gradient norm over all stages is known; legal: "
        "0",
        optimizer.clip, programs.schedule().name);
}

static std::unique_ptr<StepDriver> make_driver(TrainingParts& parts) {
  if (!parts.programs.flushes()) return std::make_unique<StreamDriver>(parts);
  if (!parts.plan.optimizer_barrier) return std::make_unique<OptimisticDriver>(parts);
  return std::make_unique<FlushDriver>(parts);
}

Trainer::Trainer(const Rank& rank, const Plan& plan, const OptimizerOptions& optimizer, std::uint64_t seed,
                 TrainerHooks hooks, std::shared_ptr<const PipelineLayout> pipeline, Moments moments,
                 FirstValues first_values)
    : parts_(rank, plan, optimizer, seed, std::move(hooks), std::move(pipeline), moments, first_values),
      driver_(make_driver(parts_)) {}

FlushDriver& Trainer::flush() {
  auto* const flush = dynamic_cast<FlushDriver*>(driver_.get());
  check(flush != nullptr, "steps that run into each other are made by step()");
  return *flush;
}

std::vector<StepResult> Trainer::step(std::int64_t step, const SampleSource& samples,
                                      std::int64_t steps_left) {
  check(steps_left >= 1, "a step is one of those that are left");
  take_decided();  // an evaluation's
  return driver_->train(step, samples, steps_left);
}

double Trainer::compute_gradients(std::int64_t step, const SampleSource& samples) {
  take_decided();
  return flush().compute_gradients(step, samples);
}

double Trainer::evaluate(std::int64_t num_samples, const SampleSource& samples) {
  const Rank& rank = parts_.rank;
  const Range mine = split_range(num_samples, rank.size(Axis::dp), rank.coordinate(Axis::dp));
  const bool each = parts_.plan.numerics == Numerics::invariant;  // losses are added up sequence by sequence
  // As many sequences at once as training has, so that evaluation needs no more memory.
  const auto at_once = [&](int dp_rank) {
    return each ? 1 : microbatches(parts_.plan, dp_rank).front().size();
  };
  const auto passes = [&](int dp_rank) {
    const std::int64_t count = split_range(num_samples, rank.size(Axis::dp), dp_rank).size();
    return (count + at_once(dp_rank) - 1) / at_once(dp_rank);
  };
  std::int64_t last = passes(rank.coordinate(Axis::dp));
  // Ranks that gather parameters or exchange tokens together go through as many passes.
  if (parts_.parameters.gathers() || rank.size(Axis::ep) > 1)
    for (int r = 0; r < rank.size(Axis::dp); ++r) last = std::max(last, passes(r));
  const std::int64_t size = at_once(rank.coordinate(Axis::dp));
  std::vector<double> losses(each ? static_cast<std::size_t>(num_samples) : 1);
  double num_targets = 0;
  const Arena::PoolUse pool(rank.arena(), pool_between_steps());
  for (std::int64_t pass = 0; pass < last; ++pass) {
    const auto at = [&](std::int64_t p) { return std::min(mine.begin + p * size, mine.end); };
    const Microbatch microbatch = load_microbatch(rank, parts_.plan, 0, {at(pass), at(pass + 1)}, samples);
    num_targets += static_cast<double>(microbatch.num_targets);
    // Ranks that have fewer samples than others go through empty passes.
    const std::int64_t place = each ? std::min(at(pass), num_samples - 1) : 0;
    losses[static_cast<std::size_t>(place)] += parts_.stages.evaluate(microbatch);
  }
  num_targets = HostGroup(rank.dp_cp()).sum(num_targets);
  losses = HostGroup(rank.along(Axis::pp)).sum(HostGroup(rank.dp_cp()).sum(losses));
  return halving_sum(losses, 0, std::ssize(losses)) / num_targets;
}

}  // namespace echelon
