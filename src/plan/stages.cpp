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

std::int64_t pipeline_stride(const Plan& c) { return c.mesh.num_ranks(); }

// `added`: to a microbatch's passes through each stage.
SimulationCosts simulation_costs(const std::vector<LayerSeconds>& stages, const std::vector<double>& added,
                                 const Software& software, double message, int pp) {
  SimulationCosts costs;
  costs.stages.clear();
  double all = 0, experts = 0;
  // Of a microbatch: a rank with several stages hands over in parts.
  const double handing =
      pp > 1 ? software.message_seconds * pp / real(static_cast<std::int64_t>(stages.size())) : 0;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const LayerSeconds& t = stages[i];
    costs.stages.push_back({t.forward.total() + added[i] / 3 + handing,
                            t.backward_input.total() + added[i] * 2 / 3 + handing,
                            t.backward_weight.total()});
    all += t.forward.total() + t.backward() + added[i] + 2 * handing;
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

// Where all of a rank's stages are alike each of these moments is the peak.
std::vector<RankShare::InFlight> in_flight(const ScheduleFacts& facts, std::size_t rank,
                                           const std::vector<std::int64_t>& layers,
                                           const std::vector<double>& dense) {
  const std::vector<StageUse>& uses = facts.uses[rank];
  const auto of = [&](std::size_t use) { return static_cast<std::size_t>(uses[use].stage); };
  bool are_alike = true;
  for (std::size_t i = 1; i < uses.size(); ++i)
    are_alike &= layers[of(i)] == layers[of(0)] && dense[of(i)] == dense[of(0)];
  std::vector<RankShare::InFlight> moments;
  if (are_alike) {
    const double stages = facts.peak[rank] / facts.stage_fraction;
    moments.push_back({stages * dense[of(0)], stages * (real(layers[of(0)]) - dense[of(0)])});
    return moments;
  }
  for (const HeldByStage& held : facts.held[rank]) {
    RankShare::InFlight now;
    for (std::size_t i = 0; i < uses.size(); ++i) {
      now.dense_layers += held[i] * dense[of(i)];
      now.expert_layers += held[i] * (real(layers[of(i)]) - dense[of(i)]);
    }
    const auto covers = [](const RankShare::InFlight& a, const RankShare::InFlight& b) {
      return a.dense_layers >= b.dense_layers && a.expert_layers >= b.expert_layers;
    };
    if (std::any_of(moments.begin(), moments.end(), [&](const auto& one) { return covers(one, now); }))
      continue;
    std::erase_if(moments, [&](const auto& one) { return covers(now, one); });
    moments.push_back(now);
  }
  return moments;
}

double largest_stage(const ParameterCounts& counts, const Plan& c, const RankShare& rank,
                     const std::vector<StageUse>& uses, const std::vector<std::int64_t>& layers,
                     const std::vector<double>& dense) {
  const auto all = [](const ShareCounts& share) { return share.common + share.routed; };
  double most = 0;
  for (const StageUse& use : uses) {
    const auto i = static_cast<std::size_t>(use.stage);
    RankShare stage;
    stage.dense_layers = dense[i];
    stage.expert_layers = real(layers[i]) - dense[i];
    stage.embedding = i == 0;
    stage.head = c.cuts_vocabulary() ? 1.0 / c.mesh.pp() : i + 1 == layers.size();
    stage.tied_copy = stage.head > 0 && rank.tied_copy;
    most = std::max(most, all(share_counts(counts, c, stage)));
  }
  return most / all(share_counts(counts, c, rank));
}

}  // namespace

Stages::Stages(const Workload& work)
    : work_(work),
      ops_(work.machine, work.software, work.precision),
      state_(work, ops_),
      programs_(work.plan.model) {
  if (!work.documents.empty()) documents_.emplace(work);
}

const PackedAttention* Stages::packed(const Plan& c) { return documents_ ? &documents_->of(c) : nullptr; }

