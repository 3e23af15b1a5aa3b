#include "plan/step_model.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/real.h"
#include "plan/memory.h"

namespace echelon {
namespace {

// To 12 digits: below them is rounding, and plans that take the same time compare as equal.
double to_twelve_digits(double seconds) {
  if (!(seconds > 0) || !std::isfinite(seconds)) return seconds;
  const double unit = std::pow(10, 11 - std::floor(std::log10(seconds)));
  return std::round(seconds * unit) / unit;
}

}  // namespace

StepModel::StepModel(Workload work) : work_(std::move(work)), stages_(work_) {
  flops_per_step_ =
      model_flops_per_token(work_.model, work_.seq_len) * real(work_.seq_len * work_.global_batch);
}

double StepModel::least_seconds(const Configuration& any) {
  Configuration c = any;
  c.zero = 0;
  c.hsdp = 1;
  const LayerPrices& p = stages_.prices(c);
  LayerSeconds t = p.seconds.dense * real(work_.model.num_layers - work_.model.num_expert_layers());
  t += p.seconds.experts * real(work_.model.num_expert_layers());
  t += p.seconds.embedding;
  t += p.seconds.head;
  t += p.seconds.loss;
  const double hidden = c.pp > 1 ? t.forward.expert + t.backward_input.expert : 0;
  return whole_step(c, real(num_microbatches(work_, c)) * (t.forward.total() + t.backward() - hidden) / c.pp);
}

Outlook StepModel::outlook(const Configuration& c, double most_bytes) {
  const StageShape& s = stages_.shape(c);
  const LayerPrices& p = stages_.prices(c);
  Outlook look;
  for (std::size_t r = 0; r < s.ranks.size(); ++r) {
    const double bytes = real(footprint(work_, c, p.counts, p.saved, s.ranks[r]).total());
    if (bytes <= look.bytes) continue;
    look.bytes = bytes;
    look.rank = static_cast<int>(r);
    look.in_flight = s.facts->peak[r];
  }
  if (look.bytes > most_bytes) return look;
  double least_behind = 1e300;
  for (std::size_t r = 0; r < s.ranks.size(); ++r) {
    const double behind = stages_.exposed(c, s, r) + stages_.state().optimizer(c, s.counts[r]);
    look.seconds = std::max(look.seconds, s.least_end[r] + behind);
    least_behind = std::min(least_behind, behind);
  }
  look.seconds = whole_step(c, std::max(look.seconds, s.least_pipeline + least_behind));
  return look;
}

double StepModel::whole_step(const Configuration& c, double seconds) const {
  const double nodes = std::max(1.0, static_cast<double>(c.ranks()) / work_.machine.node());
  return seconds * (1 + work_.software.straggling * std::log2(nodes)) + work_.software.step_seconds;
}

Timeline StepModel::timeline(const Configuration& c) {
  const StageShape& s = stages_.shape(c);
  return simulate(stages_.schedule(c), *s.costs).timeline;
}

// Neighbours in the search share a simulation.
const StepModel::Ends& StepModel::simulated(const Configuration& c, const SimulationCosts& costs) {
  const Configuration same = stages_.of_passes(c);
  if (last_ends_.of_rank.empty() || !(same == last_simulated_)) {
    const Schedule& schedule = stages_.schedule(c);
    const Timeline timeline = simulate(schedule, costs).timeline;
    last_ends_ = {{}, timeline.bubble_fraction()};
    for (const auto& spans : timeline.ranks) {
      double end = 0;
      for (const Span& span : spans) end = std::max(end, span.end);
      last_ends_.of_rank.push_back(end);
    }
    last_simulated_ = same;
  }
  return last_ends_;
}

AxisBytes StepModel::most_traffic(const Configuration& c) {
  const StageShape& s = stages_.shape(c);
  const double microbatches = real(num_microbatches(work_, c));
  AxisBytes most;
  for (std::size_t r = 0; r < s.ranks.size(); ++r) {
    AxisBytes own;
    double passes = 0;  // mean over the rank's stages
    for (const StageUse& use : s.facts->uses[r]) {
      const LayerSeconds& t = s.stages[static_cast<std::size_t>(use.stage)];
      const double count = use.share * microbatches;
      own.tp += count * t.tensor_bytes;
      own.cp += count * t.context_bytes;
      own.ep += count * t.expert_bytes;
      passes += count / real(static_cast<std::int64_t>(s.facts->uses[r].size()));
    }
    own.pp = microbatches * s.facts->sends[r] * stages_.message_bytes(c);
    own.dp = stages_.state().bytes(c, s.counts[r], passes);
    for (double AxisBytes::*axis :
         {&AxisBytes::dp, &AxisBytes::tp, &AxisBytes::pp, &AxisBytes::cp, &AxisBytes::ep})
      most.*axis = std::max(most.*axis, own.*axis);
  }
  return most;
}

std::pair<double, double> StepModel::interval(const Configuration& c) const {
  const Software& s = work_.software;
  if (work_.model.num_expert_layers() > 0 && s.experts_high > 0) return {s.experts_low, s.experts_high};
  if (c.ranks() > work_.machine.node() && s.nodes_high > 0) return {s.nodes_low, s.nodes_high};
  return {s.low, s.high};
}

Estimate StepModel::estimate(const Configuration& c) {
  Estimate e = estimate_seconds(c);
  add_memory(e);
  return e;
}

// Of this trainer the first data- and tensor-parallel rank has most; pipeline ranks are asked from the one
// that is likely to hold most.
void StepModel::add_memory(Estimate& e, double most_bytes) {
  const Configuration& c = e.configuration;
  const StageShape& s = stages_.shape(c);
  const LayerPrices& p = stages_.prices(c);
  std::vector<int> order;
  for (std::size_t r = 0; r < s.ranks.size(); ++r) {
    e.rank_memory.push_back(footprint(work_, c, p.counts, p.saved, s.ranks[r]));
    order.push_back(static_cast<int>(r));
  }
  const auto held = [&](int r) { return e.rank_memory[static_cast<std::size_t>(r)].total(); };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return held(a) > held(b); });
  if (work_.software.is_this_trainer && !work_.model.latent_attention()) {
    if (!work_.exact_memory) throw InvariantError("a plan of this trainer is priced with what it holds");
    const Plan plan = as_plan(work_, c, s.layers);
    const PipelineLayout pipeline(plan);
    for (int r : order) {
      e.memory = e.rank_memory[static_cast<std::size_t>(r)] = work_.exact_memory(plan, pipeline, {.pp = r});
      e.memory_rank = r;
      if (real(e.memory.total()) > most_bytes) return;
    }
  }
  e.memory_rank = 0;
  for (int r = 1; r < static_cast<int>(e.rank_memory.size()); ++r)
    if (held(r) > held(e.memory_rank)) e.memory_rank = r;
  e.memory = e.rank_memory[static_cast<std::size_t>(e.memory_rank)];
}

