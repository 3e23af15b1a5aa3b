#include "plan/step_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "plan/memory.h"
#include "schedule/balance.h"
#include "schedule/schedules.h"

namespace echelon {
namespace {

double real(std::int64_t n) { return static_cast<double>(n); }

SimulationCosts simulation_costs(const std::vector<LayerSeconds>& stages, const std::vector<double>& gathers,
                                 const Software& software, double message, int pp) {
  SimulationCosts costs;
  costs.stages.clear();
  double all = 0, experts = 0;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const LayerSeconds& t = stages[i];
    const double handing = pp > 1 ? software.message_seconds : 0;
    costs.stages.push_back({t.forward.total() + gathers[i] / 3 + handing,
                            t.backward_input.total() + gathers[i] * 2 / 3 + handing,
                            t.backward_weight.total()});
    all += t.forward.total() + t.backward() + gathers[i] + 2 * handing;
    experts += t.forward.expert + t.backward_input.expert;
  }
  costs.message = message;
  // What runs together hides the experts' all-to-all, which is what DualPipe was made for; the collectives of
  // tp stand between products that need each other.
  if (all > 0)
    costs.overlap_factor =
        (all - experts + added_seconds(all - experts, experts, software.overlap_slowdown)) / all;
  return costs;
}

}  // namespace

namespace {

// The first data- and tensor-parallel rank has most.
std::vector<Memory> walked_memory(const Workload& work, const Configuration& c,
                                  const std::vector<std::int64_t>& layers) {
  const Plan plan = as_plan(work, c, layers);
  const PipelineLayout pipeline(plan);
  std::vector<Memory> ranks;
  for (int r = 0; r < c.pp; ++r) ranks.push_back(predict_memory(plan, pipeline, {.pp = r}));
  return ranks;
}

}  // namespace

// Stages with their times, and what each pipeline rank runs and holds.
struct StepModel::Shape {
  const ScheduleFacts* facts = nullptr;
  std::vector<std::int64_t> layers;
  std::vector<LayerSeconds> stages;
  std::vector<double> gathers;  // seconds that ZeRO 3 adds to a microbatch, of each stage
  std::vector<RankShare> ranks;
  std::vector<ShareCounts> counts;
  std::optional<SimulationCosts> costs;
  std::vector<double> least_end;  // of each rank: its last instruction ends no earlier
  double least_pipeline = 0;      // nor the pipeline
};

StepModel::~StepModel() = default;

StepModel::StepModel(Workload work)
    : work_(std::move(work)), ops_(work_.machine, work_.software, work_.precision), state_(work_, ops_) {
  flops_per_step_ =
      model_flops_per_token(work_.model, work_.seq_len) * real(work_.seq_len * work_.global_batch);
}

const StepModel::Prices& StepModel::prices(const Configuration& c) {
  const PriceKey key{c.tp,
                     c.cp,
                     static_cast<int>(c.context),
                     c.ep,
                     c.etp,
                     c.shards_sequence(),
                     static_cast<int>(c.recompute),
                     c.zero == 3 ? c.shards() : 0,
                     c.micro_batch,
                     c.zero == 3 ? c.hsdp : 0,
                     0};
  const auto found = prices_.find(key);
  if (found != prices_.end()) return found->second;
  Prices p;
  if (!counts_.contains(c.tp)) counts_[c.tp] = parameter_counts(work_.model, c.tp);
  p.counts = counts_.at(c.tp);
  p.saved = saved_bytes(work_, c);
  p.seconds = model_seconds(work_, c, ops_);
  return prices_.emplace(key, std::move(p)).first->second;
}

std::vector<std::int64_t> StepModel::layers(const Configuration& c, const ScheduleFacts& facts) {
  const std::int64_t total = work_.model.num_layers;
  if (!c.layers_per_stage.empty()) return c.layers_per_stage;
  const auto stages = static_cast<std::size_t>(facts.num_stages);
  std::vector<std::int64_t> even(stages);
  for (std::size_t s = 0; s < stages; ++s)
    even[s] = split_range(total, facts.num_stages, static_cast<std::int64_t>(s)).size();
  if (c.even_split || stages == 1) return even;
  // The ends have work beside their layers: a layer moves away from an end for as long as the slowest stage
  // gets faster by it.
  const ModelSeconds& t = prices(c).seconds;
  const LayerSeconds& layer = work_.model.num_expert_layers() > 0 ? t.experts : t.dense;
  const double cost = layer.forward.total() + layer.backward();
  std::vector<double> extra(stages, 0);
  extra.front() += t.embedding.forward.total() + t.embedding.backward();
  extra.back() += t.head.forward.total() + t.head.backward() + t.loss.forward.total() + t.loss.backward();
  const auto work = [&](std::size_t s) { return real(even[s]) * cost + extra[s]; };
  for (std::int64_t moves = 0; moves < total; ++moves) {
    std::size_t most = 0, least = 0;
    for (std::size_t s = 1; s < stages; ++s) {
      if (work(s) > work(most)) most = s;
      if (work(s) < work(least)) least = s;
    }
    if (even[most] <= 1 || work(least) + cost >= work(most) * (1 - 1e-9)) break;
    --even[most];
    ++even[least];
  }
  return even;
}

