#include "plan/cost.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <utility>

#include "schedule/schedules.h"
#include "schedule/share_cores.h"
#include "spec/flat_layout.h"

namespace echelon {

namespace {

double backward_flops(const Plan& plan, const StageSlice& slice) {
  const StageTimes flops = stage_flops(plan, slice);
  return flops.backward_input + flops.backward_weight;
}

double seconds_sent(const PartSeconds& parts, const Traffic& traffic, std::initializer_list<Axis> axes) {
  double seconds = 0;
  for (Axis axis : axes)
    for (Verb verb : all_verbs) {
      const VerbTraffic& sent = traffic.at(axis, verb);
      seconds += parts.call * static_cast<double>(sent.calls) + parts.byte * static_cast<double>(sent.bytes);
    }
  return seconds;
}

// Makespan of a step, and the mean busy time of a rank in it. If steps are not separated by a barrier: what
// one further step adds to them.
std::pair<double, double> step_and_busy(const StepPrograms& programs, const SimulationCosts& costs,
                                        const CoreShare& share, bool barrier) {
  const auto measures = [&](const Schedule& schedule) {
    const Timeline timeline = simulate_on_cores(schedule, costs, share);
    double busy = 0;
    for (int r = 0; r < schedule.num_ranks(); ++r) busy += timeline.busy(r) / schedule.num_ranks();
    return std::pair{timeline.makespan(), busy};
  };
  const Schedule& shown = programs.schedule();
  const auto all = measures(shown);
  if (programs.flushes() && barrier) return all;
  const auto longer =
      measures(programs.flushes() ? repeated(shown, 2)
                                  : make_schedule(shown.name, shown.num_ranks(), programs.microbatches(), 0,
                                                  programs.shown_steps() + 1));
  return {longer.first - all.first, longer.second - all.second};
}

// For each pipeline rank: how often each stage runs a microbatch in a step.
std::vector<std::map<int, double>> runs_of(const StepPrograms& programs) {
  std::vector<std::map<int, double>> runs;
  for (const auto& list : programs.schedule().ranks) {
    auto& here = runs.emplace_back();
    for (const Instruction& i : list)
      if (i.op == Op::F) here[i.stage] += 1.0 / programs.shown_steps();
  }
  return runs;
}

// Of an update, on the rank that makes the most of those that share its state and layers: a round's first
// matrix is its largest.
double muon_flops_of_rank(const Plan& plan, const PipelineLayout& pipeline, int rank) {
  std::vector<const ParamSpec*> specs;
  for (const auto& group : pipeline.groups_of(rank, 0))
    for (const ParamSpec& spec : group) specs.push_back(&spec);
  double flops = 0;
  for (const MuonRound& round :
       muon_rounds(plan.optimizer, specs, plan.all_shards(), plan.mesh.size(Axis::tp)))
    flops += muon_flops(*specs[round.matrices.front()]);
  return flops;
}

}  // namespace

// A message between stages is copied by the pass that produces it and by the pass that reads it: half of the
// time to send along pp counts as forward, half as backward.
StepWork step_work(const Plan& plan, const PipelineLayout& pipeline, const PartSeconds& parts,
                   const std::vector<Traffic>& traffic) {
  const ModelSpec& m = plan.model;
  Plan unfrozen = plan;
  unfrozen.model.tuning.freeze.clear();
  StepWork work;
  work.costs.stages.clear();
  for (const StageSlice& slice : pipeline.slices()) {
    PartSeconds::Passes passes;
    const auto add = [&](const PartSeconds::Passes& more) {
      passes.forward += more.forward;
      passes.backward += more.backward;
    };
    for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer)
      add(m.is_other(layer) ? parts.others : parts.dense);
    const StageTimes flops = stage_flops(plan, slice);
    // Layers were timed as those of the first rank, with nothing frozen. What other ranks recompute, or need
    // not compute, is accounted for by its FLOPs.
    StageSlice layers{slice.layers,    false, false,
                      slice.recompute, false, std::max<std::int64_t>(0, slice.idle - 1)};
    const double own = backward_flops(plan, layers);
    layers.recompute = plan.recompute.of(0);
    layers.idle = 0;
    if (const double timed = backward_flops(unfrozen, layers); timed > 0) passes.backward *= own / timed;
    if (slice.embedding) passes.forward += parts.ends.forward;
    if (slice.head && !slice.vocabulary_is_cut) passes.backward += parts.ends.backward;
    const double both = flops.backward_input + flops.backward_weight,
                 input = both > 0 ? flops.backward_input / both : 1;
    work.costs.stages.push_back({passes.forward, input * passes.backward, (1 - input) * passes.backward});
  }
  // The output layer has three products, two of which V computes.
  if (plan.cuts_vocabulary())
    work.costs.vocabulary_part = {parts.ends.backward * 2 / (3 * plan.mesh.pp()), 0,
                                  parts.ends.backward / (3 * plan.mesh.pp())};
  const auto runs = runs_of(pipeline.programs(0));
  for (std::size_t r = 0; r < runs.size(); ++r) {
    double passes = 0;
    for (const auto& [stage, count] : runs[r]) passes += count;
    // Spread evenly over the rank's passes; a stage that two ranks hold gets half from each.
    const double sent = passes > 0 ? seconds_sent(parts, traffic[r], {Axis::pp}) / passes : 0;
    for (const auto& [stage, count] : runs[r]) {
      StageTimes& times = work.costs.stages[static_cast<std::size_t>(stage)];
      double holders = 0;
      for (const auto& other : runs) holders += other.contains(stage);
      times.forward += 0.5 * sent / holders;
      times.backward_input += 0.5 * sent / holders;
    }
    const auto elements = static_cast<double>(
        flat_layout(pipeline.groups_of(static_cast<int>(r), 0), plan.mesh.size(Axis::tp), 0).trained_size());
    const double update = parts.element * elements / plan.shards() +
                          parts.muon * muon_flops_of_rank(plan, pipeline, static_cast<int>(r));
    work.behind.push_back(update * pipeline.programs(0).updates_per_step() +
                          seconds_sent(parts, traffic[r], {Axis::dp}));
  }
  return work;
}