Estimate StepModel::estimate_seconds(const Configuration& c) {
  const StageShape& s = stages_.shape(c);
  Estimate e;
  e.configuration = c;
  e.layers = s.layers;
  e.microbatches = num_microbatches(work_, c);
  e.costs = *s.costs;
  const Ends& ends = simulated(c, e.costs);
  e.bubble_fraction = ends.bubble_fraction;

  std::size_t last = 0;
  double latest = -1;
  for (std::size_t r = 0; r < s.ranks.size(); ++r) {
    const double done =
        ends.of_rank[r] + stages_.exposed(c, s, r) + stages_.state().optimizer(c, s.counts[r]);
    if (done > latest) latest = done, last = r;
  }
  StepParts& parts = e.parts;
  double busy = 0;
  for (const StageUse& use : s.facts->uses[last]) {
    const auto i = static_cast<std::size_t>(use.stage);
    const double count = use.share * real(e.microbatches);
    LayerSeconds t = s.stages[i];
    for (const PassSeconds* pass : {&t.forward, &t.backward_input, &t.backward_weight}) {
      parts.compute += count * pass->compute;
      parts.tp_exposed += count * pass->tensor;
      parts.cp_exposed += count * pass->context;
      parts.ep_exposed += count * pass->expert;
      busy += count * pass->total();
    }
    parts.dp_exposed += count * s.sharing[i];
    busy += count * s.sharing[i];
  }
  const double exposed = stages_.exposed(c, s, last);
  parts.dp_exposed += exposed;
  parts.optimizer = stages_.state().optimizer(c, s.counts[last]);
  parts.pp_bubble = latest - exposed - parts.optimizer - busy;
  if (parts.pp_bubble < 0) {  // what runs together hid communication; or rounding
    parts.ep_exposed = std::max(0.0, parts.ep_exposed + parts.pp_bubble);
    parts.pp_bubble = 0;
  }
  e.traffic = most_traffic(c);
  e.seconds = to_twelve_digits(whole_step(c, latest));
  parts.other = e.seconds - latest;

  const auto [low, high] = interval(c);
  e.low = e.seconds * low;
  e.high = e.seconds * high;
  const double gpus = c.ranks();
  e.tokens_per_second_per_gpu = real(work_.seq_len * work_.global_batch) / (e.seconds * gpus);
  e.model_tflops_per_gpu = flops_per_step_ / (e.seconds * gpus) / 1e12;
  e.mfu = e.model_tflops_per_gpu * 1e12 / work_.machine.peak(work_.precision);
  return e;
}

}  // namespace echelon
