#include "plan/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include "base/error.h"
#include "base/units.h"
#include "schedule/pipeline_layout.h"
#include "schedule/schedules.h"
#include "spec/plan_fields.h"

namespace echelon {
namespace {

std::vector<int> divisors(int n) {
  std::vector<int> list;
  for (int d = 1; d <= n; ++d)
    if (n % d == 0) list.push_back(d);
  return list;
}

template <class T>
std::vector<T> pinned_or(const Pins& pins, const char* name, const T& value, std::vector<T> all) {
  return pins.has(name) ? std::vector<T>{value} : std::move(all);
}

// Of those that are tried, in this order, what the program runs.
template <class T>
std::vector<T> run_by(const std::optional<std::vector<T>>& program, std::vector<T> tried) {
  if (program)
    std::erase_if(tried, [&](const T& one) {
      return std::find(program->begin(), program->end(), one) == program->end();
    });
  return tried;
}

// Part of the published schedules that can win: naive and gpipe never beat 1f1b in time or memory, and
// streams train otherwise.
std::vector<std::string> searched_schedules(const Software& software) {
  return run_by<std::string>(software.schedules, {"1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half",
                                                  "v-min", "dualpipe", "dualpipev"});
}

// Bounds are sums in another order than what they bound.
constexpr double below_rounding = 1 - 1e-9;

struct Pipeline {
  std::string schedule;
  int chunks = 1;
  bool even = true;
};

struct Sharding {
  int zero = 0, hsdp = 1;
};

// Every mesh that has the devices, its expert groups and its kind of context parallelism.
template <class Visit>
void each_shape(const SearchRequest& r, const Visit& visit) {
  const Pins& pins = r.pins;
  const Plan& pinned = pins.plan;
  const ModelSpec& m = r.work.model;
  const bool has_experts = m.experts != Experts::none;
  const std::vector<int> axis = divisors(r.gpus),
                         eps = has_experts ? divisors(static_cast<int>(m.num_experts)) : std::vector{1};
  const std::vector<ContextKind> kinds{ContextKind::ring, ContextKind::ulysses, ContextKind::allgather};
  Configuration c;
  c.sequence_parallel = !pins.has("sp") || pinned.sequence_parallel;
  c.layers_per_stage = pinned.layers_per_stage;
  for (int pp : pinned_or(pins, "pp", pinned.mesh.size(Axis::pp), axis))
    for (int tp : pinned_or(pins, "tp", pinned.mesh.size(Axis::tp), axis))
      for (int cp : pinned_or(pins, "cp", pinned.mesh.size(Axis::cp), axis)) {
        const std::int64_t inner = std::int64_t{pp} * tp * cp;
        if (inner > r.gpus || r.gpus % inner != 0) continue;
        c.pp = pp;
        c.tp = tp;
        c.cp = cp;
        c.dp = static_cast<int>(r.gpus / inner);
        if (pins.has("dp") && pinned.mesh.size(Axis::dp) != c.dp) continue;
        const std::vector<int> etps = has_experts && tp > 1 ? std::vector{1, tp} : std::vector{1};
        for (int ep : pinned_or(pins, "ep", pinned.mesh.ep, eps))
          for (int etp : pinned_or(pins, "etp", pinned.mesh.etp, etps)) {
            c.ep = ep;
            c.etp = etp;
            if (!pins.has("ep") && !pins.has("etp") && c.dp * cp * tp % (ep * etp) != 0)
              continue;  // no such mesh
            for (ContextKind kind : cp == 1 ? std::vector{ContextKind::ring}
                                            : pinned_or(pins, "cp-kind", pinned.context_kind, kinds)) {
              c.context = kind;
              visit(c);
            }
          }
      }
}

std::vector<Sharding> shardings_of(const SearchRequest& r, const Configuration& c) {
  const int ranks = c.dp * c.cp;
  const Plan& pinned = r.pins.plan;
  std::vector<Sharding> list;
  for (int zero :
       pinned_or(r.pins, "zero", pinned.zero,
                 ranks > 1 ? run_by<int>(r.work.software.zero_stages, {0, 1, 2, 3}) : std::vector{0})) {
    std::set<int> replicas{1};
    // A group of shards inside a node.
    const int inside = std::max(1, r.work.machine.node() / c.tp);
    if (zero > 0 && ranks > inside && ranks % inside == 0) replicas.insert(ranks / inside);
    if (r.pins.has("hsdp")) replicas = {pinned.hsdp};
    for (int hsdp : replicas)
      if (hsdp == 1 || zero > 0 || r.pins.has("zero")) list.push_back({zero, hsdp});
  }
  return list;
}

struct Group {
  Configuration configuration;
  double least = 0;  // seconds
};

struct Candidate {
  Configuration configuration;
  double bound = 0, bytes = 0;
};

class Search {
 public:
  // Of plans that take longer than `most_seconds` nothing is found out.
  Search(const SearchRequest& request, StepModel& model, double most_seconds = 1e300)
      : r_(request),
        model_(model),
        most_seconds_(most_seconds),
        usable_(model_.usable_bytes() * (1 - request.memory_margin)),
        plan_(plan_of(request.work)) {}

