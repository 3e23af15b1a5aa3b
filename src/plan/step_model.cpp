#include "plan/step_model.h"

#include <algorithm>
#include <cmath>

#include "base/real.h"
#include "plan/interval.h"
#include "plan/memory.h"
#include "spec/plan_fields.h"

namespace echelon {
namespace {

// Rounds to 12 digits, so that plans with equal times compare as equal despite rounding.
double to_twelve_digits(double seconds) {
  if (!(seconds > 0) || !std::isfinite(seconds)) return seconds;
  const double unit = std::pow(10, 11 - std::floor(std::log10(seconds)));
  return std::round(seconds * unit) / unit;
}

// Whether two ranks run the same stage, as in DualPipe.
bool runs_the_same(const ScheduleFacts& facts, std::size_t a, std::size_t b) {
  return std::any_of(facts.uses[a].begin(), facts.uses[a].end(), [&](const StageUse& x) {
    return std::any_of(facts.uses[b].begin(), facts.uses[b].end(),
                       [&](const StageUse& y) { return x.stage == y.stage; });
  });
}

// Whether a layer's backward pass is more than one instruction, or runs together with another pass.
bool runs_apart(const Plan& c, const ScheduleFacts& facts) {
  return facts.overlaps || facts.splits_backward || c.cuts_vocabulary();
}

// Everything of a plan that determines its passes, but not their order.
std::string passes_key(const Plan& c) { return text_but({"schedule", "chunks", "layers-per-stage"}, c); }

// The least time of a pipeline however its layers are split, in passes of one microbatch through all stages.
// If each rank has one stage and backward passes are whole, a rank's M microbatches come after the first has
// passed the stages before it, and the way back through these comes after its last. With t_r the passes of
// stage r, of a sum of 1: t_0 + ... + t_(r-1) + M t_r <= the time. It is least if all are equal, so that what
// is left of it beside the stages so far shrinks by 1 - 1/M from stage to stage.
double fewest_passes(const Plan& c, const ScheduleFacts& facts) {
  const double microbatches = real(num_microbatches(c)), ranks = c.mesh.pp();
  const bool is_plain = facts.num_stages == c.mesh.pp() && !facts.splits_backward && !facts.overlaps;
  if (!is_plain || c.cuts_vocabulary()) return microbatches / ranks;
  return -1 / std::expm1(ranks * std::log1p(-1 / microbatches));
}

}  // namespace

StepModel::StepModel(Workload work, std::shared_ptr<ScheduleShelf> shelf)
    : work_(std::move(work)),
      stages_(work_, std::move(shelf)),
      walked_(work_),
      num_parameters_(num_parameters(work_.plan.model)) {}

// Of a microbatch through all stages, in seconds. Passes that run together may hide the experts' exchanges.
double StepModel::least_passes(const Plan& c, bool hides_exchanges) {
  double least = 1e300;
  for (const Recompute& kind : c.recompute.kinds()) {
    const ModelTotals all = stages_.totals(c, kind);
    least = std::min(least, all.passes - (hides_exchanges ? all.exchanged : 0));
  }
  return least;
}

double StepModel::least_seconds(const Plan& c) {
  return whole_step(c, real(num_microbatches(c)) * least_passes(c, c.mesh.pp() > 1) / c.mesh.pp());
}

double StepModel::least_scheduled_seconds(const Plan& c) {
  const ScheduleFacts& facts = stages_.facts(c);
  return whole_step(c, fewest_passes(c, facts) * least_passes(c, facts.overlaps));
}

double StepModel::least_at_work(const Plan& c) {
  const double least = stages_.totals(c, c.recompute.of(0)).working;
  // Passes of this trainer hold other values than those counted.
  return work_.software.is_this_trainer ? 0.5 * least : least;
}

Outlook StepModel::outlook(const Plan& c, double most_bytes, const Enough& enough) {
  Outlook look;
  const StageHoldings& held = stages_.holdings(c);
  for (std::size_t r = 0; r < held.ranks.size(); ++r) {
    const double bytes = rank_bytes(c, held, r);
    if (bytes <= look.bytes) continue;
    look.bytes = bytes;
    look.rank = static_cast<int>(r);
    look.in_flight = held.facts->peak[r];
    if (bytes > std::max(most_bytes, enough.bytes)) return look;
  }
  if (look.bytes > most_bytes) return look;
  const StageShape& s = stages_.shape(c);
  double latest = 0, least_behind = 1e300;
  look.seconds = whole_step(c, s.least_pipeline);
  for (std::size_t r = 0; r < s.ranks.size() && look.seconds <= enough.seconds; ++r) {
    const double behind = stages_.exposed(c, s, r) + stages_.state().optimizer(c, s.counts[r]);
    latest = std::max(latest, s.least_end[r] + behind);
    least_behind = std::min(least_behind, behind);
    look.seconds = whole_step(c, latest);
  }
  if (look.seconds > enough.seconds) return look;
  look.seconds = whole_step(c, std::max(latest, s.least_pipeline + least_behind));
  return look;
}

double StepModel::rank_bytes(const Plan& c, const StageHoldings& s, std::size_t rank) const {
  return real(footprint(work_, c, s.prices[rank]->counts, s.prices[rank]->saved, s.ranks[rank]).total());
}

std::vector<double> StepModel::rank_bytes(const Plan& c) {
  const StageHoldings& s = stages_.holdings(c);
  std::vector<double> bytes;
  for (std::size_t r = 0; r < s.ranks.size(); ++r) bytes.push_back(rank_bytes(c, s, r));
  return bytes;
}

double StepModel::kept_on_host(const Plan& c) {
  const OffloadedBytes off = offloaded_bytes(work_, c);
  const StageHoldings& s = stages_.holdings(c);
  double most = 0;
  for (std::size_t r = 0; r < s.ranks.size(); ++r)
    most = std::max(most, own_elements(c, s.counts[r]) * (off.value + off.gradient + off.optimizer) +
                              activations_on_host(c, s.prices[r]->saved, s.ranks[r]));
  return most;
}

double StepModel::least_bytes(const Plan& c) {
  using C = MemoryCategory;
  const StageHoldings& s = stages_.holdings(c);
  const bool is_apart = runs_apart(c, *s.facts);
  // Values and the optimizer's states are exactly as counted. Of what comes and goes with microbatches there
  // may be less; and when passes run together, one may free memory that the other uses. At the moment with
  // most kept, nothing need be gathered, or on its way between stages.
  const double kept_part = s.facts->overlaps ? 0.8 : 0.98;
  // If a layer's whole backward pass runs before anything that it uses is freed, its working memory is added.
  const double working_part = is_apart || c.offloads_activations() ? 0 : 0.6;
  double most = 0;
  for (std::size_t r = 0; r < s.ranks.size(); ++r) {
    SavedBytes saved = s.prices[r]->saved;
    double working = 1e300;
    for (std::size_t k = 0; k < most_layer_kinds; ++k)
      if (s.ranks[r].layers[k] > 0) working = std::min(working, saved.working[k]);
    if (working == 1e300) working = 0;  // a rank without layers
    saved.head = 0;
    saved.working = {};
    const Memory kept = footprint(work_, c, s.prices[r]->counts, saved, s.ranks[r]);
    most = std::max(most, real(kept[C::parameters] + kept[C::optimizer]) +
                              kept_part * real(kept[C::gradients] + kept[C::activations]) +
                              working_part * working);
  }
  return most;
}

double StepModel::least_as_walked(const Plan& c) {
  const StageHoldings& s = stages_.holdings(c);
  if (runs_apart(c, *s.facts)) return 0;
  const auto found = as_walked_.find(passes_key(c));
  if (found == as_walked_.end()) return 0;
  const auto is_no_less = [](const PerKind& a, const PerKind& b) {
    for (std::size_t k = 0; k < most_layer_kinds; ++k)
      if (a[k] < b[k]) return false;
    return true;
  };
  double most = 0;
  for (const WalkedRank& walked : found->second) {
    const RankShare& own = s.ranks[walked.rank];
    const RankShare& other = walked.share;
    if (own.layers != other.layers || own.embedding != other.embedding || own.head != other.head ||
        own.tied_copy != other.tied_copy)
      continue;
    const bool holds_all =
        std::all_of(other.in_flight.begin(), other.in_flight.end(), [&](const RankShare::InFlight& then) {
          return std::any_of(own.in_flight.begin(), own.in_flight.end(), [&](const RankShare::InFlight& now) {
            return is_no_less(now.layers, then.layers) &&
                   is_no_less(now.with_gradients, then.with_gradients) &&
                   now.embedding_gradient >= then.embedding_gradient;
          });
        });
    if (holds_all) most = std::max(most, walked.bytes);
  }
  return most;
}

std::vector<Recompute> StepModel::recompute_kinds() const {
  std::vector<Recompute> kinds{Recompute::none};
  const auto kept = [&](const Recompute& kind) {
    const SavedBytes saved = saved_bytes(work_, work_.plan, kind);
    return sum_of(saved.layer);
  };
  const auto add = [&](const Recompute& kind) {
    if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end() && kept(kind) < kept(Recompute::none))
      kinds.push_back(kind);
  };
  for (const std::string& name : recompute_names(work_.plan.model)) add(Recompute({name}));
  add(Recompute::full);
  return kinds;
}

