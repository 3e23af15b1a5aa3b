#include "plan/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <tuple>

#include "base/error.h"
#include "base/units.h"
#include "schedule/schedules.h"

namespace echelon {
namespace {

std::vector<int> divisors(int n) {
  std::vector<int> list;
  for (int d = 1; d <= n; ++d)
    if (n % d == 0) list.push_back(d);
  return list;
}

template <class T>
std::vector<T> pinned_or(const std::optional<T>& pin, std::vector<T> all) {
  return pin ? std::vector<T>{*pin} : std::move(all);
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
        usable_(model_.usable_bytes() * (1 - request.memory_margin)) {}

  SearchResult run() {
    const auto begin = std::chrono::steady_clock::now();
    enumerate();
    // Those that could be fastest come first, so that the others need no looking at.
    std::sort(groups_.begin(), groups_.end(),
              [](const Group& a, const Group& b) { return a.least < b.least; });
    const std::string what = counted(r_.gpus, "GPU");
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      const Group& g = groups_[i];
      if (g.least * below_rounding > most_seconds_) break;
      report(r_.progress, static_cast<double>(i) / static_cast<double>(groups_.size()), what);
      group(g.configuration, r_.objective == Objective::memory || g.least * below_rounding <= worst_ranked());
    }
    if (!result_.plans.empty()) result_.nearest.reset();
    if (result_.nearest) result_.nearest->memory = model_.estimate(result_.nearest->configuration).memory;
    write_examples();
    result_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return std::move(result_);
  }

 private:
  void enumerate() {
    const Pins& pins = r_.pins;
    for (int pp : pinned_or(pins.pp, divisors(r_.gpus)))
      for (int tp : pinned_or(pins.tp, divisors(r_.gpus)))
        for (int cp : pinned_or(pins.cp, divisors(r_.gpus))) {
          const std::int64_t inner = std::int64_t{pp} * tp * cp;
          if (inner > r_.gpus || r_.gpus % inner != 0) continue;
          const int dp = static_cast<int>(r_.gpus / inner);
          if (pins.dp && *pins.dp != dp) continue;
          Configuration c;
          c.pp = pp;
          c.tp = tp;
          c.cp = cp;
          c.dp = dp;
          c.sequence_parallel = pins.sequence_parallel.value_or(true);
          expert_meshes(c);
        }
  }

  void expert_meshes(Configuration c) {
    const ModelSpec& m = r_.work.model;
    std::vector<int> eps{1}, etps{1};
    if (m.experts != Experts::none) {
      eps = divisors(static_cast<int>(m.num_experts));
      if (c.tp > 1) etps.push_back(c.tp);
    }
    for (int ep : pinned_or(r_.pins.ep, eps))
      for (int etp : pinned_or(r_.pins.etp, etps)) {
        c.ep = ep;
        c.etp = etp;
        if (!r_.pins.ep && !r_.pins.etp && c.dp * c.cp * c.tp % (ep * etp) != 0) continue;  // no such mesh
        contexts(c);
      }
  }

  void contexts(Configuration c) {
    std::vector<ContextKind> kinds{ContextKind::ring};
    if (c.cp > 1) kinds = {ContextKind::ring, ContextKind::ulysses, ContextKind::allgather};
    for (ContextKind kind : c.cp > 1 ? pinned_or(r_.pins.context, kinds) : kinds) {
      c.context = kind;
      mesh(c);
    }
  }

  std::vector<std::int64_t> micro_batches(const Configuration& c) const {
    if (r_.pins.micro_batch) return {*r_.pins.micro_batch};
    const std::int64_t of_rank = r_.work.global_batch / c.dp;
    std::vector<std::int64_t> list;
    for (std::int64_t n = 1; n <= of_rank && n <= 64; n *= 2)
      if (of_rank % n == 0) list.push_back(n);
    return list;
  }