// While the largest microbatch is in another stage than a rank's own the rank has nothing to do that takes as
// long: it waits for what that one has more than the others, once for each of the others' stages, of which
// chunks let it do others' work beside.
double Stages::uneven_microbatches(const Plan& c, const StageShape& s) {
  const PackedAttention* const documents = packed(c);
  if (documents == nullptr || c.mesh.pp() == 1) return 0;
  double attention = 0;
  for (const LayerSeconds& stage : s.stages) attention += stage.attention;
  const double others = (c.mesh.pp() - 1.0) / c.mesh.pp();
  return (documents->largest - 1) * attention * others / std::max(1, c.chunks);
}

const ScheduleFacts& Stages::facts(const Plan& c) {
  return shelf_.facts(c.mesh.pp() == 1 ? "1f1b" : c.schedule, c.mesh.pp(),
                      static_cast<int>(num_microbatches(c)), c.chunks > 1 ? c.chunks : 0);
}

const Schedule& Stages::schedule(const Plan& c) {
  if (c.cuts_vocabulary()) {
    if (!last_cut_schedule_ || !same_passes(c, last_cut_)) {
      Plan plan = c;
      plan.layers_per_stage = shape(c).layers;
      plan.balance_layers = false;
      last_cut_schedule_ = PipelineLayout(plan).programs(0).schedule();
      last_cut_ = c;
    }
    return *last_cut_schedule_;
  }
  return shelf_.schedule(c.mesh.pp() == 1 ? "1f1b" : c.schedule, c.mesh.pp(),
                         static_cast<int>(num_microbatches(c)), c.chunks > 1 ? c.chunks : 0);
}

std::string Stages::schedule_problem(const Plan& c) {
  if (c.mesh.pp() > 1 && is_stream(c.schedule))
    return c.schedule + ": does not flush, so it trains otherwise than the others";
  const ScheduleFacts& facts = this->facts(c);
  if (!facts.problem.empty()) return facts.problem;
  if (c.cuts_vocabulary() && !facts.vocabulary_problem.empty())
    return fmt::format("{} with vocabulary parallelism: {}", c.schedule, facts.vocabulary_problem);
  auto refusal = stages_refusal(c, facts.num_stages);
  if (!refusal && c.recompute.kinds().size() > 1) {
    std::vector<std::vector<int>> stages_of;
    for (const auto& uses : facts.uses)
      for (auto& held = stages_of.emplace_back(); const StageUse& use : uses) held.push_back(use.stage);
    refusal = copies_refusal(c, stages_of);
  }
  if (!refusal && facts.num_stages > c.model.num_layers && c.layers_per_stage.empty())
    return fmt::format("{}: {} stages, and the model has {} layers: a stage without layers is not priced",
                       c.schedule, facts.num_stages, c.model.num_layers);
  return refusal ? sentence(c, *refusal) : "";
}

bool Stages::splits_evenly(const Plan& c) {
  const ScheduleFacts& facts = this->facts(c);
  const auto balanced = layers(c, facts, rank_prices(c));
  for (std::size_t s = 0; s < balanced.size(); ++s)
    if (balanced[s] != split_range(c.model.num_layers, facts.num_stages, static_cast<std::int64_t>(s)).size())
      return false;
  return true;
}

std::vector<const LayerPrices*> Stages::rank_prices(const Plan& c) {
  std::vector<const LayerPrices*> all(static_cast<std::size_t>(c.mesh.pp()), &prices(c, c.recompute.of(0)));
  for (std::size_t r = 1; r < all.size() && c.recompute.kinds().size() > 1; ++r)
    all[r] = &prices(c, c.recompute.of(static_cast<int>(r)));
  return all;
}