std::optional<PipelineRecompute> StepModel::fitting_recompute(Plan c, const std::vector<Recompute>& kinds,
                                                              const std::vector<double>& most_bytes) {
  constexpr int most_rounds = 4;  // of splitting by cost; the final plan is judged like any other
  for (int round = 0; round < most_rounds; ++round) {
    const StageHoldings& s = stages_.holdings(c);
    const std::size_t ranks = s.ranks.size();
    std::vector<Recompute> chosen(ranks);
    for (std::size_t r = 0; r < ranks; ++r) {
      double least = 1e300;
      for (const Recompute& kind : kinds) {
        const LayerPrices& p = stages_.prices(c, kind);
        double seconds = 0;
        for (std::size_t k = 0; k < most_layer_kinds; ++k)
          seconds += s.ranks[r].layers[k] * p.seconds.layer[k].backward();
        if (seconds >= least) continue;
        bool fits = true;
        for (std::size_t other = 0; other < ranks && fits; ++other)
          if (other == r || runs_the_same(*s.facts, r, other))
            fits = real(footprint(work_, c, p.counts, p.saved, s.ranks[other]).total()) <= most_bytes[other];
        if (!fits) continue;
        least = seconds;
        chosen[r] = kind;
      }
      if (least == 1e300) return {};
    }
    const bool is_uniform =
        std::all_of(chosen.begin(), chosen.end(), [&](const Recompute& kind) { return kind == chosen[0]; });
    PipelineRecompute next = is_uniform ? PipelineRecompute(chosen[0]) : PipelineRecompute(std::move(chosen));
    if (next == c.recompute) break;
    c.recompute = std::move(next);
    if (!c.balance_layers) break;
  }
  return c.recompute;
}