LayerSeconds StepModel::stage_seconds(const Configuration& c, const Prices& p,
                                      const std::vector<std::int64_t>& layers, std::size_t stage) const {
  const ModelSpec& m = work_.model;
  const auto at = layers.begin() + static_cast<std::ptrdiff_t>(stage);
  const std::int64_t first = std::accumulate(layers.begin(), at, std::int64_t{0});
  const std::int64_t dense_end = m.experts == Experts::none ? m.num_layers : m.num_dense_layers;
  const double dense = real(std::clamp<std::int64_t>(dense_end - first, 0, *at));
  LayerSeconds sum = p.seconds.dense * dense;
  sum += p.seconds.experts * (real(*at) - dense);
  if (stage == 0) sum += p.seconds.embedding;
  const bool apart = work_.software.loss_apart && layers.size() > 1 && layers.back() == 0;
  const std::size_t last = layers.size() - 1, head = apart ? last - 1 : last;
  if (stage == head) sum += p.seconds.head;
  if (stage == last) sum += p.seconds.loss;
  if (apart && stage >= head) {
    // Logits go over and their gradient comes back beside what both ends compute; neither is faster than
    // they.
    const double waiting =
        ops_.message(p.saved.logits, pipeline_stride(c)) - sum.forward.total() - sum.backward();
    sum.forward.compute += std::max(0.0, waiting) / 3;
    sum.backward_input.compute += std::max(0.0, waiting) * 2 / 3;
  }
  return sum;
}

// ZeRO up to 2 leaves stages as they are: neighbours in the search share them.
const StepModel::Shape& StepModel::shape(const Configuration& c) {
  Configuration same = c;
  if (c.zero < 3) same.zero = 0, same.hsdp = 1;
  if (!last_shape_ || !(same == last_shaped_)) {
    last_shape_ = std::make_unique<Shape>(make_shape(c));
    last_shaped_ = same;
  }
  return *last_shape_;
}

StepModel::Shape StepModel::make_shape(const Configuration& c) {
  Shape s;
  const auto microbatches = static_cast<int>(num_microbatches(work_, c));
  s.facts = &shelf_.facts(c.pp == 1 ? "1f1b" : c.schedule, c.pp, microbatches, c.chunks > 1 ? c.chunks : 0);
  const ScheduleFacts& facts = *s.facts;
  check(facts.problem.empty(), "a configuration's schedule was looked at before");
  const Prices& p = prices(c);
  const ModelSpec& m = work_.model;
  s.layers = layers(c, facts);
  const std::int64_t dense_end = m.experts == Experts::none ? m.num_layers : m.num_dense_layers;
  std::vector<double> dense(s.layers.size());
  std::int64_t first = 0;
  for (std::size_t i = 0; i < s.layers.size(); ++i) {
    const bool embedding = i == 0, head = i + 1 == s.layers.size();
    s.stages.push_back(stage_seconds(c, p, s.layers, i));
    dense[i] = real(std::clamp<std::int64_t>(dense_end - first, 0, s.layers[i]));
    double gathers = 0;
    if (c.zero == 3 && c.shards() > 1) {
      const auto unit = [&](const LayerSeconds& t, double common, double routed) {
        return state_.unit_adds(c, {common, routed}, t.forward.total(), t.backward());
      };
      gathers += dense[i] * unit(p.seconds.dense, p.counts.dense_layer, 0);
      if (real(s.layers[i]) > dense[i])
        gathers += (real(s.layers[i]) - dense[i]) *
                   unit(p.seconds.experts, p.counts.expert_layer, p.counts.routed / (c.ep * c.etp));
      if (embedding) gathers += unit(p.seconds.embedding, p.counts.embedding, 0);
      if (head) gathers += unit(p.seconds.head, p.counts.head, 0);
    }
    s.gathers.push_back(gathers);
    first += s.layers[i];
  }
  for (std::size_t r = 0; r < facts.uses.size(); ++r) {
    RankShare share;
    double fraction = 0;
    for (const StageUse& use : facts.uses[r]) {
      const auto i = static_cast<std::size_t>(use.stage);
      share.dense_layers += dense[i];
      share.expert_layers += real(s.layers[i]) - dense[i];
      share.embedding |= i == 0;
      share.head |= i + 1 == s.layers.size();
      fraction += facts.stage_fraction;
    }
    share.tied_copy = m.tied_embedding && share.head && !share.embedding;
    share.in_flight = facts.peak[r] / fraction;
    s.ranks.push_back(share);
    s.counts.push_back(share_counts(p.counts, c, share));
  }
  s.costs = simulation_costs(s.stages, s.gathers, work_.software, message_seconds(c, p), c.pp);
  bound(c, s);
  return s;
}

