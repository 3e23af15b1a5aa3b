#include "schedule/zb_auto.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <set>
#include <utility>

#include "base/error.h"
#include "schedule/schedules.h"
#include "schedule/zb_auto_orders.h"

namespace echelon {
namespace {

using namespace zb_auto_detail;

template <class T>
void check_count(const char* field, const std::vector<T>& list, int ranks) {
  if (list.size() != 1 && list.size() != static_cast<std::size_t>(ranks))
    refuse("zb-auto: {} entries of {}; legal: 1 for all, or {}, one for each rank", list.size(), field,
           ranks);
}

Problem make_problem(int ranks, int microbatches, const AutoCosts& costs) {
  if (ranks < 1) refuse("--pp {}: zb-auto needs at least 1", ranks);
  if (microbatches < 1) refuse("--microbatches {}: zb-auto needs at least 1", microbatches);
  check_count("stage times", costs.times.stages, ranks);
  check_count("stage memory", costs.memory, ranks);
  if (!costs.limit.empty()) check_count("memory limit", costs.limit, ranks);
  const auto usable = [](double x) { return std::isfinite(x) && x >= 0; };
  if (!usable(costs.times.message))
    refuse("zb-auto: message time {}: must be 0 or more", costs.times.message);

  Problem problem{microbatches, costs.times.message, {}};
  for (std::size_t r = 0; r < static_cast<std::size_t>(ranks); ++r) {
    const StageTimes& t = costs.times.of(static_cast<int>(r));
    if (!usable(t.forward) || !usable(t.backward_input) || !usable(t.backward_weight))
      refuse("zb-auto: times {}, {}, {} of stage {}: must be 0 or more", t.forward, t.backward_input,
             t.backward_weight, r);
    const StageMemory& m = costs.memory[costs.memory.size() == 1 ? 0 : r];
    Rank rank{t.forward, t.backward_input, t.backward_weight, m.forward, m.forward + m.backward_input};
    if (std::abs(rank.keep) <= 1e-9 * std::abs(rank.hold)) rank.keep = 0;
    if (!(std::isfinite(rank.hold) && rank.hold > 0 && rank.keep >= 0 && std::isfinite(rank.keep) &&
          std::abs(rank.keep + m.backward_weight) <= 1e-9 * (rank.hold + rank.keep)))
      refuse("zb-auto: memory {}, {}, {} of stage {}: F must add, B free no more than that, and the sum be 0",
             m.forward, m.backward_input, m.backward_weight, r);
    if (!costs.limit.empty()) rank.limit = costs.limit[costs.limit.size() == 1 ? 0 : r];
    const double least = std::max(rank.hold, rank.keep);
    if (!(rank.limit + slack(rank) >= least))
      refuse("zb-auto: memory limit {} of rank {}: one microbatch needs {}", rank.limit, r, least);
    // The last B of those in flight needs its own memory too, after every W that can run has run.
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

// How the list scheduler below chooses.
struct Policy {
  std::vector<int> warm_up;  // Fs before the first B of each rank
  bool alternate = true;     // then one B, one F in turn; else whichever can start first, never more than...
  std::vector<int> cap;      // ...these between F and B
  double gap = 1;  // a W fills a gap of at least this part of its time; never: only when memory is short
};

// Runs all ranks at once, always the instruction that starts first; empty when the policy gets stuck.
class ListScheduler {
 public:
  ListScheduler(const Problem& problem, const Policy& policy)
      : problem_(problem), policy_(policy), states_(problem.ranks.size()), orders_(problem.ranks.size()) {
    for (State& s : states_)
      for (auto& list : s.arrival) list.reserve(static_cast<std::size_t>(problem.microbatches));
    states_[0].arrival[0].assign(static_cast<std::size_t>(problem.microbatches), 0);
  }

  Orders run() {
    const std::size_t total = states_.size() * 3 * static_cast<std::size_t>(problem_.microbatches);
    for (std::size_t r = 0; r < states_.size(); ++r) states_[r].choice = choose(r);
    for (std::size_t step = 0; step < total; ++step) {
      std::size_t r = 0;
      for (std::size_t other = 1; other < states_.size(); ++other)
        if (states_[other].choice.begin < states_[r].choice.begin) r = other;
      if (states_[r].choice.begin == never) return {};
      execute(r);
    }
    return std::move(orders_);
  }

 private:
  struct Choice {
    Op op = Op::F;
    double begin = never;
  };
  struct State {
    int forwards = 0, backwards = 0, weights = 0;
    double free = 0, held = 0;
    std::vector<double> arrival[2];
    Choice choice;
  };

  Choice choose(std::size_t r) const {
    const State& s = states_[r];
    const Rank& k = problem_.ranks[r];
    const int all = problem_.microbatches;
    const double room = k.limit + slack(k) - s.held;
    const bool can_free = s.backwards > s.weights;
    const bool forward_left = s.forwards < all && s.forwards - s.backwards < k.most_forwards;
    const bool backward_left = s.backwards < s.forwards;
    const auto arrives = [&](int kind, int m) {
      const auto& list = s.arrival[kind];
      return static_cast<std::size_t>(m) < list.size() ? std::max(s.free, list[static_cast<std::size_t>(m)])
                                                       : never;
    };
    const double forward = forward_left ? arrives(0, s.forwards) : never;
    const double backward = !backward_left            ? never
                            : r + 1 == states_.size() ? s.free
                                                      : arrives(1, s.backwards);

    Choice next;
    if (s.backwards == 0 && s.forwards < policy_.warm_up[r])
      next = {Op::F, forward};
    else if (policy_.alternate)
      next = s.forwards == all || s.forwards - s.backwards >= policy_.warm_up[r] ? Choice{Op::B, backward}
                                                                                 : Choice{Op::F, forward};
    else if (forward < backward && s.forwards - s.backwards < policy_.cap[r] && (room >= k.hold || can_free))
      next = {Op::F, forward};
    else
      next = {Op::B, backward};

    if (!can_free) {
      const double needs = next.op == Op::F ? k.hold : std::max(0.0, k.keep - k.hold);
      if (room < needs) return {};
      return next;
    }
    const Choice weight{Op::W, s.free};
    if (next.op == Op::F ? room < k.hold : room < k.keep - k.hold) return weight;
    if (next.begin > s.free && next.begin - s.free >= policy_.gap * k.w * (1 - 1e-9) &&
        (policy_.gap != never || (s.forwards == all && s.backwards == all)))
      return weight;
    return next;
  }

  void execute(std::size_t r) {
    State& s = states_[r];
    const Rank& k = problem_.ranks[r];
    const Choice choice = s.choice;
    orders_[r].push_back(choice.op);
    if (choice.op == Op::F) {
      s.free = choice.begin + k.f;
      s.held += k.hold;
      ++s.forwards;
      if (r + 1 < states_.size()) hand(r + 1, 0, s.free);
    } else if (choice.op == Op::B) {
      s.free = choice.begin + k.b;
      s.held += k.keep - k.hold;
      ++s.backwards;
      if (r > 0) hand(r - 1, 1, s.free);
    } else {
      s.free = choice.begin + k.w;
      s.held -= k.keep;
      ++s.weights;
    }
    s.choice = choose(r);
  }
  void hand(std::size_t to, int kind, double end) {
    State& s = states_[to];
    auto& list = s.arrival[kind];
    list.push_back(std::max(end, list.empty() ? 0.0 : list.back()) + problem_.message);
    s.choice = choose(to);
  }

  const Problem& problem_;
  const Policy& policy_;
  std::vector<State> states_;
  Orders orders_;
};

// Forwards before the first backward, of each rank: the published patterns, and those that fill the round
// trip.
std::set<std::vector<int>> warm_ups(const Problem& problem) {
  const int ranks = static_cast<int>(problem.ranks.size());
  std::set<std::vector<int>> all;
  const auto add = [&](const auto& of_rank) {
    std::vector<int> list;
    for (int r = 0; r < ranks; ++r) {
      const Rank& k = problem.ranks[static_cast<std::size_t>(r)];
      const double wanted = std::clamp(of_rank(r, k), 1.0, static_cast<double>(k.most_forwards));
      // A rank cannot have more than the one before hands on.
      list.push_back(r == 0 ? static_cast<int>(wanted) : std::min(static_cast<int>(wanted), list.back()));
    }
    all.insert(list);
  };
  add([&](int r, const Rank&) { return static_cast<double>(ranks - r); });
  add([&](int r, const Rank&) { return static_cast<double>(2 * (ranks - r) - 1); });
  add([&](int, const Rank& k) { return static_cast<double>(k.most_forwards); });
  for (double shift : {0.0, 0.5, 0.999, 1.5, 2.0}) {
    const double first = problem.ranks[0].most_forwards;
    const double most = std::min(first, 2.0 * ranks - 1);
    for (double top : {first, most})
      add([&](int r, const Rank&) {
        return 1 + std::floor((top - 1) * (ranks - 1 - r) / std::max(1, ranks - 1) + shift);
      });
    add([&](int, const Rank& k) { return 1 + std::floor(k.round_trip / std::max(k.f, 1e-300) + shift); });
    add([&](int, const Rank& k) {
      return 1 + std::floor(k.round_trip / std::max(k.f + k.b, 1e-300) + shift);
    });
    add([&](int, const Rank& k) {
      return 1 + std::floor(k.round_trip / std::max(k.f + k.b + k.w, 1e-300) + shift);
    });
  }
  return all;
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

// Every B after its F and every W after its B.
bool in_order(const Order& order) {
  int forwards = 0, backwards = 0, weights = 0;
  for (Op op : order) {
    ++(op == Op::F ? forwards : op == Op::B ? backwards : weights);
    if (backwards > forwards || weights > backwards) return false;
  }
  return true;
}

// Moves single instructions on one rank, and keeps what is no worse.
void improve(const Problem& problem, const Bound& bound, Orders& orders, Cost& cost, std::int64_t work) {
  std::mt19937 random(1);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
  const std::size_t length = orders[0].size();
  const auto per_trial = static_cast<std::int64_t>(orders.size() * length);
  for (; work > 0 && bound.span * (1 + 1e-9) < cost.span; work -= per_trial) {
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
  const std::size_t instructions = problem.ranks.size() * 3 * static_cast<std::size_t>(microbatches);

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
  // One microbatch at a time through the whole pipeline: keeps any limit that holds one.
  offer(Orders(problem.ranks.size(), [&] {
    Order order;
    for (int m = 0; m < microbatches; ++m) order.insert(order.end(), {Op::F, Op::B, Op::W});
    return order;
  }()));

  // Enough policies for the best of them to be good, fewer where one alone takes long.
  std::int64_t work = 120'000'000;
  const auto tried = [&](const Policy& policy) {
    work -= static_cast<std::int64_t>(instructions * (8 + problem.ranks.size()));
    if (work > 0) offer(ListScheduler(problem, policy).run());
  };
  const auto done = [&] {
    return best_cost.span <= bound.span * (1 + 1e-9) && best_cost.makespan <= bound.makespan * (1 + 1e-9);
  };
  const auto starts = warm_ups(problem);
  for (double gap : {1.0, 0.5, 1e-9, never})
    for (const auto& warm_up : starts) {
      if (done()) break;
      tried({warm_up, true, warm_up, gap});
      tried({warm_up, false, warm_up, gap});
      std::vector<int> most;
      for (const Rank& rank : problem.ranks) most.push_back(rank.most_forwards);
      tried({warm_up, false, most, gap});
    }
  check(!best.empty(), "zb-auto found no order that keeps the memory limit");
  improve(problem, bound, best, best_cost, 24'000'000);

  bool exact = best_cost.span <= bound.span * (1 + 1e-9);
  if (!exact && instructions <= 160) {
    exact = search_exactly(problem, bound.span, best, 150'000);
    best_cost = cost_of(problem, best);
    if (exact) bound.span = best_cost.span;
  }
  check(best_cost.span >= bound.span * (1 - 1e-9) && best_cost.makespan >= bound.makespan * (1 - 1e-9),
        "zb-auto beats its own lower bound");
  AutoResult result{schedule_of(problem, best), best_cost.span, best_cost.makespan, 0, 0, exact};
  // Equal bounds may differ by rounding.
  result.lower_bound = std::min(bound.span, best_cost.span);
  result.makespan_lower_bound = std::min(bound.makespan, best_cost.makespan);
  return result;
}

}  // namespace echelon
