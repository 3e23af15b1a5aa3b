// Orders constructed by rules, as candidates for the search.
#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "schedule/first_rank.h"
#include "schedule/zb_auto_orders.h"

namespace echelon::zb_auto_detail {
namespace {

// Runs all ranks at once; the instruction that can start first is always next. Empty if the policy gets
// stuck.
class ListScheduler {
 public:
  ListScheduler(const Problem& problem, const Policy& policy)
      : problem_(problem),
        policy_(policy),
        states_(problem.ranks.size()),
        first_(problem.ranks.size()),
        orders_(problem.ranks.size()) {
    const auto all = static_cast<std::size_t>(problem.microbatches);
    for (Order& order : orders_) order.reserve(3 * all);
    for (State& s : states_)
      for (auto& list : s.arrival) list.reserve(all);
    states_[0].arrival[0].assign(static_cast<std::size_t>(problem.microbatches), 0);
  }

  Orders run() {
    const std::size_t total = states_.size() * 3 * static_cast<std::size_t>(problem_.microbatches);
    for (std::size_t r = 0; r < states_.size(); ++r) decide(r);
    for (std::size_t step = 0; step < total; ++step) {
      if (first_.begin() == never) return {};
      execute(first_.rank());
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

  void decide(std::size_t r) {
    states_[r].choice = choose(r);
    first_.set(r, states_[r].choice.begin);
  }

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
    decide(r);
  }
  void hand(std::size_t to, int kind, double end) {
    State& s = states_[to];
    auto& list = s.arrival[kind];
    list.push_back(std::max(end, list.empty() ? 0.0 : list.back()) + problem_.message);
    decide(to);
  }

  const Problem& problem_;
  const Policy& policy_;
  std::vector<State> states_;
  FirstRank first_;
  Orders orders_;
};

// By rank, the forwards before the first backward: those of the published patterns, and those that fill the
// round trip.
std::set<std::vector<int>> warm_ups(const Problem& problem) {
  const int ranks = static_cast<int>(problem.ranks.size());
  std::set<std::vector<int>> all;
  const auto add = [&](const auto& of_rank) {
    std::vector<int> list;
    for (int r = 0; r < ranks; ++r) {
      const Rank& k = problem.ranks[static_cast<std::size_t>(r)];
      const double wanted = std::clamp(of_rank(r, k), 1.0, static_cast<double>(k.most_forwards));
      // A rank cannot have more than the one before it passes on.
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

std::vector<Policy> all_policies(const Problem& problem) {
  std::vector<int> most;
  for (const Rank& rank : problem.ranks) most.push_back(rank.most_forwards);
  const auto starts = warm_ups(problem);
  std::vector<Policy> all;
  for (double gap : {1.0, 0.5, 1e-9, never})
    for (const auto& warm_up : starts) {
      all.push_back({warm_up, true, warm_up, gap});
      all.push_back({warm_up, false, warm_up, gap});
      all.push_back({warm_up, false, most, gap});
    }
  return all;
}

}  // namespace

std::vector<Policy> policies(const Problem& problem, std::int64_t most_instructions) {
  std::vector<Policy> all = all_policies(problem);
  const auto affordable = [&](std::int64_t microbatches) {
    const std::int64_t each = 3 * microbatches * static_cast<std::int64_t>(problem.ranks.size());
    return static_cast<std::size_t>(std::max<std::int64_t>(4, most_instructions / each));
  };
  if (all.size() <= affordable(problem.microbatches)) return all;
  // A policy's quality shows after a few round trips.
  Problem sample = problem;
  const auto least = 2 * static_cast<std::int64_t>(problem.ranks.size());
  sample.microbatches = static_cast<int>(std::min<std::int64_t>(problem.microbatches, least));
  for (Rank& rank : sample.ranks) rank.most_forwards = std::min(rank.most_forwards, sample.microbatches);
  all.resize(std::min(all.size(), affordable(sample.microbatches)));
  std::vector<std::pair<Cost, std::size_t>> ranking;
  for (std::size_t k = 0; k < all.size(); ++k) {
    const Orders orders = orders_by(sample, all[k]);
    ranking.emplace_back(orders.empty() ? Cost{} : cost_of(sample, orders), k);
  }
  std::stable_sort(ranking.begin(), ranking.end(),
                   [](const auto& a, const auto& b) { return a.first.span < b.first.span; });
  ranking.resize(std::min(ranking.size(), affordable(problem.microbatches)));
  std::vector<Policy> best;
  for (const auto& [cost, k] : ranking) best.push_back(all[k]);
  return best;
}

Orders orders_by(const Problem& problem, const Policy& policy) {
  return ListScheduler(problem, policy).run();
}

}  // namespace echelon::zb_auto_detail