  SearchResult run() {
    const auto begin = std::chrono::steady_clock::now();
    each_shape(r_, [this](const Configuration& c) { mesh(c); });
    // Those that could be fastest come first, so that the others need no looking at.
    std::sort(groups_.begin(), groups_.end(),
              [](const Group& a, const Group& b) { return a.least < b.least; });
    const std::string what = counted(r_.gpus, "GPU");
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      const Group& g = groups_[i];
      if (g.least * below_rounding > most_seconds_) break;
      report(r_.progress, static_cast<double>(i) / static_cast<double>(groups_.size()), what);
      group(g.configuration, by_memory() || may_be_ranked(g.least));
    }
    settle();
    if (!result_.plans.empty()) result_.nearest.reset();
    if (result_.nearest) result_.nearest->memory = model_.estimate(result_.nearest->configuration).memory;
    write_examples();
    result_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return std::move(result_);
  }

 private:
  std::vector<std::int64_t> micro_batches(const Configuration& c) const {
    if (r_.pins.has("micro-batch")) return {r_.pins.plan.micro_batch};
    const std::int64_t of_rank = r_.work.global_batch / c.dp;
    std::vector<std::int64_t> list;
    for (std::int64_t n = 1; n <= of_rank && n <= 64; n *= 2)
      if (of_rank % n == 0) list.push_back(n);
    return list;
  }

  std::vector<Pipeline> pipelines(const Configuration& c) const {
    const bool both = !r_.pins.has("layers-per-stage");
    const auto with_splits = [&](std::vector<Pipeline> list) {
      std::vector<Pipeline> result;
      for (Pipeline& p : list) {
        p.even = !r_.pins.plan.balance_layers;
        result.push_back(p);
        if (!both || c.pp == 1) continue;
        p.even = false;
        result.push_back(p);
      }
      return result;
    };
    if (c.pp == 1) return with_splits({{"1f1b", 1}});
    std::vector<Pipeline> list;
    for (const std::string& name :
         pinned_or(r_.pins, "schedule", r_.pins.plan.schedule, searched_schedules(r_.work.software))) {
      if (!name.starts_with("interleaved")) {
        list.push_back({name, 1});
        continue;
      }
      const auto most = static_cast<int>(r_.work.model.num_layers / c.pp);
      std::vector<int> chunks;
      for (int v = 2; v <= std::min(most, 16); ++v)
        if (r_.work.model.num_layers % (std::int64_t{c.pp} * v) == 0 || v <= 4) chunks.push_back(v);
      if (r_.pins.has("schedule") && chunks.empty()) chunks = {2};  // and say what is wrong with it
      for (int v : pinned_or(r_.pins, "chunks", r_.pins.plan.chunks, chunks)) list.push_back({name, v});
    }
    return with_splits(list);
  }

  std::vector<Recompute> recomputes() const {
    return pinned_or(r_.pins, "recompute", r_.pins.plan.recompute,
                     std::vector{Recompute::none, Recompute::selective, Recompute::full});
  }

  std::optional<Refusal> shape_refusal_of(const Configuration& c) {
    place(r_.work, c, plan_);
    return shape_refusal(plan_, runner_of(r_.work));
  }

  void reject(const char* reason, std::int64_t count) { result_.rejected[reason].count += count; }
  // `example` is called for the first of its kind.
  template <class Example>
  void reject(const char* reason, std::int64_t count, const std::string& kind, const Example& example) {
    reject(reason, count);
    std::vector<std::string>& examples = result_.rejected[reason].examples;
    if (examples.size() < 12 && examples_.insert(kind).second) examples.push_back(example());
  }

