#include "plan/search.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <limits>
#include <map>
#include <queue>
#include <set>
#include <tuple>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "base/units.h"

namespace echelon {
namespace {

// Allows for rounding: bounds are summed in another order than the times that they bound.
constexpr double below_rounding = 1 - 1e-9;

constexpr double never = std::numeric_limits<double>::infinity();

// The plans of a mesh. There are up to some 100,000, and many have the same lists.
struct MeshPlans {
  MeshChoice choice;
  const std::vector<PipelineChoice>* pipelines = nullptr;
  const std::vector<ShardingChoice>* shardings = nullptr;
};

// The plans of a mesh with one micro-batch and recomputation. There are up to some millions.
struct Group {
  const MeshPlans* mesh = nullptr;
  std::int64_t micro_batch = 1;
  const PipelineRecompute* recompute = nullptr;
  double least = 0;  // seconds

  void place_in(Plan& plan) const {
    mesh->choice.place_in(plan);
    plan.micro_batch = micro_batch;
    plan.recompute = *recompute;
  }
};

// One plan of a group.
struct Candidate {
  const PipelineChoice* pipeline = nullptr;
  ShardingChoice sharding;
  bool balanced = false;
  Outcome* outcome = nullptr;  // where it is recorded
  double bound = 0, bytes = 0;

  void place_in(Plan& plan) const {
    pipeline->place_in(plan);
    sharding.place_in(plan);
    plan.balance_layers = balanced;
  }
};

class Search {
 public:
  Search(const SearchRequest& request, StepModel& model, double most_seconds)
      : r_(request),
        model_(model),
        most_seconds_(most_seconds),
        usable_(model_.usable_bytes() * (1 - request.memory_margin)) {
    if (r_.has("recompute")) {
      recomputes_ = {r_.work.plan.recompute};
      return;
    }
    if (!r_.work.software.recompute)
      kinds_ = model_.recompute_kinds();
    else
      uniform_ = echelon::recompute_kinds(*r_.work.software.recompute, r_.work.plan.model);
    if (r_.work.plan.offloads_activations())
      std::erase_if(uniform_, [&](const Recompute& kind) {
        return !offloads_beside(r_.work.software, PipelineRecompute(kind));
      });
    recomputes_.assign(uniform_.begin(), uniform_.end());
  }

  SearchResult run() {
    const auto begin = std::chrono::steady_clock::now();
    each_mesh(r_, [this](const Plan& plan) {
      mesh(plan);
      return true;
    });
    each_group([this](const Group& g) {
      if (!by_memory()) advance(g.least);
      group(g, by_memory() || g.least * below_rounding <= worst_ranked());
    });
    if (by_memory()) walk_the_smallest();
    settle();
    if (!by_memory()) recompute_by_rank();
    settle();
    if (result_.plans.empty() && result_.nearest) judge_nearest();
    give_places();
    if (!result_.plans.empty()) result_.nearest.reset();
    write_examples();
    result_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return std::move(result_);
  }

 private:
  struct Waiting {
    Estimate estimate;
    Outcome* outcome = nullptr;  // where it is recorded
  };

  // Visits the groups that could be fastest first, so that slower ones need not be examined. Equal ones keep
  // the order of the meshes, so that the result does not depend on the library's sort. Most groups are never
  // reached: a tighter bound is computed of those that are, and they wait until it is their turn again.
  template <class Visit>
  void each_group(const Visit& visit) {
    const auto is_later = [](const Group* a, const Group* b) {
      return std::pair(a->least, a) > std::pair(b->least, b);
    };
    std::priority_queue<const Group*, std::vector<const Group*>, decltype(is_later)> bounded(is_later);
    std::stable_sort(groups_.begin(), groups_.end(),
                     [](const Group& a, const Group& b) { return a.least < b.least; });
    double visited = 0;
    for (auto next = groups_.begin(); next != groups_.end() || !bounded.empty(); ++visited) {
      while (next != groups_.end() && (bounded.empty() || next->least <= bounded.top()->least)) {
        if (!by_memory() && next->least * below_rounding <= worst_ranked()) tighten(*next);
        bounded.push(&*next++);
      }
      const Group& g = *bounded.top();
      bounded.pop();
      if (g.least * below_rounding > most_seconds_) break;
      done_ = visited / static_cast<double>(groups_.size());
      tell();
      visit(g);
    }
  }
  void tighten(Group& g) {
    double least = 1e300;
    g.place_in(plan_);
    for (const PipelineChoice& pipeline : *g.mesh->pipelines) {
      pipeline.place_in(plan_);
      least = std::min(least, model_.least_scheduled_seconds(plan_));
    }
    g.least = std::max(g.least, least);
  }