bool StepModel::may_fit(const Plan& c, const std::vector<Recompute>& kinds, std::size_t rank,
                        double most_bytes) {
  const RankShare& share = stages_.holdings(c).ranks[rank];
  // The last kinds keep least.
  return std::any_of(kinds.rbegin(), kinds.rend(), [&](const Recompute& kind) {
    const LayerPrices& p = stages_.prices(c, kind);
    return real(footprint(work_, c, p.counts, p.saved, share).total()) <= most_bytes;
  });
}

double StepModel::whole_step(const Plan& c, double seconds) const {
  const double nodes = std::max(1.0, static_cast<double>(c.mesh.num_ranks()) / work_.machine.node());
  return seconds * (1 + work_.software.straggling * std::log2(nodes)) + work_.software.step_seconds;
}

Timeline StepModel::timeline(const Plan& c, int steps) {
  const StageShape& s = stages_.shape(c);
  const Schedule& schedule = stages_.schedule(c);
  return simulate(steps == 1 ? schedule : two_steps(schedule), *s.costs).timeline;
}

std::vector<HeldCurve> StepModel::activations_over_time(const Estimate& e, const Timeline& timeline) {
  const StageShape& s = stages_.shape(e.plan);
  const Schedule& schedule = stages_.schedule(e.plan);
  std::vector<HeldCurve> curves;
  for (std::size_t r = 0; r < schedule.ranks.size(); ++r) {
    const SavedBytes& saved = s.prices[r]->saved;
    std::vector<double> of_stage;
    for (const PerKind& layers : s.by_kind) of_stage.push_back(product_sum(layers, saved.layer));
    // Each rank's curve uses its own prices.
    curves.push_back(held_over_time(schedule, Timeline{{timeline.ranks[r]}}, of_stage).front());
    double most = 0;
    for (const auto& [time, held] : curves.back()) most = std::max(most, held);
    // For this repository's trainer, memory is measured by a dry run, not counted by formula: the curve has
    // the formula's shape and the measured peak.
    const auto peak = static_cast<double>(e.rank_memory[r][MemoryCategory::activations]);
    if (most > peak)
      for (auto& [time, held] : curves.back()) held *= peak / most;
  }
  return curves;
}