  void mesh(Configuration c) {
    const std::vector<Pipeline> pipelines_here = pipelines(c);
    const std::vector<Sharding> shardings_here = shardings_of(r_, c);
    const auto leaves = static_cast<std::int64_t>(pipelines_here.size() * shardings_here.size());
    std::vector<std::int64_t> batches = micro_batches(c);
    const auto refusal = shape_refusal_of(c);
    if (pipelines_here.empty()) {
      ++result_.considered;
      return reject("schedule", 1, "no pipelines",
                    [&] { return fmt::format("pp {}: {} runs no pipelines", c.pp, r_.work.software.name); });
    }
    if (refusal || batches.empty()) {
      const std::int64_t count = leaves *
                                 std::max<std::int64_t>(1, static_cast<std::int64_t>(batches.size())) *
                                 static_cast<std::int64_t>(recomputes().size());
      result_.considered += count;
      if (!refusal) return reject("shape", count);
      return reject("shape", count, refusal->field, [&] { return sentence(plan_, *refusal); });
    }
    for (std::int64_t batch : batches)
      for (Recompute recompute : recomputes()) {
        c.micro_batch = batch;
        c.recompute = recompute;
        groups_.push_back({c, model_.least_seconds(c)});
      }
  }

  // All schedules, splits and shardings of a mesh, micro-batch and recomputation.
  void group(Configuration c, bool can_win) {
    const std::vector<Pipeline> pipelines_here = pipelines(c);
    const std::vector<Sharding> shardings_here = shardings_of(r_, c);
    const auto shardings_count = static_cast<std::int64_t>(shardings_here.size());
    const auto leaves = static_cast<std::int64_t>(pipelines_here.size()) * shardings_count;
    result_.considered += leaves;
    if (!can_win) return reject("slower", leaves);
    candidates_.clear();
    for (const Pipeline& pipeline : pipelines_here) {
      c.schedule = pipeline.schedule;
      c.chunks = pipeline.chunks;
      c.even_split = pipeline.even;
      const std::string unfit = model_.schedule_problem(c);
      if (!unfit.empty()) {
        reject("schedule", shardings_count, c.schedule, [&] { return describe(c) + ": " + unfit; });
        continue;
      }
      if (!c.even_split && model_.splits_evenly(c)) {
        if (r_.pins.plan.balance_layers)
          c.even_split = true;
        else {
          reject("same", shardings_count);
          continue;
        }
      }
      for (const Sharding& sharding : shardings_here) {
        c.zero = sharding.zero;
        c.hsdp = sharding.hsdp;
        if (const auto refusal = shape_refusal_of(c))
          reject("shape", 1, refusal->field, [&] { return sentence(plan_, *refusal); });
        else
          leaf(c);
      }
    }
    rank();
  }

  void leaf(const Configuration& c) {
    const Outlook look = model_.outlook(c, usable_);
    if (look.bytes > usable_) {
      if (!result_.nearest || look.bytes < result_.nearest->bytes)
        result_.nearest = {c, look.bytes, usable_, {}};
      result_.rejected["memory"].count += 1;
      // The example of a schedule is the one that is nearest to fitting.
      auto [found, is_new] = unfit_.try_emplace(c.schedule, Unfit{c, look});
      if (!is_new && look.bytes < found->second.look.bytes) found->second = {c, look};
      return;
    }
    ++result_.feasible;
    candidates_.push_back({c, look.seconds, look.bytes});
  }

  // Seconds that a plan must not go beyond to be among the first.
  double worst_ranked() const {
    return static_cast<int>(result_.plans.size()) < r_.top ? most_seconds_ : result_.plans.back().seconds;
  }

  bool by_memory() const { return r_.objective == Objective::memory; }
  std::size_t top() const { return static_cast<std::size_t>(r_.top); }

  // The same if all that waits fits: no later than worst_ranked().
  double worst_hoped() const {
    auto plan = result_.plans.begin();
    auto next = waiting_.begin();
    double seconds = 0;
    for (std::size_t i = 0; i < top(); ++i) {
      if (plan == result_.plans.end() && next == waiting_.end()) return most_seconds_;
      const bool waits =
          plan == result_.plans.end() || (next != waiting_.end() && next->first < plan->seconds);
      seconds = waits ? next++->first : plan++->seconds;
    }
    return seconds;
  }