  void reject(const char* reason, std::int64_t count) { result_.rejected[reason].count += count; }
  // Calls `example` for the first plan of its kind.
  template <class Example>
  void reject(const char* reason, std::int64_t count, const std::string& kind, const Example& example,
              bool is_asked = true) {
    reject(reason, count);
    Rejected& rejected = result_.rejected[reason];
    if (rejected.examples.size() >= 12 || !examples_.insert(kind).second) return;
    const bool is_first = is_asked && !rejected.is_asked;
    rejected.is_asked |= is_asked;
    rejected.examples.insert(is_first ? rejected.examples.begin() : rejected.examples.end(), example());
  }
  void reject_shape(const Plan& plan, const Refusal& refusal, std::int64_t count) {
    reject(
        "shape", count, refusal.field, [&] { return sentence(plan, refusal); }, r_.has(refusal.field));
  }

  // Candidates point into the vectors of a Looked, which stay in place while the list of them grows.
  static_assert(std::is_nothrow_move_constructible_v<Looked>);
  void remember(const Plan& plan, std::int64_t count, const Outcome& all) {
    Looked& looked = result_.looked.emplace_back();
    looked.mesh = plan.mesh;
    looked.context_kind = plan.context_kind;
    looked.offload = plan.offload;
    looked.count = count;
    looked.all = all;
  }
  int why_index(const std::string& sentence) {
    const auto [at, is_new] = whys_.try_emplace(sentence, static_cast<int>(result_.whys.size()));
    if (is_new) result_.whys.push_back(sentence);
    return at->second;
  }

  // Called often: the listener may end the search here.
  void tell() const { report(r_.progress, done_, what_); }