// Plans that differ only in what happens once a step share a simulation, although the search may examine
// others in between.
const StepModel::Ends& StepModel::simulated(const Plan& c, const SimulationCosts& costs) {
  constexpr std::size_t most_kept = 64;
  const auto found = std::find_if(simulated_.begin(), simulated_.end(), [&](const auto& kept) {
    return stages_.same_passes(c, kept.first);
  });
  if (found != simulated_.end()) return found->second;
  const Timeline timeline = simulate(stages_.schedule(c), costs).timeline;
  Ends ends{{}, timeline.bubble_fraction()};
  for (const auto& spans : timeline.ranks) {
    double end = 0;
    for (const Span& span : spans) end = std::max(end, span.end);
    ends.of_rank.push_back(end);
  }
  if (simulated_.size() == most_kept) simulated_.pop_back();
  simulated_.emplace_front(c, std::move(ends));
  return simulated_.front().second;
}

AxisBytes StepModel::most_traffic(const Plan& c) {
  const StageShape& s = stages_.shape(c);
  const double microbatches = real(num_microbatches(c));
  AxisBytes most;
  for (std::size_t r = 0; r < s.ranks.size(); ++r) {
    AxisBytes own;
    double passes = 0;  // mean over the rank's stages
    for (const StageUse& use : s.facts->uses[r]) {
      const LayerSeconds& t = s.stages[static_cast<std::size_t>(use.stage)];
      const double count = use.share * microbatches;
      own.tp += count * t.sent.tensor;
      own.cp += count * t.sent.context;
      own.ep += count * t.sent.expert;
      passes += count / real(static_cast<std::int64_t>(s.facts->uses[r].size()));
    }
    const double message = stages_.message_bytes(c);
    own.pp = microbatches * s.facts->sends[r] * message;
    if (s.part) {
      own.tp += microbatches * s.part->sent.tensor;
      // The last stage sends its output and the softmax's divisor to each other part; a part sends two
      // gradients and three numbers per token.
      const double token = 4, tokens = real(c.micro_batch * c.seq_len) / c.mesh.cp(),
                   others = c.mesh.pp() - 1;
      const bool is_last =
          std::any_of(s.facts->uses[r].begin(), s.facts->uses[r].end(),
                      [&](const StageUse& use) { return use.stage + 1 == s.facts->num_stages; });
      own.pp +=
          microbatches * (is_last ? others * (message + token * tokens) : 2 * message + 3 * token * tokens);
    }
    own.dp =
        stages_.state().bytes(c, s.counts[r], passes) + stages_.state().muon_bytes(c, s.counts[r], Axis::dp);
    own.ep += stages_.state().copies(c, s.counts[r]).bytes;
    own.pp += stages_.in_pipeline(c, s, r).bytes;
    own.tp +=
        stages_.state().over_tp(c, s.counts[r]).bytes + stages_.state().muon_bytes(c, s.counts[r], Axis::tp);
    for (double AxisBytes::*axis :
         {&AxisBytes::dp, &AxisBytes::tp, &AxisBytes::pp, &AxisBytes::cp, &AxisBytes::ep})
      most.*axis = std::max(most.*axis, own.*axis);
  }
  return most;
}

HostActivations StepModel::counted_activations(const Plan& c, std::size_t rank) {
  const StageShape& s = stages_.shape(c);
  HostActivations host;
  if (!c.offloads_activations()) return host;
  double moved = 0;
  for (const StageUse& use : s.facts->uses[rank])
    moved += use.share * real(num_microbatches(c)) * s.saved[static_cast<std::size_t>(use.stage)];
  host.out = host.back = static_cast<std::int64_t>(moved);
  host.most = static_cast<std::int64_t>(activations_on_host(c, s.prices[rank]->saved, s.ranks[rank]));
  return host;
}