  bool may_be_ranked(double least_seconds) {
    if (least_seconds * below_rounding <= worst_hoped()) return true;
    settle();
    return least_seconds * below_rounding <= worst_ranked();
  }

  // Walks the memory of what waits, the fastest first, until no other can be among the first.
  void settle() {
    while (!waiting_.empty() && waiting_.begin()->first <= worst_ranked())
      walk(std::move(waiting_.extract(waiting_.begin()).mapped()));
    waiting_.clear();
  }

  void walk(Estimate e) {
    model_.add_memory(e, usable_);
    if (static_cast<double>(e.memory.total()) > usable_) {  // this trainer's
      --result_.feasible;
      ++result_.rejected["memory"].count;
      return;
    }
    auto& plans = result_.plans;
    const auto better = [&](const Estimate& a, const Estimate& b) {
      const auto bytes_a = a.memory.total(), bytes_b = b.memory.total();
      return by_memory() ? std::tie(bytes_a, a.seconds) < std::tie(bytes_b, b.seconds)
                         : std::tie(a.seconds, bytes_a) < std::tie(b.seconds, bytes_b);
    };
    plans.insert(std::upper_bound(plans.begin(), plans.end(), e, better), std::move(e));
    if (plans.size() > top()) plans.pop_back();
  }

  void rank() {
    std::sort(candidates_.begin(), candidates_.end(), [&](const Candidate& a, const Candidate& b) {
      return by_memory() ? a.bytes < b.bytes : a.bound < b.bound;
    });
    const auto& plans = result_.plans;
    for (const Candidate& candidate : candidates_) {
      if (by_memory()
              ? plans.size() == top() && candidate.bytes > static_cast<double>(plans.back().memory.total())
              : !may_be_ranked(candidate.bound))
        break;
      Estimate e = model_.estimate_seconds(candidate.configuration);
      ++result_.simulated;
      if (by_memory() && e.seconds <= most_seconds_)
        walk(std::move(e));
      else if (!by_memory() && e.seconds <= worst_ranked())
        waiting_.emplace(e.seconds, std::move(e));
    }
  }

  void write_examples() {
    for (const auto& [schedule, unfit] : unfit_)
      result_.rejected["memory"].examples.push_back(
          fmt::format("{}: {:.3g} in-flight activations, {} on rank {}, {} more than {} ({})", schedule,
                      unfit.look.in_flight, format_device_memory(unfit.look.bytes), unfit.look.rank,
                      format_device_memory(unfit.look.bytes - usable_), format_device_memory(usable_),
                      describe(unfit.configuration)));
  }

  struct Unfit {
    Configuration configuration;
    Outlook look;
  };
  std::map<std::string, Unfit> unfit_;