const LayerPrices& Stages::prices(const Plan& c, const Recompute& recompute) {
  const PriceKey key{c.mesh.tp(),
                     c.mesh.cp(),
                     static_cast<int>(c.context_kind),
                     c.mesh.ep,
                     c.mesh.expert_cut(),
                     c.cuts_vocabulary() ? c.mesh.pp() : 1,
                     c.shards_sequence(),
                     recompute_name(recompute),
                     c.micro_batch,
                     documents_ ? documents_->key(c) : PackedDocuments::Key{}};
  const auto found = prices_.find(key);
  if (found != prices_.end()) return found->second;
  LayerPrices p;
  if (!counts_.contains(c.mesh.tp())) counts_[c.mesh.tp()] = parameter_counts(c.model, c.mesh.tp());
  p.counts = counts_.at(c.mesh.tp());
  const double kept = kept_experts(work_.expert_load, c.mesh);
  p.counts.routed *= kept;
  p.counts.head_routed *= kept;
  p.saved = saved_bytes(work_, c, recompute);
  p.seconds = model_seconds(work_, c, recompute, ops_, programs_, packed(c));
  return prices_.emplace(key, std::move(p)).first->second;
}

std::vector<std::int64_t> Stages::layers(const Plan& c, const ScheduleFacts& facts,
                                         const std::vector<const LayerPrices*>& prices) const {
  const std::int64_t total = c.model.num_layers;
  if (!c.layers_per_stage.empty()) return c.layers_per_stage;
  const auto stages = static_cast<std::size_t>(facts.num_stages);
  std::vector<std::int64_t> layers(stages);
  for (std::size_t s = 0; s < stages; ++s)
    layers[s] = split_range(total, facts.num_stages, static_cast<std::int64_t>(s)).size();
  if (!c.balance_layers || stages == 1) return layers;
  // The ends have work beside their layers: a layer moves away from an end for as long as the slowest stage
  // gets faster by it.
  const ModelSeconds& t = prices.front()->seconds;
  std::vector<double> extra(stages, 0), cost(stages, 0);  // of a layer
  for (std::size_t r = 0; r < facts.uses.size(); ++r)
    for (const StageUse& use : facts.uses[r]) {
      const ModelSeconds& of_rank = prices[r]->seconds;
      const LayerSeconds& layer = c.model.num_expert_layers() > 0 ? of_rank.experts : of_rank.dense;
      cost[static_cast<std::size_t>(use.stage)] = layer.forward.total() + layer.backward();
    }
  extra.front() += t.embedding.forward.total() + t.embedding.backward();
  // A part of the output layer is on every rank.
  const std::vector<LayerSeconds> ends =
      c.cuts_vocabulary() ? std::vector{t.norm} : std::vector{t.head, t.loss};
  for (const LayerSeconds& end : ends) extra.back() += end.forward.total() + end.backward();
  const auto work = [&](std::size_t s) { return real(layers[s]) * cost[s] + extra[s]; };
  for (std::int64_t moves = 0; moves < total; ++moves) {
    std::size_t most = 0, least = 0;
    for (std::size_t s = 1; s < stages; ++s) {
      if (work(s) > work(most)) most = s;
      if (work(s) + cost[s] < work(least) + cost[least]) least = s;
    }
    if (layers[most] <= 1 || work(least) + cost[least] >= work(most) * (1 - 1e-9)) break;
    --layers[most];
    ++layers[least];
  }
  return layers;
}