void StepModel::add_host(Estimate& e, std::size_t rank, const HostActivations& activations) {
  const Plan& c = e.plan;
  const StageShape& s = stages_.shape(c);
  const OffloadedBytes off = offloaded_bytes(work_, c);
  double passes = 0;
  for (const StageUse& use : s.facts->uses[rank])
    passes += use.share * real(e.microbatches) / real(static_cast<std::int64_t>(s.facts->uses[rank].size()));
  const double state = own_elements(c, s.counts[rank]) * (off.value + off.gradient + off.optimizer);
  e.host_bytes = std::max(e.host_bytes, state + real(activations.most));
  e.host_traffic = std::max(e.host_traffic, stages_.state().host_traffic(c, s.counts[rank], passes) +
                                                real(activations.out + activations.back));
}

// Most plans have the same value.
double StepModel::flops_per_token(double keys) {
  if (!flops_ || flops_->first != keys) flops_.emplace(keys, flops_per_token_seeing(work_.plan.model, keys));
  return flops_->second;
}

Estimate StepModel::estimate(const Plan& c) {
  Estimate e = estimate_seconds(c);
  add_memory(e);
  return e;
}

// With this trainer, the first data- and tensor-parallel rank holds most. Pipeline ranks are examined in the
// order of their likely memory.
void StepModel::add_memory(Estimate& e, double most_bytes) {
  const Plan& c = e.plan;
  const StageShape& s = stages_.shape(c);
  for (std::size_t r = 0; r < s.ranks.size(); ++r)
    e.rank_memory.push_back(footprint(work_, c, s.prices[r]->counts, s.prices[r]->saved, s.ranks[r]));
  if (work_.software.is_this_trainer) {
    e.host_bytes = e.host_traffic = 0;
    WalkedRanks ranks(rank_bytes(c));
    // Records the exact memory of a rank; returns whether it fits.
    const auto walked = [&](int r, const StepMemory& memory) {
      e.memory = e.rank_memory[static_cast<std::size_t>(r)] = memory;
      e.memory_rank = r;
      if (c.offload != Offload::none) add_host(e, static_cast<std::size_t>(r), memory.host);
      ranks.set(r, real(memory.total()));
      if (!runs_apart(c, *s.facts))
        as_walked_[passes_key(c)].push_back(
            {static_cast<std::size_t>(r), s.ranks[static_cast<std::size_t>(r)], real(memory.total())});
      return real(memory.total()) <= most_bytes;
    };
    const auto all_fit = [&](const std::vector<int>& some) {
      const std::vector<StepMemory> memories = walked_.of(c, s, some);
      for (std::size_t i = 0; i < some.size(); ++i)
        if (!walked(some[i], memories[i])) return false;
      return true;
    };
    const std::vector<int> first = ranks.first();
    if (ranks.likely(first.front()) <= most_bytes) {
      if (!all_fit(first)) return;
    } else {
      for (int r : first)
        if (!all_fit({r})) return;
    }
    for (int r = ranks.next(); r >= 0 && ranks.likely(r) > most_bytes; r = ranks.next())
      if (!all_fit({r})) return;
    if (!all_fit(ranks.not_walked())) return;
  }
  const auto held = [&](int r) { return e.rank_memory[static_cast<std::size_t>(r)].total(); };
  e.memory_rank = 0;
  for (int r = 1; r < static_cast<int>(e.rank_memory.size()); ++r)
    if (held(r) > held(e.memory_rank)) e.memory_rank = r;
  const auto most = static_cast<std::size_t>(e.memory_rank);
  e.memory = e.rank_memory[most];
  if (!work_.software.is_this_trainer)
    e.memory_terms = footprint_terms(work_, c, s.prices[most]->counts, s.prices[most]->saved, s.ranks[most]);
}