  std::vector<Pipeline> pipelines(const Configuration& c) const {
    const bool both = !r_.pins.balance_layers && r_.pins.layers_per_stage.empty();
    const auto with_splits = [&](std::vector<Pipeline> list) {
      std::vector<Pipeline> result;
      for (Pipeline& p : list) {
        p.even = both || !r_.pins.balance_layers.value_or(false);
        result.push_back(p);
        if (!both || c.pp == 1) continue;
        p.even = false;
        result.push_back(p);
      }
      return result;
    };
    if (c.pp == 1) return with_splits({{"1f1b", 1}});
    std::vector<Pipeline> list;
    for (const std::string& name : pinned_or(r_.pins.schedule, searched_schedules(r_.work.software))) {
      if (!name.starts_with("interleaved")) {
        list.push_back({name, 1});
        continue;
      }
      const auto most = static_cast<int>(r_.work.model.num_layers / c.pp);
      std::vector<int> chunks;
      for (int v = 2; v <= std::min(most, 16); ++v)
        if (r_.work.model.num_layers % (std::int64_t{c.pp} * v) == 0 || v <= 4) chunks.push_back(v);
      if (r_.pins.schedule && chunks.empty()) chunks = {2};  // and say what is wrong with it
      for (int v : pinned_or(r_.pins.chunks, chunks)) list.push_back({name, v});
    }
    return with_splits(list);
  }

  std::vector<Sharding> shardings(const Configuration& c) const {
    const int ranks = c.dp * c.cp;
    std::vector<Sharding> list;
    for (int zero : r_.pins.zero ? std::vector{*r_.pins.zero}
                    : ranks > 1  ? run_by<int>(r_.work.software.zero_stages, {0, 1, 2, 3})
                                 : std::vector{0}) {
      std::set<int> replicas{1};
      // A group of shards inside a node.
      const int inside = std::max(1, r_.work.machine.node() / c.tp);
      if (zero > 0 && ranks > inside && ranks % inside == 0) replicas.insert(ranks / inside);
      if (r_.pins.hsdp) replicas = {*r_.pins.hsdp};
      for (int hsdp : replicas)
        if (hsdp == 1 || zero > 0) list.push_back({zero, hsdp});
    }
    return list;
  }