LayerSeconds Stages::stage_seconds(const Plan& c, const LayerPrices& p,
                                   const std::vector<std::int64_t>& layers, std::size_t stage) const {
  const ModelSpec& m = c.model;
  const auto at = layers.begin() + static_cast<std::ptrdiff_t>(stage);
  const std::int64_t first = std::accumulate(layers.begin(), at, std::int64_t{0});
  const std::int64_t dense_end = m.experts == Experts::none ? m.num_layers : m.num_dense_layers;
  const double dense = real(std::clamp<std::int64_t>(dense_end - first, 0, *at));
  LayerSeconds sum = p.seconds.dense * dense;
  sum += p.seconds.experts * (real(*at) - dense);
  if (stage == 0) sum += p.seconds.embedding;
  if (c.cuts_vocabulary()) {
    if (stage + 1 == layers.size()) sum += p.seconds.norm;
    return sum;
  }
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
bool Stages::same_passes(const Plan& a, const Plan& b) const {
  const auto sharing = [&](const Plan& c) {
    return state_.adds_to_passes(c) ? std::tuple{c.zero, c.hsdp, c.offload} : std::tuple{0, 1, Offload::none};
  };
  return a.mesh == b.mesh && a.micro_batch == b.micro_batch && a.schedule == b.schedule &&
         a.chunks == b.chunks && a.vocabulary_parallel == b.vocabulary_parallel &&
         a.balance_layers == b.balance_layers && a.layers_per_stage == b.layers_per_stage &&
         a.offloads_activations() == b.offloads_activations() && a.recompute == b.recompute &&
         a.context_kind == b.context_kind && a.context_balance == b.context_balance &&
         a.sequence_parallel == b.sequence_parallel &&
         sharing(a) == sharing(b);
}

// Neighbours in the search share them.
const StageShape& Stages::shape(const Plan& c) {
  if (!last_shape_ || !same_passes(c, last_shaped_)) {
    last_shape_ = std::make_unique<StageShape>(make_shape(c));
    last_shaped_ = c;
  }
  return *last_shape_;
}

StageShape Stages::make_shape(const Plan& c) {
  StageShape s;
  const ScheduleFacts& facts = this->facts(c);
  s.facts = &facts;
  check(facts.problem.empty(), "a configuration's schedule was looked at before");
  s.prices = rank_prices(c);
  const LayerPrices& first_prices = *s.prices.front();
  const ModelSpec& m = c.model;
  s.layers = layers(c, facts, s.prices);
  std::vector<const LayerPrices*> stage_prices(s.layers.size());
  for (std::size_t r = 0; r < facts.uses.size(); ++r)
    for (const StageUse& use : facts.uses[r]) stage_prices[static_cast<std::size_t>(use.stage)] = s.prices[r];
  const std::int64_t dense_end = m.experts == Experts::none ? m.num_layers : m.num_dense_layers;
  std::vector<double> dense(s.layers.size());
  std::int64_t first = 0;
  s.stages.reserve(s.layers.size());
  for (std::size_t i = 0; i < s.layers.size(); ++i) {
    s.stages.push_back(stage_seconds(c, *stage_prices[i], s.layers, i));
    dense[i] = real(std::clamp<std::int64_t>(dense_end - first, 0, s.layers[i]));
    first += s.layers[i];
  }
  s.sharing.resize(s.layers.size());
  for (std::size_t i = 0; i < s.layers.size(); ++i) {
    const SavedBytes& saved = stage_prices[i]->saved;
    const ModelSeconds& t = stage_prices[i]->seconds;
    const double experts = real(s.layers[i]) - dense[i];
    const auto layer = [&](double bytes, const LayerSeconds& of) {
      return state_.activations(c, bytes, of.forward.total(), of.backward());
    };
    s.saved.push_back(dense[i] * saved.dense_layer + experts * saved.expert_layer);
    s.to_host.push_back(dense[i] * layer(saved.dense_layer, t.dense) +
                        experts * layer(saved.expert_layer, t.experts));
  }
  if (state_.adds_to_passes(c)) {
    const auto unit = [&](const LayerSeconds& t, double common, double routed) {
      return state_.unit_adds(c, {common, routed}, t.forward.total(), t.backward());
    };
    const ParameterCounts& counts = first_prices.counts;
    for (std::size_t i = 0; i < s.layers.size(); ++i) {
      const ModelSeconds& t = stage_prices[i]->seconds;
      const double experts = real(s.layers[i]) - dense[i];
      if (dense[i] > 0) s.sharing[i] += dense[i] * unit(t.dense, counts.dense_layer, 0);
      if (experts > 0)
        s.sharing[i] += experts * unit(t.experts, counts.expert_layer, counts.routed / c.mesh.expert_ranks());
    }
    s.sharing.front() += unit(first_prices.seconds.embedding, counts.embedding, 0);
    if (c.cuts_vocabulary())
      s.part_sharing = unit(first_prices.seconds.part, counts.head / c.mesh.pp(), 0);
    else
      s.sharing.back() += unit(first_prices.seconds.head, counts.head, 0);
  }
  s.ranks.reserve(facts.uses.size());
  s.counts.reserve(facts.uses.size());
  for (std::size_t r = 0; r < facts.uses.size(); ++r) {
    RankShare share;
    for (const StageUse& use : facts.uses[r]) {
      const auto i = static_cast<std::size_t>(use.stage);
      share.dense_layers += dense[i];
      share.expert_layers += real(s.layers[i]) - dense[i];
      share.embedding |= i == 0;
      if (i + 1 == s.layers.size()) share.head = 1;
    }
    if (c.cuts_vocabulary()) share.head = 1.0 / c.mesh.pp();
    share.tied_copy = (m.tied_embedding || m.num_mtp_layers > 0) && share.head > 0 && !share.embedding;
    share.largest_stage = largest_stage(first_prices.counts, c, share, facts.uses[r], s.layers, dense);
    share.in_flight = in_flight(facts, r, s.layers, dense);
    s.ranks.push_back(share);
    s.counts.push_back(share_counts(first_prices.counts, c, share));
  }
  std::vector<double> added;
  for (std::size_t i = 0; i < s.layers.size(); ++i) added.push_back(s.sharing[i] + s.to_host[i]);
  s.costs = simulation_costs(s.stages, added, work_.software, message_seconds(c), c.mesh.pp());
  if (c.cuts_vocabulary()) {
    s.part = first_prices.seconds.part;
    s.costs->vocabulary_part = {s.part->forward.total() + s.part_sharing, 0, s.part->backward_weight.total()};
  }
  bound(c, s);
  return s;
}

double Stages::exposed(const Plan& c, const StageShape& s, std::size_t rank) const {
  double backward = 0, forward = 0;
  for (const StageUse& use : s.facts->uses[rank]) {
    const LayerSeconds& t = s.stages[static_cast<std::size_t>(use.stage)];
    backward += t.backward();
    forward += t.forward.total();
  }
  const double layers = std::max(1.0, s.ranks[rank].dense_layers + s.ranks[rank].expert_layers);
  return state_.exposed(c, s.counts[rank], layers, forward, backward) +
         state_.copies(c, s.counts[rank]).seconds;
}

// A rank ends no earlier than the passes before its first one and its own; the whole pipeline not before
// those after its last one too.
void Stages::bound(const Plan& c, StageShape& s) const {
  const ScheduleFacts& facts = *s.facts;
  const double microbatches = real(num_microbatches(c));
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
    // V may come first of what is behind a rank's first pass, and VW behind its last.
    const StageTimes& part = s.costs->vocabulary_part;
    const double parts = microbatches * (part.forward + part.backward_weight);
    double work = 0, first = 1e300, last = 1e300;
    for (const StageUse& use : uses) {
      const auto i = static_cast<std::size_t>(use.stage);
      const StageTimes& t = s.costs->stages[i];
      work += use.share * microbatches * factor * (t.forward + t.backward_input + t.backward_weight);
      first = std::min(first, before[i]);
      last = std::min(last, behind[i]);
    }
    s.least_end.push_back(first + work + parts);
    s.least_pipeline =
        std::max({s.least_pipeline, first + work + (facts.splits_backward ? 0 : last), s.least_end.back()});
  }
}

bool Stages::hands_over_parts(const Plan& c) const {
  return c.mesh.tp() > 1 && !c.shards_sequence() && work_.software.scatters_messages;
}

double Stages::message_bytes(const Plan& c) {
  return prices(c, c.recompute.of(0)).saved.boundary / (hands_over_parts(c) ? c.mesh.tp() : 1);
}

double Stages::message_seconds(const Plan& c) {
  if (c.mesh.pp() == 1) return 0;
  const double message = ops_.message(message_bytes(c), pipeline_stride(c));
  if (!hands_over_parts(c)) return message;
  return message +
         ops_.collective(Verb::all_gather, prices(c, c.recompute.of(0)).saved.boundary, c.mesh.tp(), 1);
}

}  // namespace echelon