double StepModel::exposed_seconds(const Configuration& c, const Shape& s, std::size_t rank) const {
  double backward = 0, forward = 0;
  for (const StageUse& use : s.facts->uses[rank]) {
    const LayerSeconds& t = s.stages[static_cast<std::size_t>(use.stage)];
    backward += t.backward();
    forward += t.forward.total();
  }
  const double layers = std::max(1.0, s.ranks[rank].dense_layers + s.ranks[rank].expert_layers);
  return state_.exposed(c, s.counts[rank], layers, forward, backward);
}

std::string StepModel::schedule_problem(const Configuration& c) {
  if (c.pp == 1) return {};
  if (is_stream(c.schedule)) return c.schedule + ": does not flush, so it trains otherwise than the others";
  const auto microbatches = static_cast<int>(num_microbatches(work_, c));
  const ScheduleFacts& facts = shelf_.facts(c.schedule, c.pp, microbatches, c.chunks > 1 ? c.chunks : 0);
  if (!facts.problem.empty()) return facts.problem;
  if (facts.num_stages > work_.model.num_layers)
    return fmt::format("{}: {} stages, and the model has {} layers", c.schedule, facts.num_stages,
                       work_.model.num_layers);
  if (!c.layers_per_stage.empty() && static_cast<int>(c.layers_per_stage.size()) != facts.num_stages)
    return fmt::format("--layers-per-stage: {} numbers, and {} has {} stages", c.layers_per_stage.size(),
                       c.schedule, facts.num_stages);
  return {};
}

bool StepModel::splits_evenly(const Configuration& c) {
  const auto microbatches = static_cast<int>(num_microbatches(work_, c));
  const ScheduleFacts& facts =
      shelf_.facts(c.pp == 1 ? "1f1b" : c.schedule, c.pp, microbatches, c.chunks > 1 ? c.chunks : 0);
  const auto balanced = layers(c, facts);
  for (std::size_t s = 0; s < balanced.size(); ++s)
    if (balanced[s] !=
        split_range(work_.model.num_layers, facts.num_stages, static_cast<std::int64_t>(s)).size())
      return false;
  return true;
}

double StepModel::least_seconds(const Configuration& any) {
  Configuration c = any;
  c.zero = 0;
  c.hsdp = 1;
  const Prices& p = prices(c);
  LayerSeconds t = p.seconds.dense * real(work_.model.num_layers - work_.model.num_expert_layers());
  t += p.seconds.experts * real(work_.model.num_expert_layers());
  t += p.seconds.embedding;
  t += p.seconds.head;
  t += p.seconds.loss;
  const double hidden = c.pp > 1 ? t.forward.expert + t.backward_input.expert : 0;
  return whole_step(c, real(num_microbatches(work_, c)) * (t.forward.total() + t.backward() - hidden) / c.pp);
}

// A rank ends no earlier than the passes before its first one and its own; the whole pipeline not before
// those behind its last one too.
void StepModel::bound(const Configuration& c, Shape& s) const {
  const ScheduleFacts& facts = *s.facts;
  const double microbatches = real(num_microbatches(work_, c));
  // Passes that run together take this part of their sum.
  const double factor = facts.overlaps ? std::min(1.0, s.costs->overlap_factor) : 1;
  std::vector<double> before(s.stages.size() + 1), behind(s.stages.size() + 1);
  for (std::size_t i = 0; i < s.stages.size(); ++i) {
    const StageTimes& t = s.costs->stages[i];
    before[i + 1] = before[i] + factor * t.forward + s.costs->message;
    // Weight gradients apart may come later.
    const double weights = facts.splits_backward ? 0 : t.backward_weight;
    behind[i + 1] = behind[i] + factor * (t.backward_input + weights) + s.costs->message;
  }
  for (const auto& uses : facts.uses) {
    double work = 0, first = 1e300, last = 1e300;
    for (const StageUse& use : uses) {
      const auto i = static_cast<std::size_t>(use.stage);
      const StageTimes& t = s.costs->stages[i];
      work += use.share * microbatches * factor * (t.forward + t.backward_input + t.backward_weight);
      first = std::min(first, before[i]);
      last = std::min(last, behind[i]);
    }
    s.least_end.push_back(first + work);
    s.least_pipeline = std::max(s.least_pipeline, first + work + (facts.splits_backward ? 0 : last));
  }
}