  void mesh(const Plan& plan) {
    tell();
    if (beside_zero_.leave_out(plan)) return;
    const std::vector<std::int64_t> batches = micro_batches(r_, plan);
    MeshPlans here{MeshChoice::of(plan), &*pipeline_lists_.insert(pipelines(r_, plan)).first,
                   &*sharding_lists_.insert(shardings(r_, plan.mesh)).first};
    // The other shardings are checked together with the schedules.
    here.choice.place_in(plan_);
    (here.shardings->empty() ? ShardingChoice::of(plan) : here.shardings->front()).place_in(plan_);
    plan_.micro_batch = plan.micro_batch;
    plan_.recompute = plan.recompute;
    const std::optional<Refusal>& refusal = refusals_.of(plan_);
    const std::size_t kinds = recomputes_.size();
    if (here.pipelines->empty()) {
      ++result_.considered;
      const auto why = [&] {
        return lacks_pipeline(r_, plan)
                   ? fmt::format("pp 1: has no pipeline for {}", r_.work.plan.schedule)
                   : fmt::format("pp {}: {} runs no pipelines", plan.mesh.pp(), r_.work.software.name);
      };
      reject("schedule", 1, "no pipelines", why, r_.has("pp"));
      if (r_.remembers) remember(plan, 1, {Fate::schedule, 0, why_index(why())});
      return;
    }
    if (refusal || batches.empty()) {
      const auto count = static_cast<std::int64_t>(here.pipelines->size() * here.shardings->size() * kinds *
                                                   std::max<std::size_t>(1, batches.size()));
      result_.considered += count;
      if (refusal)
        reject_shape(plan, *refusal, count);
      else
        reject("shape", count);
      if (r_.remembers)
        remember(plan, count,
                 {Fate::shape, 0,
                  why_index(refusal ? sentence(plan, *refusal)
                                    : fmt::format(
                                          "--global-batch {}: has no sequence for each of {} ranks along dp",
                                          plan.global_batch, plan.mesh.dp()))});
      return;
    }
    meshes_.push_back(here);
    std::vector<bool> fits(kinds, true);
    for (std::int64_t batch : batches) {
      plan_.micro_batch = batch;
      plan_.recompute = PipelineRecompute();
      // Recomputation only adds to it.
      const double least = model_.least_seconds(plan_);
      for (std::size_t kind = 0; kind < kinds; ++kind) {
        Group g{&meshes_.back(), batch, &recomputes_[kind]};
        g.place_in(plan_);
        // If a micro-batch is so large that no layer fits in memory while at work, its plans are not
        // examined: smaller ones come nearer to fitting, unless there is this one alone.
        constexpr std::int64_t usual = 64;
        if (batch > usual && fits[kind] && !r_.has("micro-batch"))
          fits[kind] = model_.least_at_work(plan_) <= usable_;
        if (!fits[kind]) {
          leave_out(here, plan_);
          continue;
        }
        g.least = by_memory() ? model_.least_seconds(plan_) : least;
        groups_.push_back(g);
      }
    }
  }

  void leave_out(const MeshPlans& mesh, const Plan& plan) {
    const auto leaves = static_cast<std::int64_t>(mesh.pipelines->size() * mesh.shardings->size());
    result_.considered += leaves;
    reject("memory", leaves);
    if (!r_.remembers) return;
    remember(plan, leaves, {Fate::memory, model_.least_at_work(plan), -1});
    result_.looked.back().micro_batch = plan.micro_batch;
    result_.looked.back().recompute = plan.recompute;
  }

  // Examines all schedules, splits and shardings of a mesh, micro-batch and recomputation.
  void group(const Group& g, bool can_win) {
    const MeshPlans& mesh = *g.mesh;
    const auto shardings = static_cast<std::int64_t>(mesh.shardings->size());
    const std::int64_t leaves = static_cast<std::int64_t>(mesh.pipelines->size()) * shardings;
    result_.considered += leaves;
    if (r_.remembers) {
      g.place_in(plan_);
      remember(plan_, leaves, {Fate::slower, g.least, -1});
      result_.looked.back().micro_batch = g.micro_batch;
      result_.looked.back().recompute = *g.recompute;
    }
    if (!can_win) return reject("slower", leaves);
    Outcome* outcomes = nullptr;  // of the pipeline, one for each sharding
    if (r_.remembers) {
      Looked& looked = result_.looked.back();
      looked.pipelines = *mesh.pipelines;
      looked.shardings = *mesh.shardings;
      looked.each.resize(static_cast<std::size_t>(leaves));
      outcomes = looked.each.data();
    }
    candidates_.clear();
    g.place_in(plan_);
    ShardingChoice::of(r_.work.plan).place_in(plan_);
    for (const PipelineChoice& pipeline : *mesh.pipelines) {
      Outcome* outcome = outcomes;
      if (outcomes != nullptr) outcomes += shardings;
      pipeline.place_in(plan_);
      std::string unfit = model_.schedule_problem(plan_);
      if (unfit.empty() && !r_.has("schedule"))
        if (const std::string rest = rest_of_groups(r_.work.software, plan_); !rest.empty())
          unfit = fmt::format("{} does not run {}, only whole groups of pp", r_.work.software.name, rest);
      if (!unfit.empty()) {
        reject("schedule", shardings, plan_.schedule, [&] { return summary(plan_) + ": " + unfit; });
        if (outcome != nullptr) std::fill(outcome, outcomes, Outcome{Fate::schedule, 0, why_index(unfit)});
        continue;
      }
      const double least = by_memory() ? 0 : model_.least_scheduled_seconds(plan_);
      if (least * below_rounding > worst_ranked()) {
        reject("slower", shardings);
        if (outcome != nullptr) std::fill(outcome, outcomes, Outcome{Fate::slower, least});
        continue;
      }
      if (plan_.balance_layers && model_.splits_evenly(plan_)) {
        if (!r_.work.plan.balance_layers) {
          reject("same", shardings);
          if (outcome != nullptr) std::fill(outcome, outcomes, Outcome{Fate::same});
          continue;
        }
        plan_.balance_layers = false;
      }
      for (const ShardingChoice& sharding : *mesh.shardings) {
        if (is_stage_1(sharding, *mesh.shardings)) {
          reject("same", 1);
          if (outcome != nullptr) *outcome++ = Outcome{Fate::same};
          continue;
        }
        sharding.place_in(plan_);
        const std::optional<Refusal>& refusal = refusals_.of(plan_);
        if (refusal)
          reject_shape(plan_, *refusal, 1);
        else
          leaf(g, {&pipeline, sharding, plan_.balance_layers, outcome});
        if (outcome == nullptr) continue;
        if (refusal) *outcome = {Fate::shape, 0, why_index(sentence(plan_, *refusal))};
        ++outcome;
      }
    }
    rank(g);
  }