StepPrediction predict_step(const Plan& plan, const PipelineLayout& pipeline, const StepWork& work,
                            const JobCores& cores) {
  const double beside = static_cast<double>(plan.mesh.num_ranks()) / plan.mesh.size(Axis::pp);
  const CoreShare share{cores.cores, cores.wanted * beside};
  const auto [step, busy] = step_and_busy(pipeline.programs(0), work.costs, share, plan.optimizer_barrier);
  double longest = 0, sum = 0;
  for (double seconds : work.behind) {
    longest = std::max(longest, seconds);
    sum += seconds;
  }
  StepPrediction prediction;
  prediction.bubble_fraction = std::max(0.0, 1 - busy / step);
  prediction.seconds = step + std::max(longest, sum * share.wanted / share.cores);
  return prediction;
}

Timeline simulated_twin(const StepPrograms& programs, const SimulationCosts& costs, std::int64_t steps,
                        std::int64_t shown) {
  const Schedule& schedule = programs.schedule();
  if (programs.flushes()) return simulate(schedule, costs).timeline;
  shown = std::min(steps, shown);
  // Steps before the shown ones fill the pipeline; more than needed to fill it would change nothing.
  const std::int64_t before = std::min<std::int64_t>(steps - shown, programs.shown_steps());
  const Schedule stream = make_schedule(schedule.name, schedule.num_ranks(), programs.microbatches(), 0,
                                        static_cast<int>(before + shown));
  return last_steps(simulate(stream, costs).timeline, programs.microbatches(), static_cast<int>(shown));
}

}  // namespace echelon