  const SearchRequest& r_;
  StepModel& model_;
  double most_seconds_, usable_;
  Plan plan_;  // of the configuration that is judged
  SearchResult result_;
  std::set<std::string> examples_;
  std::vector<Group> groups_;
  std::vector<Candidate> candidates_;  // of a group
  // By seconds: what may be among the first, whose memory is not walked yet. That takes longer than to
  // simulate.
  std::multimap<double, Estimate> waiting_;
};

// What is given, on a plan of the workload.
Plan given_plan(const SearchRequest& r) {
  Plan plan = r.pins.plan;
  plan.model = r.work.model;
  plan.seq_len = r.work.seq_len;
  plan.global_batch = r.work.global_batch;
  return plan;
}

// Whether some configuration has a legal shape, and of what is given the first that is in its way.
struct Legality {
  bool is_possible = false;
  std::optional<Refusal> refusal;
};
Legality legality(const SearchRequest& r) {
  const Plan given = given_plan(r);
  for (const auto& refusal :
       {value_refusal(given, runner_of(r.work)), unpriced(given), schedule_refusal(given)})
    if (refusal) return {false, refusal};
  if (r.pins.has("micro-batch") && given.micro_batch > given.global_batch)
    return {false, refused("micro-batch", {}, "must be from 1 to --global-batch {}", given.global_batch)};
  for (Axis axis : all_axes)
    if (r.pins.has(axis_name(axis)) && r.gpus % given.mesh.size(axis) != 0)
      return {false, refused(axis_name(axis), {remedy(axis_name(axis), r.gpus, Remedy::Kind::divisors)},
                             "does not divide --gpus {}", r.gpus)};
  Legality result;
  Plan plan = plan_of(r.work);
  each_shape(r, [&](Configuration c) {
    for (const Sharding& sharding : result.is_possible ? std::vector<Sharding>{} : shardings_of(r, c)) {
      c.zero = sharding.zero;
      c.hsdp = sharding.hsdp;
      place(r.work, c, plan);
      const auto refusal = shape_refusal(plan, runner_of(r.work));
      result.is_possible |= !refusal;
      if (refusal && !result.refusal && (r.pins.has(refusal->field) || refusal->field == "seq-len"))
        result.refusal = refusal;
    }
  });
  return result;
}

void check(const SearchRequest& r) {
  constexpr int most_gpus = 1'000'000;
  if (r.gpus < 1 || r.gpus > most_gpus) refuse("--gpus {}: must be from 1 to {}", r.gpus, most_gpus);
  if (const Legality found = legality(r); !found.is_possible && found.refusal) {
    std::vector<Remedy> legal;
    for (const Remedy& one : found.refusal->all_remedies())
      if (makes_possible(one, r)) legal.push_back(one);
    throw PlanRefusal(given_plan(r), *found.refusal).with(std::move(legal));
  }
  const std::int64_t all = given_ranks(r.pins);
  if (gives_mesh(r.pins) ? all != r.gpus : r.gpus % all != 0)
    refuse("--gpus {}: the axes that are given make {} ranks", r.gpus, all);
  for (const std::string& name : r.work.software.schedules.value_or(std::vector<std::string>{}))
    if (std::find(schedule_names().begin(), schedule_names().end(), name) == schedule_names().end())
      refuse("--software {}: schedules = {}: unknown; legal: {}", r.work.software.name, name,
             fmt::join(schedule_names(), ", "));
  if (!(r.memory_margin >= 0 && r.memory_margin < 1))
    refuse("--memory-margin {}: must be from 0 to below 1, a part of the memory", r.memory_margin);
  if (r.top < 1 || r.top > 10000) refuse("--top {}: must be from 1 to 10000", r.top);
}

}  // namespace

Objective parse_objective(const std::string& text, const std::string& field) {
  if (text == "time") return Objective::time;
  if (text == "memory") return Objective::memory;
  refuse("{} {}: no such objective; legal: time, memory, gpus", field, text);
}

std::optional<Refusal> unpriced(const Plan& plan) {
  if (!plan.schedule_text.empty())
    return refused("schedule", {}, "a schedule of one's own is not priced; legal: a name");
  for (const PlanField& field : plan_fields()) {
    if (field.priced == nullptr) continue;
    Refusal refusal = refused(field.name(), {}, "is not priced");
    std::istringstream priced(field.priced);
    for (std::string value; std::getline(priced, value, '|');)
      refusal.remedies.push_back({field.name(), value});
    const std::string text = text_of(field, plan);
    if (std::none_of(refusal.remedies.begin(), refusal.remedies.end(),
                     [&](const Remedy& one) { return one.value == text; }))
      return refusal;
  }
  return {};
}

bool makes_possible(const Remedy& remedy, SearchRequest request) {
  if (find_field(remedy.field) == nullptr) return true;  // of another flag
  if (remedy.field == "schedule" && is_stream(remedy.value)) return false;
  request.pins.read(remedy.field, remedy.value, remedy.field);
  if (remedy.field == "seq-len") request.work.seq_len = request.pins.plan.seq_len;
  if (remedy.field == "global-batch") request.work.global_batch = request.pins.plan.global_batch;
  return legality(request).is_possible;
}

SearchResult search(const SearchRequest& request) {
  check(request);
  StepModel model(request.work);
  return Search(request, model).run();
}

std::optional<LeastGpus> least_gpus(SearchRequest request, double target_seconds) {
  const int most = request.gpus;
  const std::int64_t all = given_ranks(request.pins);
  const bool whole = gives_mesh(request.pins);
  // Layers cost the same on any number of devices: one model prices them once.
  StepModel model(request.work);
  for (std::int64_t gpus = all; gpus <= (whole ? std::min<std::int64_t>(all, most) : most); gpus += all) {
    request.gpus = static_cast<int>(gpus);
    SearchRequest one = request;
    one.top = 1;
    if (gpus == all) check(one);
    if (!Search(one, model, target_seconds).run().plans.empty())
      return LeastGpus{request.gpus, search(request)};
  }
  return {};
}

}  // namespace echelon