  std::vector<Recompute> recomputes() const {
    return pinned_or(r_.pins.recompute,
                     std::vector<Recompute>{Recompute::none, Recompute::selective, Recompute::full});
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
    const std::vector<Sharding> shardings_here = shardings(c);
    const auto leaves = static_cast<std::int64_t>(pipelines_here.size() * shardings_here.size());
    std::vector<std::int64_t> batches = micro_batches(c);
    const std::string problem = shape_problem(r_.work, c);
    if (pipelines_here.empty()) {
      ++result_.considered;
      return reject("schedule", 1, "no pipelines",
                    [&] { return fmt::format("pp {}: {} runs no pipelines", c.pp, r_.work.software.name); });
    }
    if (!problem.empty() || batches.empty()) {
      const std::int64_t count = leaves *
                                 std::max<std::int64_t>(1, static_cast<std::int64_t>(batches.size())) *
                                 static_cast<std::int64_t>(recomputes().size());
      result_.considered += count;
      reject("shape", count, problem.substr(0, 3), [&] { return problem; });
      return;
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
    const std::vector<Sharding> shardings_here = shardings(c);
    const auto shardings_count = static_cast<std::int64_t>(shardings_here.size());
    const auto leaves = static_cast<std::int64_t>(pipelines_here.size()) * shardings_count;
    result_.considered += leaves;
    if (!can_win) return reject("slower", leaves);
    candidates_.clear();
    for (const Pipeline& pipeline : pipelines_here) {
      c.schedule = pipeline.schedule;
      c.chunks = pipeline.chunks;
      c.even_split = pipeline.even;
      c.layers_per_stage = r_.pins.layers_per_stage;
      const std::string unfit = model_.schedule_problem(c);
      if (!unfit.empty()) {
        reject("schedule", shardings_count, c.schedule, [&] { return describe(c) + ": " + unfit; });
        continue;
      }
      if (!c.even_split && model_.splits_evenly(c)) {
        if (r_.pins.balance_layers.value_or(false))
          c.even_split = true;
        else {
          reject("same", shardings_count);
          continue;
        }
      }
      for (const Sharding& sharding : shardings_here) {
        c.zero = sharding.zero;
        c.hsdp = sharding.hsdp;
        const std::string problem = shape_problem(r_.work, c);
        if (problem.empty())
          leaf(c);
        else
          reject("shape", 1, problem.substr(0, 3), [&] { return problem; });
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

  void rank() {
    const bool by_memory = r_.objective == Objective::memory;
    std::sort(candidates_.begin(), candidates_.end(), [&](const Candidate& a, const Candidate& b) {
      return by_memory ? a.bytes < b.bytes : a.bound < b.bound;
    });
    const auto top = static_cast<std::size_t>(r_.top);
    auto& plans = result_.plans;
    const auto better = [&](const Estimate& a, const Estimate& b) {
      const auto bytes_a = a.memory.total(), bytes_b = b.memory.total();
      return by_memory ? std::tie(bytes_a, a.seconds) < std::tie(bytes_b, b.seconds)
                       : std::tie(a.seconds, bytes_a) < std::tie(b.seconds, bytes_b);
    };
    for (const Candidate& candidate : candidates_) {
      if (by_memory
              ? plans.size() == top && candidate.bytes > static_cast<double>(plans.back().memory.total())
              : candidate.bound * below_rounding > worst_ranked())
        break;
      Estimate e = model_.estimate(candidate.configuration);
      ++result_.simulated;
      if (e.seconds > most_seconds_) continue;
      if (static_cast<double>(e.memory.total()) > usable_) {  // this trainer's, walked
        --result_.feasible;
        ++result_.rejected["memory"].count;
        continue;
      }
      plans.insert(std::upper_bound(plans.begin(), plans.end(), e, better), std::move(e));
      if (plans.size() > top) plans.pop_back();
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
  SearchResult result_;
  std::set<std::string> examples_;
  std::vector<Group> groups_;
  std::vector<Candidate> candidates_;  // of a group
};

void check_pin(const char* flag, const std::optional<int>& pin, int least, int most) {
  if (pin && (*pin < least || *pin > most)) refuse("{} {}: must be from {} to {}", flag, *pin, least, most);
}

void check(const SearchRequest& r) {
  constexpr int most_gpus = 1'000'000;
  const ModelSpec& m = r.work.model;
  if (r.gpus < 1 || r.gpus > most_gpus) refuse("--gpus {}: must be from 1 to {}", r.gpus, most_gpus);
  const Pins& pins = r.pins;
  for (const auto& [flag, pin] :
       {std::pair{"--dp", pins.dp}, {"--tp", pins.tp}, {"--pp", pins.pp}, {"--cp", pins.cp}}) {
    check_pin(flag, pin, 1, most_gpus);
    if (pin && r.gpus % *pin != 0) {
      refuse("{} {}: does not divide --gpus {}; legal: {}", flag, *pin, r.gpus,
             fmt::join(divisors(r.gpus), ", "));
    }
  }
  const std::int64_t all =
      std::int64_t{pins.dp.value_or(1)} * pins.tp.value_or(1) * pins.pp.value_or(1) * pins.cp.value_or(1);
  const bool whole = pins.dp && pins.tp && pins.pp && pins.cp;
  if (whole ? all != r.gpus : r.gpus % all != 0)
    refuse("--gpus {}: the axes that are given make {} ranks", r.gpus, all);
  check_pin("--zero", pins.zero, 0, 3);
  check_pin("--chunks", pins.chunks, 1, 1000);
  check_pin("--hsdp", pins.hsdp, 1, most_gpus);
  if (pins.hsdp && *pins.hsdp > 1 && pins.zero == 0)
    refuse("--hsdp {}: replicates what --zero 1, 2 or 3 cuts over ranks, and --zero is 0", *pins.hsdp);
  check_pin("--ep", pins.ep, 1, most_gpus);
  check_pin("--etp", pins.etp, 1, most_gpus);
  if (r.work.global_batch < 1 || r.work.global_batch > most_gpus * 100)
    refuse("--global-batch {}: must be from 1 to {}", r.work.global_batch, most_gpus * 100);
  if (pins.dp && r.work.global_batch < *pins.dp)
    refuse("--global-batch {}: smaller than --dp {}, so some ranks would have none; legal: at least {}",
           r.work.global_batch, *pins.dp, *pins.dp);
  if (pins.micro_batch && (*pins.micro_batch < 1 || *pins.micro_batch > r.work.global_batch))
    refuse("--micro-batch {}: must be from 1 to --global-batch {}", *pins.micro_batch, r.work.global_batch);
  // Rotary positions have no table that ends: longer sequences can be planned for, though the model must have
  // learned them.
  constexpr std::int64_t longest = std::int64_t{1} << 24;
  const std::int64_t most = m.family == Family::gpt2 ? m.max_seq : longest;
  if (r.work.seq_len < 1 || r.work.seq_len > most)
    refuse("--seq-len {}: {} has positions for 1 to {}", r.work.seq_len, m.name, most);
  if (pins.tp && m.num_heads % *pins.tp != 0)
    refuse("--tp {}: the {} heads of {} do not divide; legal: {}", *pins.tp, m.num_heads, m.name,
           fmt::join(divisors(static_cast<int>(m.num_heads)), ", "));
  if (pins.ep && *pins.ep > 1 && m.experts == Experts::none)
    refuse("--ep {}: {} has no experts; legal: 1", *pins.ep, m.name);
  if (pins.ep && m.experts != Experts::none && m.num_experts % *pins.ep != 0)
    refuse("--ep {}: the {} experts of {} do not divide; legal: {}", *pins.ep, m.num_experts, m.name,
           fmt::join(divisors(static_cast<int>(m.num_experts)), ", "));
  if (pins.etp && *pins.etp > 1 && m.experts == Experts::none)
    refuse("--etp {}: {} has no experts; legal: 1", *pins.etp, m.name);
  if (!pins.layers_per_stage.empty()) {
    std::int64_t sum = 0;
    for (std::int64_t count : pins.layers_per_stage) {
      if (count < 0 || count > m.num_layers)
        refuse("--layers-per-stage: {} layers; legal: 0 to {}", count, m.num_layers);
      sum += count;
    }
    if (sum != m.num_layers)
      refuse("--layers-per-stage: the numbers add up to {}, and {} has {} layers", sum, m.name, m.num_layers);
  }
  if (pins.pp && *pins.pp > m.num_layers)
    refuse("--pp {}: {} has only {} layers; legal: up to {}", *pins.pp, m.name, m.num_layers, m.num_layers);
  if (pins.context == ContextKind::hybrid)
    refuse("--cp-kind hybrid: is not priced; legal: ring, ulysses, allgather");
  if (pins.schedule) {
    const auto& names = schedule_names();
    if (std::find(names.begin(), names.end(), *pins.schedule) == names.end())
      refuse("--schedule {}: unknown; legal: {}", *pins.schedule, fmt::join(names, ", "));
  }
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

SearchResult search(const SearchRequest& request) {
  check(request);
  StepModel model(request.work);
  return Search(request, model).run();
}

std::optional<LeastGpus> least_gpus(SearchRequest request, double target_seconds) {
  const Pins& pins = request.pins;
  const int most = request.gpus;
  const std::int64_t all =
      std::int64_t{pins.dp.value_or(1)} * pins.tp.value_or(1) * pins.pp.value_or(1) * pins.cp.value_or(1);
  const bool whole = pins.dp && pins.tp && pins.pp && pins.cp;
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
