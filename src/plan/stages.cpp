#include "plan/stages.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/real.h"
#include "schedule/balance.h"
#include "schedule/pipeline_layout.h"
#include "schedule/schedules.h"

namespace echelon {
namespace {

std::int64_t pipeline_stride(const Configuration& c) { return std::int64_t{c.tp} * c.cp * c.dp * c.pp; }

SimulationCosts simulation_costs(const std::vector<LayerSeconds>& stages, const std::vector<double>& sharing,
                                 const Software& software, double message, int pp) {
  SimulationCosts costs;
  costs.stages.clear();
  double all = 0, experts = 0;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const LayerSeconds& t = stages[i];
    const double handing = pp > 1 ? software.message_seconds : 0;
    costs.stages.push_back({t.forward.total() + sharing[i] / 3 + handing,
                            t.backward_input.total() + sharing[i] * 2 / 3 + handing,
                            t.backward_weight.total()});
    all += t.forward.total() + t.backward() + sharing[i] + 2 * handing;
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

Stages::Stages(const Workload& work)
    : work_(work),
      plan_(plan_of(work)),
      ops_(work.machine, work.software, work.precision),
      state_(work, ops_) {}

const ScheduleFacts& Stages::facts(const Configuration& c) {
  return shelf_.facts(c.pp == 1 ? "1f1b" : c.schedule, c.pp, static_cast<int>(num_microbatches(work_, c)),
                      c.chunks > 1 ? c.chunks : 0);
}

const Schedule& Stages::schedule(const Configuration& c) {
  return shelf_.schedule(c.pp == 1 ? "1f1b" : c.schedule, c.pp, static_cast<int>(num_microbatches(work_, c)),
                         c.chunks > 1 ? c.chunks : 0);
}

std::string Stages::schedule_problem(const Configuration& c) {
  if (c.pp > 1 && is_stream(c.schedule))
    return c.schedule + ": does not flush, so it trains otherwise than the others";
  const ScheduleFacts& facts = this->facts(c);
  if (!facts.problem.empty()) return facts.problem;
  place(work_, c, plan_);
  const auto refusal = stages_refusal(plan_, facts.num_stages);
  if (!refusal && facts.num_stages > work_.model.num_layers)
    return fmt::format("{}: {} stages, and the model has {} layers: a stage without layers is not priced",
                       c.schedule, facts.num_stages, work_.model.num_layers);
  return refusal ? sentence(plan_, *refusal) : "";
}

bool Stages::splits_evenly(const Configuration& c) {
  const ScheduleFacts& facts = this->facts(c);
  const auto balanced = layers(c, facts);
  for (std::size_t s = 0; s < balanced.size(); ++s)
    if (balanced[s] !=
        split_range(work_.model.num_layers, facts.num_stages, static_cast<std::int64_t>(s)).size())
      return false;
  return true;
}

const LayerPrices& Stages::prices(const Configuration& c) {
  const PriceKey key{c.tp,
                     c.cp,
                     static_cast<int>(c.context),
                     c.ep,
                     c.etp,
                     c.shards_sequence(),
                     recompute_name(c.recompute),
                     c.micro_batch};
  const auto found = prices_.find(key);
  if (found != prices_.end()) return found->second;
  LayerPrices p;
  if (!counts_.contains(c.tp)) counts_[c.tp] = parameter_counts(work_.model, c.tp);
  p.counts = counts_.at(c.tp);
  p.saved = saved_bytes(work_, c);
  p.seconds = model_seconds(work_, c, ops_);
  return prices_.emplace(key, std::move(p)).first->second;
}

std::vector<std::int64_t> Stages::layers(const Configuration& c, const ScheduleFacts& facts) {
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

LayerSeconds Stages::stage_seconds(const Configuration& c, const LayerPrices& p,
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

// What happens along dp once a step leaves stages as they are.
Configuration Stages::of_passes(const Configuration& c) const {
  Configuration same = c;
  if (!state_.adds_to_passes(c)) same.zero = 0, same.hsdp = 1;
  return same;
}

// Neighbours in the search share them.
const StageShape& Stages::shape(const Configuration& c) {
  const Configuration same = of_passes(c);
  if (!last_shape_ || !(same == last_shaped_)) {
    last_shape_ = std::make_unique<StageShape>(make_shape(c));
    last_shaped_ = same;
  }
  return *last_shape_;
}

StageShape Stages::make_shape(const Configuration& c) {
  StageShape s;
  const ScheduleFacts& facts = this->facts(c);
  s.facts = &facts;
  check(facts.problem.empty(), "a configuration's schedule was looked at before");
  const LayerPrices& p = prices(c);
  const ModelSpec& m = work_.model;
  s.layers = layers(c, facts);
  const std::int64_t dense_end = m.experts == Experts::none ? m.num_layers : m.num_dense_layers;
  std::vector<double> dense(s.layers.size());
  std::int64_t first = 0;
  s.stages.reserve(s.layers.size());
  for (std::size_t i = 0; i < s.layers.size(); ++i) {
    s.stages.push_back(stage_seconds(c, p, s.layers, i));
    dense[i] = real(std::clamp<std::int64_t>(dense_end - first, 0, s.layers[i]));
    first += s.layers[i];
  }
  s.sharing.resize(s.layers.size());
  if (state_.adds_to_passes(c)) {
    const auto unit = [&](const LayerSeconds& t, double common, double routed) {
      return state_.unit_adds(c, {common, routed}, t.forward.total(), t.backward());
    };
    const bool experts = m.num_expert_layers() > 0;
    const double dense_layer = unit(p.seconds.dense, p.counts.dense_layer, 0),
                 expert_layer = experts ? unit(p.seconds.experts, p.counts.expert_layer,
                                               p.counts.routed / (c.ep * c.etp))
                                        : 0;
    for (std::size_t i = 0; i < s.layers.size(); ++i)
      s.sharing[i] = dense[i] * dense_layer + (real(s.layers[i]) - dense[i]) * expert_layer;
    s.sharing.front() += unit(p.seconds.embedding, p.counts.embedding, 0);
    s.sharing.back() += unit(p.seconds.head, p.counts.head, 0);
  }
  s.ranks.reserve(facts.uses.size());
  s.counts.reserve(facts.uses.size());
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
  s.costs = simulation_costs(s.stages, s.sharing, work_.software, message_seconds(c), c.pp);
  bound(c, s);
  return s;
}

double Stages::exposed(const Configuration& c, const StageShape& s, std::size_t rank) const {
  double backward = 0, forward = 0;
  for (const StageUse& use : s.facts->uses[rank]) {
    const LayerSeconds& t = s.stages[static_cast<std::size_t>(use.stage)];
    backward += t.backward();
    forward += t.forward.total();
  }
  const double layers = std::max(1.0, s.ranks[rank].dense_layers + s.ranks[rank].expert_layers);
  return state_.exposed(c, s.counts[rank], layers, forward, backward);
}

// A rank ends no earlier than the passes before its first one and its own; the whole pipeline not before
// those after its last one too.
void Stages::bound(const Configuration& c, StageShape& s) const {
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

bool Stages::hands_over_parts(const Configuration& c) const {
  return c.tp > 1 && !c.shards_sequence() && work_.software.scatters_messages;
}

double Stages::message_bytes(const Configuration& c) {
  return prices(c).saved.boundary / (hands_over_parts(c) ? c.tp : 1);
}

double Stages::message_seconds(const Configuration& c) {
  if (c.pp == 1) return 0;
  const double message = ops_.message(message_bytes(c), pipeline_stride(c));
  if (!hands_over_parts(c)) return message;
  return message + ops_.collective(Verb::all_gather, prices(c).saved.boundary, c.tp, 1);
}

}  // namespace echelon
