#include "schedule/zb_auto.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <utility>

#include "base/error.h"
#include "schedule/schedules.h"
#include "schedule/zb_auto_orders.h"

namespace echelon {
namespace {

using namespace zb_auto_detail;

// The sizes that are searched exactly: the limits take about half a second, and nearly all cases end sooner.
constexpr std::size_t most_exact_instructions = 160;
constexpr std::int64_t most_exact_nodes = 150'000;

template <class T>
void check_count(const char* flag, const std::vector<T>& list, int ranks) {
  if (list.size() != 1 && list.size() != static_cast<std::size_t>(ranks))
    refuse("{}: has {} entries; zb-auto takes 1 for all ranks, or {}, one for each", flag, list.size(),
           ranks);
}

Problem make_problem(int ranks, int microbatches, const AutoCosts& costs) {
  if (ranks < 1) refuse("--pp {}: zb-auto needs at least 1", ranks);
  if (microbatches < 1) refuse_microbatches(microbatches, "zb-auto needs at least 1");
  check_count("--stage-times", costs.times.stages, ranks);
  check_count("--stage-memory", costs.memory, ranks);
  if (!costs.limit.empty()) check_count("--activation-limit", costs.limit, ranks);
  const auto usable = [](double x) { return std::isfinite(x) && x >= 0; };
  if (!usable(costs.times.message)) refuse("--comm-time {}: must be 0 or more", costs.times.message);

  Problem problem{microbatches, costs.times.message, {}};
  for (std::size_t r = 0; r < static_cast<std::size_t>(ranks); ++r) {
    const StageTimes& t = costs.times.of(static_cast<int>(r));
    if (!usable(t.forward) || !usable(t.backward_input) || !usable(t.backward_weight))
      refuse("--stage-times {},{},{} of stage {}: must be 0 or more", t.forward, t.backward_input,
             t.backward_weight, r);
    const StageMemory& m = costs.memory[costs.memory.size() == 1 ? 0 : r];
    Rank rank{t.forward, t.backward_input, t.backward_weight, m.forward, m.forward + m.backward_input};
    if (std::abs(rank.keep) <= 1e-9 * std::abs(rank.hold)) rank.keep = 0;
    if (!(std::isfinite(rank.hold) && rank.hold > 0 && rank.keep >= 0 && std::isfinite(rank.keep) &&
          std::abs(rank.keep + m.backward_weight) <= 1e-9 * (rank.hold + rank.keep)))
      refuse("--stage-memory {},{},{} of stage {}: F must add, B free no more than that, and the sum be 0",
             m.forward, m.backward_input, m.backward_weight, r);
    if (!costs.limit.empty()) rank.limit = costs.limit[costs.limit.size() == 1 ? 0 : r];
    const double least = std::max(rank.hold, rank.keep);
    if (!(rank.limit + slack(rank) >= least))
      refuse("--activation-limit {} of rank {}: one microbatch needs {}", rank.limit, r, least);
    // The last B in flight needs its own memory too, after every W that can run has run.
    const double most = std::floor((rank.limit - std::max(0.0, rank.keep - rank.hold)) / rank.hold + 1e-9);
    rank.most_forwards = static_cast<int>(std::clamp(most, 1.0, static_cast<double>(microbatches)));
    problem.ranks.push_back(rank);
  }
  for (std::size_t r = 1; r < problem.ranks.size(); ++r)
    problem.ranks[r].head = problem.ranks[r - 1].head + problem.ranks[r - 1].f + problem.message;
  for (std::size_t r = problem.ranks.size() - 1; r-- > 0;) {
    const Rank& next = problem.ranks[r + 1];
    problem.ranks[r].round_trip = next.round_trip + next.f + next.b + 2 * problem.message;
  }
  return problem;
}

Orders orders_of(const Schedule& schedule) {
  Orders orders;
  for (const auto& list : schedule.ranks) {
    Order& order = orders.emplace_back();
    for (const Instruction& i : list) {
      order.push_back(i.op == Op::BW ? Op::B : i.op);
      if (i.op == Op::BW) order.push_back(Op::W);
    }
  }
  return orders;
}

bool keeps_limits(const Problem& problem, const Orders& orders) {
  for (std::size_t r = 0; r < orders.size(); ++r)
    if (!keeps_limit(problem.ranks[r], orders[r])) return false;
  return true;
}

// Whether every B follows its F and every W its B.
bool in_order(const Order& order) {
  int forwards = 0, backwards = 0, weights = 0;
  for (Op op : order) {
    ++(op == Op::F ? forwards : op == Op::B ? backwards : weights);
    if (backwards > forwards || weights > backwards) return false;
  }
  return true;
}

// Local search: moves single instructions on one rank and keeps moves that are no worse, until the bound is
// reached.
void improve(const Problem& problem, const Bound& bound, Orders& orders, Cost& cost, std::int64_t work) {
  std::mt19937 random(1);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
  const std::size_t length = orders[0].size();
  const auto per_trial = static_cast<std::int64_t>(orders.size() * length);
  for (; work > 0 && !reaches(cost, bound); work -= per_trial) {
    Order& order = orders[below(orders.size())];
    const std::size_t from = below(length), reach = 1 + below(order[from] == Op::W ? length : 6);
    const std::size_t to = below(2) == 0 ? from - std::min(from, reach) : std::min(length - 1, from + reach);
    const Order before = order;
    const auto at = [&](std::size_t i) { return order.begin() + static_cast<std::ptrdiff_t>(i); };
    if (from < to)
      std::rotate(at(from), at(from + 1), at(to + 1));
    else
      std::rotate(at(to), at(from), at(from + 1));
    const Rank& rank = problem.ranks[static_cast<std::size_t>(&order - orders.data())];
    const bool legal = order != before && in_order(order) && keeps_limit(rank, order);
    const Cost changed = legal ? cost_of(problem, orders) : Cost{};
    if (!legal || changed.span == never || cost < changed)
      order = before;
    else
      cost = changed;
  }
}

Schedule schedule_of(const Problem& problem, const Orders& orders) {
  Schedule schedule{"zb-auto", static_cast<int>(orders.size()), problem.microbatches, {}};
  for (int r = 0; r < schedule.num_stages; ++r) {
    auto& list = schedule.ranks.emplace_back();
    std::array<int, 3> next{};
    for (Op op : orders[static_cast<std::size_t>(r)])
      list.push_back({op, r, next[op == Op::F ? 0 : op == Op::B ? 1 : 2]++});
  }
  return schedule;
}

}  // namespace

AutoResult zb_auto(int ranks, int microbatches, const AutoCosts& costs) {
  const Problem problem = make_problem(ranks, microbatches, costs);
  Bound bound = lower_bound(problem);

  Orders best;
  Cost best_cost;
  const auto offer = [&](Orders orders) {
    if (orders.empty() || !keeps_limits(problem, orders)) return;
    const Cost cost = cost_of(problem, orders);
    if (!(cost < best_cost)) return;
    best_cost = cost;
    best = std::move(orders);
  };
  offer(orders_of(one_f_one_b(ranks, microbatches)));
  offer(orders_of(zb_h1(ranks, microbatches)));
  offer(orders_of(zb_h2(ranks, microbatches)));
  // One microbatch at a time through the whole pipeline: this keeps any limit that holds one.
  offer(Orders(problem.ranks.size(), [&] {
    Order order;
    for (int m = 0; m < microbatches; ++m) order.insert(order.end(), {Op::F, Op::B, Op::W});
    return order;
  }()));

  for (const Policy& policy : policies(problem, 12'000'000)) {
    if (reaches(best_cost, bound)) break;
    offer(orders_by(problem, policy));
  }
  check(!best.empty(), "zb-auto found no order that keeps the memory limit");
  bool span_proven = false, makespan_proven = false;
  if (problem.ranks.size() * 3 * static_cast<std::size_t>(microbatches) <= most_exact_instructions) {
    // Moves reduce the span, which prunes the search most.
    improve(problem, {bound.span, never}, best, best_cost, 24'000'000);
    if (!reaches(best_cost, bound)) {
      span_proven = makespan_proven = search_exactly(problem, bound, best, most_exact_nodes);
      best_cost = cost_of(problem, best);
    }
  } else {
    improve(problem, bound, best, best_cost, 24'000'000);
  }
  if (span_proven) bound.span = best_cost.span;
  span_proven |= best_cost.span <= bound.span * (1 + 1e-9);
  makespan_proven |= reaches(best_cost, bound);
  check(best_cost.span >= bound.span * (1 - 1e-9) && best_cost.makespan >= bound.makespan * (1 - 1e-9),
        "zb-auto beats its own lower bound");
  AutoResult result;
  result.schedule = schedule_of(problem, best);
  result.span = best_cost.span;
  result.makespan = best_cost.makespan;
  result.optimal = span_proven;
  result.makespan_optimal = makespan_proven;
  for (std::size_t r = 0; r < best.size(); ++r)
    result.peak_memory.push_back(peak_memory(problem.ranks[r], best[r]));
  // Equal bounds may differ by rounding.
  result.lower_bound = std::min(bound.span, best_cost.span);
  result.makespan_lower_bound = std::min(bound.makespan, best_cost.makespan);
  return result;
}

Schedule zb_auto(int ranks, int microbatches) {
  AutoCosts costs;
  costs.limit = {static_cast<double>(ranks)};
  return zb_auto(ranks, microbatches, costs).schedule;
}

}  // namespace echelon