  // Whether this is a ZeRO 2 that keeps whole gradients until a step's last microbatch: the same as stage 1,
  // if that is examined too.
  bool is_stage_1(const ShardingChoice& sharding, const std::vector<ShardingChoice>& all) {
    const ShardingChoice first{1, sharding.hsdp};
    const auto is_first = [&](const ShardingChoice& one) { return one.zero == 1 && one.hsdp == first.hsdp; };
    if (sharding.zero != 2 || std::none_of(all.begin(), all.end(), is_first)) return false;
    first.place_in(plan_);
    const GradientSums sums = gradient_sums(r_.work.software, plan_);
    sharding.place_in(plan_);
    return sums == gradient_sums(r_.work.software, plan_);
  }

  void leaf(const Group& g, Candidate candidate) {
    const double room = r_.work.machine.host_memory_bytes;
    if (plan_.offload != Offload::none && room > 0)
      if (const double held = model_.kept_on_host(plan_); held > room) {
        const std::string why =
            fmt::format("--offload {}: {} of the host's memory, which has {} for each device",
                        name_of(plan_.offload), format_device_memory(held), format_device_memory(room));
        reject("shape", 1, "host", [&] { return summary(plan_) + ": " + why; });
        if (candidate.outcome != nullptr) *candidate.outcome = {Fate::shape, 0, why_index(why)};
        return;
      }
    // The example of a schedule is the plan that comes nearest to fitting.
    const auto example = unfit_.find(plan_.schedule);
    // What is not recorded: seconds with which it is not ranked, and bytes with which it is neither the
    // nearest nor an example, nor given other recomputation on the rank with most.
    Enough enough;
    if (!r_.remembers) {
      enough.seconds = worst_ranked() / below_rounding / below_rounding;
      if (kinds_.empty() && result_.nearest && example != unfit_.end())
        enough.bytes = std::max({usable_, result_.nearest->bytes, example->second.look.bytes});
    }
    const Outlook look = model_.outlook(plan_, by_memory() ? 0 : usable_, enough);
    if (look.bytes <= usable_) {
      ++result_.feasible;
      candidate.bound = look.seconds;
      candidate.bytes = look.bytes;
      if (by_memory() && r_.work.software.is_this_trainer) candidate.bytes = model_.least_bytes(plan_);
      candidates_.push_back(candidate);
      // Overwritten if it is simulated.
      if (candidate.outcome != nullptr)
        *candidate.outcome =
            by_memory() ? Outcome{Fate::larger, look.bytes} : Outcome{Fate::outrun, look.seconds};
      return;
    }
    if (candidate.outcome != nullptr) *candidate.outcome = {Fate::memory, look.bytes};
    if (!result_.nearest || look.bytes < result_.nearest->bytes)
      result_.nearest = {plan_, look.bytes, usable_, {}};
    result_.rejected["memory"].count += 1;
    if (example == unfit_.end() || look.bytes < example->second.look.bytes)
      unfit_.insert_or_assign(plan_.schedule, Unfit{plan_, look});
    if (!kinds_.empty() && *g.recompute == PipelineRecompute() &&
        model_.may_fit(plan_, kinds_, static_cast<std::size_t>(look.rank), usable_))
      too_large_.emplace_back(&g, candidate);
  }

