#include "plan/stages.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/real.h"
#include "base/units.h"
#include "schedule/balance.h"
#include "schedule/pipeline_layout.h"
#include "schedule/schedules.h"

namespace echelon {
namespace {

RankGroups along_pipeline(const Plan& c) {
  return {c.mesh.pp(), c.mesh.num_ranks() / c.mesh.pp(), c.mesh.num_ranks()};
}

// The pairs of ranks at the same place of two pipeline ranks.
RankGroups between_stages(const Plan& c, std::size_t one, std::size_t other, std::int64_t at_once) {
  const std::int64_t ranks = c.mesh.num_ranks(), stage = ranks / c.mesh.pp();
  const auto [first, last] = std::minmax({static_cast<std::int64_t>(one), static_cast<std::int64_t>(other)});
  return {2, (last - first) * stage, ranks, stage, first * stage, at_once};
}

// `added`: seconds added to a microbatch's passes through each stage.
SimulationCosts simulation_costs(const std::vector<LayerSeconds>& stages, const std::vector<double>& added,
                                 const Software& software, double message, int pp) {
  SimulationCosts costs;
  costs.stages.clear();
  double all = 0, experts = 0, hideable = 0;
  // For each microbatch: a rank with several stages spends it in parts, one for each stage.
  const double handing =
      pp > 1 ? software.message_seconds * pp / real(static_cast<std::int64_t>(stages.size())) : 0;
  for (std::size_t i = 0; i < stages.size(); ++i) {
    const LayerSeconds& t = stages[i];
    costs.stages.push_back({t.forward.total() + added[i] / 3 + handing,
                            t.backward_input.total() + added[i] * 2 / 3 + handing,
                            t.backward_weight.total()});
    all += t.forward.total() + t.backward() + added[i] + 2 * handing;
    experts += t.forward.expert + t.backward_input.expert;
    hideable += t.hideable;
  }
  costs.message = message;
  // Passes that run together hide the experts' all-to-all, which is the purpose of DualPipe; tp's collectives
  // cannot be hidden, since they are between products that depend on each other. What passes wait for the
  // host stays: it launches the kernels of both.
  if (all > 0) {
    const double slower = added_seconds(all - experts, experts, software.overlap_slowdown);
    costs.overlap_factor = std::min(1.0, (all - hideable + slower) / all);
  }
  return costs;
}

// The moments at which a rank may hold most. Stages of a rank with the same layers are counted together. If W
// needs as much as F keeps, that is all that counts.
std::vector<RankShare::InFlight> held_by_rank(const ScheduleFacts& facts, std::size_t rank,
                                              const std::vector<PerKind>& layers, bool of_this_trainer) {
  const std::vector<StageUse>& uses = facts.uses[rank];
  std::vector<const PerKind*> alike;  // the layers of stages, without repetitions
  std::vector<std::size_t> place;     // of each use, in `alike`
  for (const StageUse& use : uses) {
    const PerKind& own = layers[static_cast<std::size_t>(use.stage)];
    const bool is_first = use.stage == 0;  // it also has the embedding
    const auto same = std::find_if(alike.begin(), alike.end(), [&](const PerKind* one) {
      return *one == own && !(of_this_trainer && (is_first || one == &layers.front()));
    });
    place.push_back(static_cast<std::size_t>(same - alike.begin()));
    if (same == alike.end()) alike.push_back(&own);
  }
  std::vector<HeldByStage> most;
  for (const HeldByStage& held : facts.held[rank]) {
    HeldByStage now(alike.size());
    for (std::size_t i = 0; i < uses.size(); ++i) {
      now[place[i]].whole += held[i].whole;
      (of_this_trainer ? now[place[i]].weight_input : now[place[i]].whole) += held[i].weight_input;
      if (of_this_trainer) now[place[i]].gradients += held[i].gradients;
    }
    if (std::any_of(most.begin(), most.end(), [&](const auto& one) { return covers(one, now); })) continue;
    std::erase_if(most, [&](const auto& one) { return covers(now, one); });
    most.push_back(std::move(now));
  }
  std::vector<RankShare::InFlight> moments;
  for (const HeldByStage& held : most) {
    RankShare::InFlight& now = moments.emplace_back();
    for (std::size_t i = 0; i < alike.size(); ++i)
      for (std::size_t k = 0; k < most_layer_kinds; ++k) {
        now.layers[k] += held[i].whole * (*alike[i])[k];
        now.waiting[k] += held[i].weight_input * (*alike[i])[k];
        now.with_gradients[k] += held[i].gradients * (*alike[i])[k];
        now.embedding_gradient |= held[i].gradients > 0 && alike[i] == &layers.front();
      }
  }
  return moments;
}

// The first and the last stage have work besides their layers: a layer moves away from them as long as that
// makes the slowest stage faster. All layers count as those of the last kind.
std::vector<std::int64_t> moved_from_ends(std::vector<std::int64_t> layers, std::size_t kind,
                                          const std::vector<PerKind>& cost,
                                          const std::vector<double>& extra) {
  const std::int64_t total = std::accumulate(layers.begin(), layers.end(), std::int64_t{0});
  const auto work = [&](std::size_t s) { return real(layers[s]) * cost[s][kind] + extra[s]; };
  for (std::int64_t moves = 0; moves < total; ++moves) {
    std::size_t most = 0, least = 0;
    for (std::size_t s = 1; s < layers.size(); ++s) {
      if (work(s) > work(most)) most = s;
      if (work(s) + cost[s][kind] < work(least) + cost[least][kind]) least = s;
    }
    if (layers[most] <= 1 || work(least) + cost[least][kind] >= work(most) * (1 - 1e-9)) break;
    --layers[most];
    ++layers[least];
  }
  return layers;
}

// If layers of several kinds alternate: the split whose slowest stage is fastest. Stages are filled from the
// last one on, since the first ones hold more microbatches.
std::vector<std::int64_t> balanced(const LayersByKind& by_kind, const std::vector<PerKind>& cost,
                                   const std::vector<double>& extra) {
  const auto stages = static_cast<std::int64_t>(cost.size()), total = by_kind.num_layers();
  std::vector<std::int64_t> layers(cost.size());
  const auto fits = [&](double most) {
    std::int64_t end = total;
    for (std::int64_t stage = stages - 1; stage >= 0; --stage) {
      const auto s = static_cast<std::size_t>(stage);
      double work = extra[s];
      std::int64_t begin = end;
      // Leaves at least one layer for each stage before it.
      while (begin > stage && (begin == end || work + cost[s][by_kind.of(begin - 1)] <= most))
        work += cost[s][by_kind.of(--begin)];
      layers[s] = end - begin;
      if (work > most || begin == end) return false;
      end = begin;
    }
    return end == 0;
  };
  double low = 0, high = 0;
  for (std::size_t s = 0; s < cost.size(); ++s)
    high = std::max(high, extra[s] + real(total) * *std::max_element(cost[s].begin(), cost[s].end()));
  constexpr int halvings = 40;
  for (int i = 0; i < halvings; ++i) {
    const double middle = (low + high) / 2;
    (fits(middle) ? high : low) = middle;
  }
  check(fits(high), "a model's layers can be split over its stages");
  return layers;
}

// Whether each rank has two stages, equally far from the two ends.
bool is_v(const ScheduleFacts& facts) {
  return std::all_of(facts.uses.begin(), facts.uses.end(), [&](const std::vector<StageUse>& uses) {
    return uses.size() == 2 && uses[0].stage + uses[1].stage + 1 == facts.num_stages;
  });
}

double largest_stage(const ParameterCounts& counts, const Plan& c, const RankShare& rank,
                     const std::vector<StageUse>& uses, const std::vector<PerKind>& layers) {
  const auto all = [](const ShareCounts& share) { return share.common + share.routed; };
  double most = 0;
  for (const StageUse& use : uses) {
    const auto i = static_cast<std::size_t>(use.stage);
    RankShare stage;
    stage.layers = layers[i];
    stage.embedding = i == 0;
    stage.head = c.cuts_vocabulary() ? 1.0 / c.mesh.pp() : i + 1 == layers.size();
    stage.tied_copy = stage.head > 0 && rank.tied_copy;
    most = std::max(most, all(share_counts(counts, c, stage)));
  }
  return most / all(share_counts(counts, c, rank));
}

}  // namespace

Stages::Stages(const Workload& work, std::shared_ptr<ScheduleShelf> shelf)
    : work_(work),
      ops_(work.machine, work.software, work.precision),
      wide_ops_(work.machine, work.software, wide_precision(work.precision)),
      state_(work, ops_),
      programs_(work.plan.model),
      shelf_(std::move(shelf)) {
  if (!work.documents.empty()) documents_.emplace(work);
}

const PackedAttention* Stages::packed(const Plan& c) { return documents_ ? &documents_->of(c) : nullptr; }

// While the largest microbatch is in another rank's stage, a rank has no work of the same length: it waits
// for the excess of that microbatch over the others, once for each of the other ranks' stages. With chunks it
// has other work to do meanwhile.
double Stages::uneven_microbatches(const Plan& c, const StageShape& s) {
  const PackedAttention* const documents = packed(c);
  if (documents == nullptr || c.mesh.pp() == 1) return 0;
  double attention = 0;
  for (const LayerSeconds& stage : s.stages) attention += stage.attention;
  const double others = (c.mesh.pp() - 1.0) / c.mesh.pp();
  return (documents->largest - 1) * attention * others / std::max(1, c.chunks);
}

const ScheduleFacts& Stages::facts(const Plan& c) {
  return shelf_->facts(c.mesh.pp() == 1 ? "1f1b" : c.schedule, c.mesh.pp(),
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
  return shelf_->schedule(c.mesh.pp() == 1 ? "1f1b" : c.schedule, c.mesh.pp(),
                          static_cast<int>(num_microbatches(c)), c.chunks > 1 ? c.chunks : 0);
}

std::string Stages::schedule_problem(const Plan& c) {
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
    return fmt::format("{}: {}, and the model has {}: a stage without layers is not priced", c.schedule,
                       counted(facts.num_stages, "stage"), counted(c.model.num_layers, "layer"));
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

const Stages::Priced& Stages::priced(const Plan& c, const Recompute& recompute) {
  const auto kind = std::find(recomputed_.begin(), recomputed_.end(), recompute);
  const auto place = static_cast<std::size_t>(kind - recomputed_.begin());
  if (kind == recomputed_.end()) recomputed_.push_back(recompute);
  const MeshKey key{c.mesh.tp(),
                    c.mesh.cp(),
                    static_cast<int>(c.context_kind),
                    c.mesh.ep,
                    c.mesh.expert_cut(),
                    c.cuts_vocabulary() ? c.mesh.pp() : 1,
                    c.shards_sequence(),
                    documents_ ? documents_->key(c) : PackedDocuments::Key{}};
  if (last_priced_ == nullptr || last_priced_->first != key) last_priced_ = &*prices_.try_emplace(key).first;
  OfMesh& of_mesh = last_priced_->second;
  const auto at = std::lower_bound(of_mesh.begin(), of_mesh.end(), std::pair{c.micro_batch, place},
                                   [](const Priced& one, const auto& asked) {
                                     return std::pair{one.micro_batch, one.recompute} < asked;
                                   });
  if (at != of_mesh.end() && at->micro_batch == c.micro_batch && at->recompute == place) return *at;
  auto made = std::make_unique<LayerPrices>();
  LayerPrices& p = *made;
  if (!counts_.contains(c.mesh.tp()))
    counts_[c.mesh.tp()] = parameter_counts(c.model, c.mesh.tp(), work_.plan.optimizer);
  p.counts = counts_.at(c.mesh.tp());
  if (!work_.software.is_this_trainer) p.counts.repeated = {};  // see Software::tensor_repeats_heads
  const double kept = kept_experts(work_.expert_load, c.mesh);
  for (double& routed : p.counts.routed) routed *= kept;
  p.counts.head_routed *= kept;
  p.saved = saved_bytes(work_, c, recompute);
  p.seconds = model_seconds(work_, c, recompute, ops_, wide_ops_, programs_, packed(c));
  const ModelTotals totals = totals_of(c, p);
  return *of_mesh.insert(at, {c.micro_batch, place, totals, std::move(made)});
}

ModelTotals Stages::totals_of(const Plan& c, const LayerPrices& p) const {
  LayerSeconds t;
  const PerKind layers = by_kind().all();
  for (std::size_t k = 0; k < most_layer_kinds; ++k) t += p.seconds.layer[k] * layers[k];
  t += p.seconds.embedding;
  if (c.cuts_vocabulary()) {
    t += p.seconds.norm;
    t += p.seconds.part * c.mesh.pp();
  } else {
    t += p.seconds.head;
    t += p.seconds.loss;
  }
  double working = 1e300;
  for (std::size_t k = 0; k < by_kind().kinds().size(); ++k) working = std::min(working, p.saved.working[k]);
  return {t.forward.total() + t.backward(), t.forward.expert + t.backward_input.expert, working};
}

std::vector<std::int64_t> Stages::layers(const Plan& c, const ScheduleFacts& facts,
                                         const std::vector<const LayerPrices*>& prices) {
  const std::int64_t total = c.model.num_layers;
  if (!c.layers_per_stage.empty()) return c.layers_per_stage;
  const auto stages = static_cast<std::size_t>(facts.num_stages);
  std::vector<std::int64_t> layers(stages);
  for (std::size_t s = 0; s < stages; ++s)
    layers[s] = split_range(total, facts.num_stages, static_cast<std::int64_t>(s)).size();
  if (!c.balance_layers || stages == 1) return layers;
  const ModelSeconds& t = prices.front()->seconds;
  std::vector<double> extra(stages, 0);
  std::vector<PerKind> cost(stages);  // of a layer of each kind
  for (std::size_t r = 0; r < facts.uses.size(); ++r)
    for (const StageUse& use : facts.uses[r])
      for (std::size_t k = 0; k < most_layer_kinds; ++k) {
        const LayerSeconds& layer = prices[r]->seconds.layer[k];
        cost[static_cast<std::size_t>(use.stage)][k] = layer.forward.total() + layer.backward();
      }
  extra.front() += t.embedding.forward.total() + t.embedding.backward();
  // A cut output layer has a part on every rank.
  const std::vector<LayerSeconds> ends =
      c.cuts_vocabulary() ? std::vector{t.norm} : std::vector{t.head, t.loss};
  for (const LayerSeconds& end : ends) extra.back() += end.forward.total() + end.backward();
  if (is_v(facts)) return balanced_v(facts, prices, extra);
  return by_kind().are_mixed()
             ? balanced(by_kind(), cost, extra)
             : moved_from_ends(std::move(layers), by_kind().kinds().size() - 1, cost, extra);
}

const std::vector<std::int64_t>& Stages::balanced_v(const ScheduleFacts& facts,
                                                    const std::vector<const LayerPrices*>& prices,
                                                    const std::vector<double>& extra) {
  std::vector<std::vector<StagePart>> ranks;
  for (const auto& uses : facts.uses) {
    auto& own = ranks.emplace_back();
    for (const StageUse& use : uses) own.push_back({static_cast<std::size_t>(use.stage), use.share});
  }
  const auto [found, is_new] = balanced_v_.try_emplace({prices, ranks});
  if (!is_new) return found->second;
  StageCosts costs{{}, std::vector<std::size_t>(extra.size()), extra};
  std::vector<const LayerPrices*> listed;  // those whose layer costs are listed
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const auto at = std::find(listed.begin(), listed.end(), prices[r]);
    const auto list = static_cast<std::size_t>(at - listed.begin());
    if (at == listed.end()) {
      listed.push_back(prices[r]);
      std::vector<double>& of_layers = costs.layers.emplace_back();
      for (std::int64_t k = 0; k < by_kind().num_layers(); ++k) {
        const LayerSeconds& layer = prices[r]->seconds.layer[by_kind().of(k)];
        of_layers.push_back(layer.forward.total() + layer.backward());
      }
    }
    for (const StagePart& part : ranks[r]) costs.of_stage[part.stage] = list;
  }
  return found->second = balance_layers(ranks, costs).layers;
}

LayerSeconds Stages::stage_seconds(const Plan& c, const LayerPrices& p,
                                   const std::vector<std::int64_t>& layers, const PerKind& by_kind,
                                   std::size_t stage) const {
  LayerSeconds sum;
  for (std::size_t k = 0; k < most_layer_kinds; ++k)
    if (by_kind[k] > 0) sum += p.seconds.layer[k] * by_kind[k];
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
    // Logits are sent over and their gradient returns while both ends compute; neither end can be faster than
    // these messages.
    const double waiting =
        ops_.message(p.saved.logits, along_pipeline(c)) - sum.forward.total() - sum.backward();
    sum.forward.compute += std::max(0.0, waiting) / 3;
    sum.backward_input.compute += std::max(0.0, waiting) * 2 / 3;
  }
  return sum;
}

bool Stages::same_holdings(const Plan& a, const Plan& b) const {
  return a.mesh == b.mesh && a.micro_batch == b.micro_batch && a.schedule == b.schedule &&
         a.chunks == b.chunks && a.vocabulary_parallel == b.vocabulary_parallel &&
         a.balance_layers == b.balance_layers && a.layers_per_stage == b.layers_per_stage &&
         a.recompute == b.recompute && a.context_kind == b.context_kind &&
         a.context_balance == b.context_balance && a.sequence_parallel == b.sequence_parallel;
}

// Communication along dp once a step does not change the stages.
bool Stages::same_passes(const Plan& a, const Plan& b) const {
  const auto sharing = [&](const Plan& c) {
    return state_.adds_to_passes(c) ? std::tuple{c.zero, c.hsdp, c.offload} : std::tuple{0, 1, Offload::none};
  };
  return same_holdings(a, b) && a.offloads_activations() == b.offloads_activations() &&
         sharing(a) == sharing(b);
}

// Plans that are neighbours in the search share them.
const StageHoldings& Stages::holdings(const Plan& c) {
  if (!last_holdings_ || !same_holdings(c, last_held_)) {
    last_holdings_ = std::make_unique<StageHoldings>(make_holdings(c));
    last_held_ = c;
  }
  return *last_holdings_;
}

const StageShape& Stages::shape(const Plan& c) {
  if (!last_shape_ || !same_passes(c, last_shaped_)) {
    last_shape_ = std::make_unique<StageShape>(make_shape(c));
    last_shaped_ = c;
  }
  return *last_shape_;
}

const std::vector<std::vector<RankShare::InFlight>>& Stages::in_flight(const ScheduleFacts& facts,
                                                                       const StageHoldings& s) {
  auto& held = in_flight_[{&facts, s.layers}];
  for (std::size_t r = held.size(); r < facts.uses.size(); ++r)
    held.push_back(held_by_rank(facts, r, s.by_kind, work_.software.is_this_trainer));
  return held;
}

StageHoldings Stages::make_holdings(const Plan& c) {
  StageHoldings s;
  const ScheduleFacts& facts = this->facts(c);
  s.facts = &facts;
  check(facts.problem.empty(), "a configuration's schedule was looked at before");
  s.prices = rank_prices(c);
  const ParameterCounts& counts = s.prices.front()->counts;
  s.layers = layers(c, facts, s.prices);
  s.by_kind.reserve(s.layers.size());
  std::int64_t first = 0;
  for (const std::int64_t layers : s.layers) {
    s.by_kind.push_back(by_kind().among(first, first + layers));
    first += layers;
  }
  s.ranks.reserve(facts.uses.size());
  s.counts.reserve(facts.uses.size());
  const auto& held = in_flight(facts, s);
  for (std::size_t r = 0; r < facts.uses.size(); ++r) {
    RankShare share;
    for (const StageUse& use : facts.uses[r]) {
      const auto i = static_cast<std::size_t>(use.stage);
      for (std::size_t k = 0; k < most_layer_kinds; ++k) share.layers[k] += s.by_kind[i][k];
      share.embedding |= i == 0;
      if (i + 1 == s.layers.size()) share.head = 1;
    }
    if (c.cuts_vocabulary()) share.head = 1.0 / c.mesh.pp();
    const ModelSpec& m = c.model;
    share.tied_copy = (m.tied_embedding || m.num_mtp_layers > 0) && share.head > 0 && !share.embedding;
    share.largest_stage = largest_stage(counts, c, share, facts.uses[r], s.by_kind);
    share.in_flight = held[r];
    for (RankShare::InFlight& now : share.in_flight) {
      if (!work_.software.is_this_trainer) break;  // others allocate all gradients at once
      RankShare made;
      made.layers = now.with_gradients;
      made.embedding = now.embedding_gradient || (m.tied_embedding && share.embedding && share.head > 0);
      made.tied_copy = share.tied_copy;
      made.head = share.head;
      now.gradients = share_counts(counts, c, made);
    }
    s.counts.push_back(share_counts(counts, c, share));
    s.ranks.push_back(std::move(share));
  }
  return s;
}

StageShape Stages::make_shape(const Plan& c) {
  StageShape s;
  static_cast<StageHoldings&>(s) = holdings(c);
  const ScheduleFacts& facts = *s.facts;
  const LayerPrices& first_prices = *s.prices.front();
  const ModelSpec& m = c.model;
  std::vector<const LayerPrices*> stage_prices(s.layers.size());
  for (std::size_t r = 0; r < facts.uses.size(); ++r)
    for (const StageUse& use : facts.uses[r]) stage_prices[static_cast<std::size_t>(use.stage)] = s.prices[r];
  s.stages.reserve(s.layers.size());
  for (std::size_t i = 0; i < s.layers.size(); ++i)
    s.stages.push_back(stage_seconds(c, *stage_prices[i], s.layers, s.by_kind[i], i));
  s.sharing.resize(s.layers.size());
  for (std::size_t i = 0; i < s.layers.size(); ++i) {
    const SavedBytes& saved = stage_prices[i]->saved;
    const ModelSeconds& t = stage_prices[i]->seconds;
    s.saved.push_back(product_sum(s.by_kind[i], saved.layer));
    s.to_host.push_back(0);
    for (std::size_t k = 0; k < most_layer_kinds; ++k)
      if (s.by_kind[i][k] > 0)
        s.to_host[i] += s.by_kind[i][k] * state_.activations(c, saved.layer[k], t.layer[k].forward.total(),
                                                             t.layer[k].backward());
  }
  if (state_.adds_to_passes(c)) {
    const auto unit = [&](const LayerSeconds& t, const ShareCounts& of) {
      return state_.unit_adds(c, of, t.forward.total(), t.backward());
    };
    const auto end = [&](const LayerSeconds& t, double elements) { return unit(t, {elements}); };
    const auto add = [&](std::size_t stage, double units, const StateSeconds::Added& of_unit) {
      s.sharing[stage] += units * (of_unit.seconds - of_unit.of_host);
      s.to_host[stage] += units * of_unit.of_host;
    };
    const ParameterCounts& counts = first_prices.counts;
    for (std::size_t i = 0; i < s.layers.size(); ++i) {
      const ModelSeconds& t = stage_prices[i]->seconds;
      for (std::size_t k = 0; k < most_layer_kinds; ++k)
        if (const double layers = s.by_kind[i][k]; layers > 0)
          add(i, layers,
              unit(t.layer[k], {counts.layer[k], counts.routed[k] / c.mesh.expert_ranks(), counts.layer[k]}));
    }
    // This trainer gathers a tied table once more.
    const double tied = work_.software.is_this_trainer && m.tied_embedding ? counts.tied : 0;
    add(0, 1, end(first_prices.seconds.embedding, counts.embedding));
    if (c.cuts_vocabulary())
      s.part_sharing = end(first_prices.seconds.part, counts.head / c.mesh.pp()).seconds;
    else
      add(s.layers.size() - 1, 1, end(first_prices.seconds.head, counts.head + tied));
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
  const double layers = std::max(1.0, sum_of(s.ranks[rank].layers));
  return state_.exposed(c, s.counts[rank], layers, forward, backward) +
         state_.copies(c, s.counts[rank]).seconds + in_pipeline(c, s, rank).seconds +
         state_.over_tp(c, s.counts[rank]).seconds;
}

StateSeconds::Copies Stages::in_pipeline(const Plan& c, const StageShape& s, std::size_t rank) const {
  StateSeconds::Copies sum;
  const std::size_t ranks = s.ranks.size();
  if (s.facts->parameter_copies == 2)  // all ranks of the pipeline sum at once
    return state_.of_same_stages(c, s.counts[rank],
                                 between_stages(c, rank, ranks - 1 - rank, c.mesh.num_ranks() / 2));
  const RankShare& own = s.ranks[rank];
  for (std::size_t r = 0; r < ranks && (own.embedding || own.tied_copy); ++r)
    if ((own.embedding && s.ranks[r].tied_copy) || (own.tied_copy && s.ranks[r].embedding)) {
      const auto [seconds, bytes] =
          state_.of_pairs(s.prices[rank]->counts.tied, between_stages(c, rank, r, 0));
      sum.seconds += seconds;
      sum.bytes += bytes;
    }
  return sum;
}

// A rank ends no earlier than the passes before its first one, plus its own passes; and the whole pipeline no
// earlier than after the passes that follow a rank's last one.
void Stages::bound(const Plan& c, StageShape& s) const {
  const ScheduleFacts& facts = *s.facts;
  const double microbatches = real(num_microbatches(c));
  // The fraction of their sum that passes take when they run together.
  const double factor = facts.overlaps ? std::min(1.0, s.costs->overlap_factor) : 1;
  std::vector<double> before(s.stages.size() + 1), behind(s.stages.size() + 1);
  for (std::size_t i = 0; i < s.stages.size(); ++i) {
    const StageTimes& t = s.costs->stages[i];
    before[i + 1] = before[i] + factor * t.forward + s.costs->message;
    // Separate weight gradients may come later.
    const double weights = facts.splits_backward ? 0 : t.backward_weight;
    behind[i + 1] = behind[i] + factor * (t.backward_input + weights) + s.costs->message;
  }
  for (const auto& uses : facts.uses) {
    // V may be the first work after a rank's first pass, and VW the last.
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
  const double message = ops_.message(message_bytes(c), along_pipeline(c));
  if (!hands_over_parts(c)) return message;
  return message + ops_.collective(Verb::all_gather, prices(c, c.recompute.of(0)).saved.boundary,
                                   {c.mesh.tp(), 1, c.mesh.num_ranks()});
}

}  // namespace echelon