std::vector<double> StepModel::room(const Plan& c, double most_bytes) {
  const StageShape& s = stages_.shape(c);
  std::vector<double> counted = rank_bytes(c);
  WalkedRanks ranks(counted);
  const auto fits = [&](int r) {
    ranks.set(r, real(walked_.of(c, s, r).total()));
    return ranks.likely(r) <= most_bytes;
  };
  const std::vector<int> first = ranks.first();
  if (std::all_of(first.begin(), first.end(), fits))
    for (int r = ranks.next(); r >= 0 && fits(r);) r = ranks.next();
  for (int r = ranks.between(most_bytes); r >= 0; r = ranks.between(most_bytes)) (void)fits(r);
  for (std::size_t r = 0; r < counted.size(); ++r)
    counted[r] -= std::max(0.0, ranks.likely(static_cast<int>(r)) - most_bytes);
  return counted;
}

Estimate StepModel::estimate_seconds(const Plan& c) {
  const StageShape& s = stages_.shape(c);
  Estimate e;
  e.plan = c;
  e.layers = s.layers;
  e.microbatches = num_microbatches(c);
  e.costs = *s.costs;
  const Ends& ends = simulated(c, e.costs);
  e.bubble_fraction = ends.bubble_fraction;
  if (const PackedAttention* packed = stages_.packed(c)) e.documents = *packed;
  const double uneven = stages_.uneven_microbatches(c, s);

  // What a rank does in a step but wait, besides what it does at its end.
  const auto passes_of = [&](std::size_t r) {
    StepParts parts;
    const auto add = [&](double count, const LayerSeconds& t, double sharing, double to_host) {
      for (const PassSeconds* pass : {&t.forward, &t.backward_input, &t.backward_weight}) {
        parts.compute += count * pass->compute;
        parts.tp_exposed += count * pass->tensor;
        parts.cp_exposed += count * pass->context;
        parts.ep_exposed += count * pass->expert;
      }
      parts.dp_exposed += count * sharing;
      parts.host_exposed += count * to_host;
    };
    for (const StageUse& use : s.facts->uses[r]) {
      const auto i = static_cast<std::size_t>(use.stage);
      add(use.share * real(e.microbatches), s.stages[i], s.sharing[i], s.to_host[i]);
    }
    if (s.part) add(real(e.microbatches), *s.part, s.part_sharing, 0);
    return parts;
  };
  std::size_t busiest = 0;
  double latest = -1, most = -1;
  for (std::size_t r = 0; r < s.ranks.size(); ++r) {
    const double exposed = stages_.exposed(c, s, r), optimizer = stages_.state().optimizer(c, s.counts[r]);
    latest = std::max(latest, ends.of_rank[r] + uneven + exposed + optimizer);
    StepParts parts = passes_of(r);
    parts.dp_exposed += exposed;
    parts.optimizer = optimizer;
    if (parts.total() > most) most = parts.total(), busiest = r, e.parts = parts;
  }
  StepParts& parts = e.parts;
  parts.pp_bubble = latest - most;
  if (parts.pp_bubble < 0) {  // overlap hid communication, or rounding
    parts.ep_exposed = std::max(0.0, parts.ep_exposed + parts.pp_bubble);
    parts.pp_bubble = 0;
  }
  e.traffic = most_traffic(c);
  if (c.offload != Offload::none) {
    e.host_seconds = stages_.state().host(c, s.counts[busiest]) + parts.host_exposed;
    for (std::size_t r = 0; r < s.ranks.size(); ++r) add_host(e, r, counted_activations(c, r));
  }
  e.seconds = to_twelve_digits(whole_step(c, latest));
  parts.other = std::max(0.0, e.seconds - latest);  // 0 instead of a rounding error

  const Interval interval = interval_of(work_, c, num_parameters_);
  e.low = e.seconds * interval.low;
  e.high = e.seconds * interval.high;
  const double gpus = c.mesh.num_ranks();
  e.tokens_per_second_per_gpu = real(c.seq_len * c.global_batch) / (e.seconds * gpus);
  const double keys = e.documents ? e.documents->keys : c.model.mean_keys(c.seq_len);
  const double flops = flops_per_token(keys) * real(c.seq_len * c.global_batch);
  e.model_tflops_per_gpu = flops / (e.seconds * gpus) / 1e12;
  e.mfu = e.model_tflops_per_gpu * 1e12 / product_peak(work_.machine, work_.software, work_.precision);
  return e;
}

}  // namespace echelon