  // The predicted memory says that it does not fit. For this trainer that is an estimate, so the exact memory
  // is computed.
  void judge_nearest() {
    Nearest& n = *result_.nearest;
    Estimate e = model_.estimate(n.plan);
    n.memory = e.memory;
    n.bytes = static_cast<double>(e.memory.total());
    if (n.bytes > usable_ || e.seconds > most_seconds_) return;
    --result_.rejected["memory"].count;
    ++result_.feasible;
    result_.plans.push_back(std::move(e));
  }

  // A plan that does not fit with everything kept may fit if the ranks that hold most recompute some of it.
  // Such plans take longer than if everything were kept, and are examined last.
  void recompute_by_rank() {
    for (const auto& [g, candidate] : too_large_) {
      tell();
      if (!may_be_ranked(g->least)) break;
      place(*g, candidate);
      if (!may_be_ranked(model_.outlook(plan_).seconds)) continue;
      const auto chosen = model_.fitting_recompute(
          plan_, kinds_, std::vector(static_cast<std::size_t>(plan_.mesh.pp()), usable_));
      if (!chosen || is_searched_everywhere(*chosen)) continue;
      plan_.recompute = *chosen;
      const Outlook look = model_.outlook(plan_, usable_);
      if (look.bytes > usable_) continue;
      --result_.rejected["memory"].count;
      ++result_.feasible;
      if (candidate.outcome != nullptr) *candidate.outcome = {Fate::outrun, look.seconds};
      if (may_be_ranked(look.seconds)) simulate(plan_, candidate.outcome);
    }
  }

  // The most seconds with which a plan can still be among the first, or share a rank with one of them: of
  // plans that share a rank the one with least memory is shown, and the rank of the last plan may begin with
  // it. Plans that are found later can only lower this.
  double worst_ranked() const {
    return result_.plans.size() < top()
               ? most_seconds_
               : std::min(most_seconds_, result_.plans[top() - 1].seconds * (1 + tie));
  }
  // Whether more than `top` plans are at least as fast and as small: it cannot be among the first, nor be the
  // only one that shares the rank of the last of them.
  bool is_behind(double least_seconds, double bytes) const {
    std::size_t better = 0;
    for (const Estimate& e : result_.plans) {
      if (e.seconds > least_seconds * below_rounding) break;
      better += static_cast<double>(e.memory.total()) <= bytes;
    }
    return better > top();
  }

  bool by_memory() const { return r_.objective == Objective::memory; }
  std::size_t top() const { return static_cast<std::size_t>(r_.top); }

  // The same if all waiting plans fit: at most worst_ranked().
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
    return std::min(most_seconds_, seconds * (1 + tie));
  }

  bool may_be_ranked(double least_seconds) {
    if (least_seconds * below_rounding <= worst_hoped()) return true;
    settle();
    return least_seconds * below_rounding <= worst_ranked();
  }

  void place(const Group& g, const Candidate& candidate) {
    g.place_in(plan_);
    candidate.place_in(plan_);
  }

