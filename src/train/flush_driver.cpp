#include "train/flush_driver.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "schedule/group_uses.h"

namespace echelon {

// All that a device can do before the host knows the loss is queued before the host waits for it.
std::vector<StepResult> FlushDriver::train(std::int64_t step, const SampleSource& samples,
                                           std::int64_t steps_left) {
  run_passes(step, samples);
  std::unique_ptr<GradientSquares> squares = begin_norm();
  if (steps_left > 1) read_ahead(1);
  const double loss = take_loss();
  return {update(step, loss, std::move(squares))};
}

double FlushDriver::compute_gradients(std::int64_t step, const SampleSource& samples) {
  run_passes(step, samples);
  return take_loss();
}

StepResult FlushDriver::apply_gradients(std::int64_t step, double loss) {
  return update(step, loss, begin_norm());
}

void FlushDriver::run_passes(std::int64_t step, const SampleSource& samples) {
  const Rank& rank = parts_.rank;
  const StepPrograms::Program program = parts_.programs.program(0, 1);
  begin(step, samples);
  parts_.gradients.begin(parts_.updates(step), parts_.sums == DataParallelSums::all);
  prepare(0);
  parts_.stages.begin_step();
  parts_.parameters.begin_uses(group_uses(*parts_.pipeline, program, rank.coordinate(Axis::pp)));
  run(program);
  parts_.parameters.end_uses();
  if (const SequenceTree* tree = parts_.parameters.sequence_tree()) tree->end_passes();
  parts_.gradients.finish_with_pipeline();
}

std::unique_ptr<GradientSquares> FlushDriver::begin_norm() {
  if (parts_.hooks.after_sums) parts_.hooks.after_sums();
  if (parts_.plan.numerics == Numerics::invariant) return nullptr;
  const Doing doing = parts_.rank.doing(Activity::gradient_norm);
  return std::make_unique<GradientSquares>(parts_.rank, parts_.parameters);
}

double FlushDriver::take_loss() {
  std::vector<double> loss_sums = take_loss_sums();
  if (parts_.sums == DataParallelSums::all) count_routing();
  if (parts_.sums != DataParallelSums::none) loss_sums = sum_over_ranks(loss_sums);
  if (loss_sums.size() > 1) mtp_loss_ = loss_sums.back() / num_targets();
  return loss_sums.front() / num_targets();
}

StepResult FlushDriver::update(std::int64_t step, double loss, std::unique_ptr<GradientSquares> squares) {
  const double norm = squares ? global_gradient_norm(parts_.rank, *squares)
                              : invariant_gradient_norm(parts_.rank, parts_.parameters);
  StepResult result{step, loss, norm, learning_rate(parts_.optimizer, step)};
  result.routing = routing_;
  result.mtp_loss = mtp_loss_;
  if (!std::isfinite(result.gradient_norm) || !std::isfinite(loss)) {
    if (!parts_.skips_nonfinite) refuse_step(step, loss);
    result.skipped = parts_.gradients.first_nonfinite(loss);
    parts_.more_updates -= parts_.programs.updates_per_step();
    return result;
  }
  optimizer_step(parts_.rank, parts_.parameters, parts_.optimizer, result.learning_rate, parts_.updates(step),
                 clip_factor(result.gradient_norm, parts_.optimizer.clip));
  parts_.stages.balance_routers(routing_);
  return result;
}

// In DualPipe two pipeline ranks have halves of a data-parallel rank's microbatches, so their sum comes first
// (docs/invariance.md). Else one of them has all.
std::vector<double> FlushDriver::sum_over_ranks(std::span<const double> numbers) const {
  return HostGroup(parts_.rank.dp_cp()).sum(HostGroup(parts_.rank.along(Axis::pp)).sum(numbers));
}

// A layer's tokens are on all data-parallel ranks, and in DualPipe on two pipeline ranks. Losses alone are
// summed over tp: under sequence parallelism each rank has its own rows.
void FlushDriver::count_routing() {
  const Rank& rank = parts_.rank;
  const ModelSpec& model = parts_.plan.model;
  const std::vector<std::int64_t> routed = model.routed_layers();
  const std::int64_t experts = model.num_experts, layers = std::ssize(routed),
                     width = routing_report_size(experts);
  if (layers == 0) return;
  const auto place_of = [&routed](std::int64_t layer) {
    return std::lower_bound(routed.begin(), routed.end(), layer) - routed.begin();
  };
  const Doing doing = rank.doing(Activity::count_routing);
  std::vector<double> losses(static_cast<std::size_t>(layers)), all(static_cast<std::size_t>(layers * width));
  const std::vector<RoutingCounts> here = parts_.stages.take_routing_counts();
  for (const RoutingCounts& c : here) losses[static_cast<std::size_t>(place_of(c.layer))] += c.loss_sum;
  if (parts_.plan.shards_sequence()) losses = HostGroup(rank.along(Axis::tp)).sum(losses);
  for (const RoutingCounts& c : here) {
    double* place = all.data() + place_of(c.layer) * width;
    for (std::size_t e = 0; e < c.routed.size(); ++e) {
      place[e] += c.routed[e];
      place[static_cast<std::size_t>(experts) + e] += c.dropped[e];
    }
    place[2 * experts] += c.away;
    place[width - 1] = losses[static_cast<std::size_t>(place_of(c.layer))];
  }
  all = sum_over_ranks(all);
  routing_.clear();
  for (std::int64_t i = 0; i < layers; ++i) {
    const double* place = all.data() + i * width;
    routing_.push_back(
        {routed[static_cast<std::size_t>(i)],
         {place, place + experts},
         {place + experts, place + 2 * experts},
         place[2 * experts],
         place[width - 1] / static_cast<double>(parts_.plan.global_batch * parts_.plan.seq_len)});
  }
}

}  // namespace echelon