Outlook StepModel::outlook(const Configuration& c, double most_bytes) {
  const Shape& s = shape(c);
  const Prices& p = prices(c);
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
    const double behind = exposed_seconds(c, s, r) + state_.optimizer(c, s.counts[r]);
    look.seconds = std::max(look.seconds, s.least_end[r] + behind);
    least_behind = std::min(least_behind, behind);
  }
  look.seconds = whole_step(c, std::max(look.seconds, s.least_pipeline + least_behind));
  return look;
}

double StepModel::message_seconds(const Configuration& c, const Prices& p) const {
  if (c.pp == 1) return 0;
  const double bytes = p.saved.boundary;
  if (c.tp == 1 || c.shards_sequence() || !work_.software.scatters_messages)
    return ops_.message(bytes, pipeline_stride(c));
  return ops_.message(bytes / c.tp, pipeline_stride(c)) + ops_.collective(Verb::all_gather, bytes, c.tp, 1);
}

double StepModel::whole_step(const Configuration& c, double seconds) const {
  const double nodes = std::max(1.0, static_cast<double>(c.ranks()) / work_.machine.node());
  return seconds * (1 + work_.software.straggling * std::log2(nodes)) + work_.software.step_seconds;
}

Timeline StepModel::timeline(const Configuration& c) {
  const Shape& s = shape(c);
  const Schedule& schedule =
      shelf_.schedule(c.pp == 1 ? "1f1b" : c.schedule, c.pp, static_cast<int>(num_microbatches(work_, c)),
                      c.chunks > 1 ? c.chunks : 0);
  return simulate(schedule, *s.costs).timeline;
}

// ZeRO up to 2 does not change what the pipeline runs: neighbours in the search share a simulation.
const StepModel::Ends& StepModel::simulated(const Configuration& c, const SimulationCosts& costs) {
  Configuration same = c;
  if (c.zero < 3) same.zero = 0, same.hsdp = 1;
  if (last_ends_.of_rank.empty() || !(same == last_simulated_)) {
    const Schedule& schedule =
        shelf_.schedule(c.pp == 1 ? "1f1b" : c.schedule, c.pp, static_cast<int>(num_microbatches(work_, c)),
                        c.chunks > 1 ? c.chunks : 0);
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

std::pair<double, double> StepModel::interval(const Configuration& c) const {
  const Software& s = work_.software;
  if (work_.model.num_expert_layers() > 0 && s.experts_high > 0) return {s.experts_low, s.experts_high};
  if (c.ranks() > work_.machine.node() && s.nodes_high > 0) return {s.nodes_low, s.nodes_high};
  return {s.low, s.high};
}

Estimate StepModel::estimate(const Configuration& c) {
  const Shape& s = shape(c);
  const Prices& p = prices(c);
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
    const double done = ends.of_rank[r] + exposed_seconds(c, s, r) + state_.optimizer(c, s.counts[r]);
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
    parts.dp_exposed += count * s.gathers[i];
    busy += count * s.gathers[i];
    e.traffic.tp += count * t.tensor_bytes;
    e.traffic.cp += count * t.context_bytes;
    e.traffic.ep += count * t.expert_bytes;
    const double sends = (use.stage + 1 < s.facts->num_stages ? 1 : 0) + (use.stage > 0 ? 1 : 0);
    if (c.pp > 1) e.traffic.pp += count * sends * p.saved.boundary;
  }
  const double exposed = exposed_seconds(c, s, last);
  parts.dp_exposed += exposed;
  parts.optimizer = state_.optimizer(c, s.counts[last]);
  parts.pp_bubble = latest - exposed - parts.optimizer - busy;
  if (parts.pp_bubble < 0) {  // what runs together hid communication
    parts.ep_exposed += parts.pp_bubble;
    parts.pp_bubble = 0;
  }
  e.traffic.dp = state_.bytes(c, s.counts[last]);
  e.seconds = whole_step(c, latest);
  parts.other = e.seconds - latest;

  const bool walked = work_.software.is_this_trainer && work_.model.experts == Experts::none;
  if (walked) e.rank_memory = walked_memory(work_, c, s.layers);
  for (std::size_t r = 0; r < s.ranks.size(); ++r) {
    if (!walked) e.rank_memory.push_back(footprint(work_, c, p.counts, p.saved, s.ranks[r]));
    const Memory& memory = e.rank_memory[r];
    if (r == 0 || memory.total() > e.memory.total()) {
      e.memory = memory;
      e.memory_rank = static_cast<int>(r);
    }
  }
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