  // Computes the exact memory of waiting plans, and simulates plans that could be faster, fastest first: up
  // to `seconds`, and only what can be among the first.
  void advance(double seconds) {
    for (;; tell()) {
      const double waits = waiting_.empty() ? never : waiting_.begin()->first,
                   comes = later_.empty() ? never : later_.begin()->first * below_rounding,
                   next = std::min(waits, comes);
      if (next == never || next > std::min(seconds, worst_ranked())) return;
      if (waits <= comes) {
        walk(std::move(waiting_.extract(waiting_.begin()).mapped()));
        continue;
      }
      const auto [g, candidate] = later_.extract(later_.begin()).mapped();
      place(*g, candidate);
      simulate(plan_, candidate.outcome);
    }
  }
  // For ranking by memory with this trainer: in the order of the least bytes that plans hold.
  void walk_the_smallest() {
    const auto& plans = result_.plans;
    for (; !later_.empty(); tell()) {
      const auto [bytes, next] = *later_.begin();
      if (plans.size() == top() && bytes > static_cast<double>(plans.back().memory.total())) break;
      later_.erase(later_.begin());
      place(*next.first, next.second);
      if (plans.size() == top() &&
          model_.least_as_walked(plan_) > static_cast<double>(plans.back().memory.total()))
        continue;
      simulate(plan_, next.second.outcome);
    }
    later_.clear();
  }
  void settle() {
    advance(never);
    waiting_.clear();
    later_.clear();
  }

  void walk(Waiting waiting) {
    Estimate& e = waiting.estimate;
    if (!by_memory() && r_.work.software.is_this_trainer &&
        is_behind(e.seconds, model_.least_bytes(e.plan))) {
      if (waiting.outcome != nullptr) waiting.outcome->fate = Fate::behind;
      return;
    }
    const bool is_full = by_memory() && result_.plans.size() == top();
    const double most =
        is_full ? std::min(usable_, static_cast<double>(result_.plans.back().memory.total())) : usable_;
    model_.add_memory(e, most);
    if (static_cast<double>(e.memory.total()) > usable_) {  // only of this trainer
      if (waiting.outcome != nullptr)
        *waiting.outcome = {Fate::memory, static_cast<double>(e.memory.total())};
      make_room(std::move(e.plan), waiting.outcome);
      return;
    }
    if (static_cast<double>(e.memory.total()) > most) {
      if (waiting.outcome != nullptr)
        *waiting.outcome = {Fate::larger, static_cast<double>(e.memory.total())};
      return;
    }
    auto& plans = result_.plans;
    const auto better = [&](const Estimate& a, const Estimate& b) {
      const auto bytes_a = a.memory.total(), bytes_b = b.memory.total();
      return by_memory() ? std::tie(bytes_a, a.seconds) < std::tie(bytes_b, b.seconds)
                         : std::tie(a.seconds, bytes_a) < std::tie(b.seconds, bytes_b);
    };
    plans.insert(std::upper_bound(plans.begin(), plans.end(), e, better), std::move(e));
    while (plans.size() > top() && (by_memory() || plans.back().seconds > worst_ranked())) plans.pop_back();
  }

  // Sets the ranks; among plans that share one, those with least memory come first. When ranking by memory,
  // no two plans share a rank.
  void give_places() {
    auto& plans = result_.plans;
    auto& places = result_.places;
    for (auto first = plans.begin(); first != plans.end();) {
      const double limit = first->seconds * (1 + tie);
      auto last = std::next(first);
      while (!by_memory() && last != plans.end() && last->seconds <= limit) ++last;
      std::stable_sort(first, last, [](const Estimate& a, const Estimate& b) {
        return a.memory.total() < b.memory.total();
      });
      const Place place{static_cast<int>(first - plans.begin()) + 1, last - first > 1};
      places.insert(places.end(), static_cast<std::size_t>(last - first), place);
      first = last;
    }
    if (plans.size() > top()) plans.erase(plans.begin() + static_cast<std::ptrdiff_t>(top()), plans.end());
    places.resize(plans.size());
  }

  // Recomputes more on the ranks that hold too much.
  void make_room(Plan plan, Outcome* outcome) {
    --result_.feasible;
    const auto chosen = kinds_.empty() || by_memory()
                            ? std::nullopt
                            : model_.fitting_recompute(plan, kinds_, model_.room(plan, usable_));
    if (!chosen || is_searched_everywhere(*chosen)) return reject("memory", 1);
    plan.recompute = *chosen;
    ++result_.feasible;
    simulate(plan, outcome);
  }

  // Whether one of the search's own groups has this recomputation.
  bool is_searched_everywhere(const PipelineRecompute& r) const {
    return std::any_of(uniform_.begin(), uniform_.end(), [&](const Recompute& kind) { return r == kind; });
  }

  void simulate(const Plan& plan, Outcome* outcome) {
    Estimate e = model_.estimate_seconds(plan);
    ++result_.simulated;
    if (outcome != nullptr) *outcome = {Fate::simulated, e.seconds};
    if (e.seconds > (by_memory() ? most_seconds_ : worst_ranked())) return;
    if (by_memory() || !r_.work.software.is_this_trainer)
      walk({std::move(e), outcome});
    else
      waiting_.emplace(e.seconds, Waiting{std::move(e), outcome});
  }

  void rank(const Group& g) {
    std::stable_sort(candidates_.begin(), candidates_.end(), [&](const Candidate& a, const Candidate& b) {
      return by_memory() ? a.bytes < b.bytes : a.bound < b.bound;
    });
    const auto& plans = result_.plans;
    for (const Candidate& candidate : candidates_) {
      if (by_memory()
              ? plans.size() == top() && candidate.bytes > static_cast<double>(plans.back().memory.total())
              : candidate.bound * below_rounding > worst_ranked())
        break;
      if (r_.work.software.is_this_trainer) {
        later_.emplace(by_memory() ? candidate.bytes : candidate.bound, std::pair(&g, candidate));
        continue;
      }
      if (!by_memory() && is_behind(candidate.bound, candidate.bytes)) {
        if (candidate.outcome != nullptr) candidate.outcome->fate = Fate::behind;
        continue;
      }
      candidate.place_in(plan_);
      tell();
      simulate(plan_, candidate.outcome);
    }
  }

  void write_examples() {
    for (const auto& [schedule, unfit] : unfit_)
      result_.rejected["memory"].examples.push_back(
          fmt::format("{}: {:.3g} in-flight activations, {} on rank {}, {} more than {} ({})", schedule,
                      unfit.look.in_flight, format_device_memory(unfit.look.bytes), unfit.look.rank,
                      format_device_memory(unfit.look.bytes - usable_), format_device_memory(usable_),
                      summary(unfit.plan)));
  }

  struct Unfit {
    Plan plan;
    Outlook look;
  };
  std::map<std::string, Unfit> unfit_;

  const SearchRequest& r_;
  const std::string what_ = counted(r_.gpus, "GPU");
  double done_ = -1;  // not known yet
  StepModel& model_;
  double most_seconds_, usable_;
  const MeshesBesideZero beside_zero_{r_};
  ShapeRefusals refusals_{runner_of(r_.work.software)};
  // What all ranks recompute, and what each of them may choose from; empty: they do not choose.
  std::vector<Recompute> uniform_{Recompute::none, Recompute::selective, Recompute::full}, kinds_;
  std::vector<PipelineRecompute> recomputes_;  // of groups
  Plan plan_ = open_plan(r_);                  // the one being examined
  SearchResult result_;
  std::set<std::string> examples_;
  std::map<std::string, int> whys_;
  std::set<std::vector<PipelineChoice>> pipeline_lists_;
  std::set<std::vector<ShardingChoice>> sharding_lists_;
  std::deque<MeshPlans> meshes_;
  std::vector<Group> groups_;
  std::vector<Candidate> candidates_;                          // of a group
  std::vector<std::pair<const Group*, Candidate>> too_large_;  // with everything kept
  // By seconds: plans that may be among the first, whose exact memory is not known yet. Only for this
  // trainer: computing it takes longer than a simulation.
  std::multimap<double, Waiting> waiting_;
  // By bound, or by bytes: plans to simulate once no better ones are left. Only for this trainer.
  std::multimap<double, std::pair<const Group*, Candidate>> later_;
};

}  // namespace

// Joins two searches over disjoint sets of plans: the better plans, and what both examined.
static SearchResult joined(SearchResult first, SearchResult second, Objective objective) {
  const auto figure = [objective](const SearchResult& r) {
    const Estimate& best = r.plans.front();
    return objective == Objective::memory ? static_cast<double>(best.memory.total()) : best.seconds;
  };
  if (!first.plans.empty() && (second.plans.empty() || figure(first) <= figure(second))) {
    std::swap(first.plans, second.plans);
    std::swap(first.places, second.places);
  }
  second.considered += first.considered;
  second.feasible += first.feasible;
  second.simulated += first.simulated;
  second.seconds += first.seconds;
  for (const auto& [reason, rejected] : first.rejected) {
    Rejected& both = second.rejected[reason];
    both.count += rejected.count;
    const bool goes_first = rejected.is_asked || !both.is_asked;
    both.examples.insert(goes_first ? both.examples.begin() : both.examples.end(), rejected.examples.begin(),
                         rejected.examples.end());
    both.is_asked |= rejected.is_asked;
  }
  if (!second.plans.empty())
    second.nearest.reset();
  else if (first.nearest && (!second.nearest || first.nearest->bytes < second.nearest->bytes))
    second.nearest = std::move(first.nearest);
  const auto before = static_cast<int>(first.whys.size());
  first.whys.insert(first.whys.end(), second.whys.begin(), second.whys.end());
  second.whys = std::move(first.whys);
  for (Looked& looked : second.looked) {
    if (looked.all.why >= 0) looked.all.why += before;
    for (Outcome& one : looked.each)
      if (one.why >= 0) one.why += before;
  }
  first.looked.insert(first.looked.end(), std::make_move_iterator(second.looked.begin()),
                      std::make_move_iterator(second.looked.end()));
  second.looked = std::move(first.looked);
  return second;
}
SearchResult search(const SearchRequest& request, double most_seconds) {
  check_request(request);
  StepModel model(request.work, request.shelf);
  SearchResult result = Search(request, model, most_seconds).run();
  // Nothing is known of plans that took too long.
  if (!result.plans.empty() || !result.nearest || most_seconds < 1e300) return result;
  for (const SearchRequest& with : offloading(request))
    result = joined(std::move(result), Search(with, model, most_seconds).run(), request.objective);
  return result;
}

std::optional<Estimate> best_within(SearchRequest request, double most_seconds) {
  request.top = 1;
  request.remembers = false;
  request.progress = {};
  try {
    SearchResult result = search(request, most_seconds);
    if (result.plans.empty()) return {};
    return std::move(result.plans.front());
  } catch (const RequestError&) {
    return {};
  }
}

std::optional<LeastGpus> least_gpus(SearchRequest request, double target_seconds) {
  check_links(request);
  const int most = request.gpus;
  const std::int64_t all = request.given_ranks();
  const bool whole = request.gives_mesh();
  if (all > most) check_request(request);
  for (std::int64_t gpus = all; gpus <= (whole ? std::min<std::int64_t>(all, most) : most); gpus += all) {
    request.gpus = static_cast<int>(gpus);
    SearchRequest one = request;
    one.top = 1;
    if (gpus == all) check_request(one);
    // Each number has a model of its own: how the worst group of ranks lies on nodes depends on all of them.
    StepModel model(request.work, request.shelf);
    if (!Search(one, model, target_seconds).run().plans.empty())
      return LeastGpus{request.gpus, Search(request, model, target_seconds).run()};
  }
  return {};
}

}  // namespace echelon
