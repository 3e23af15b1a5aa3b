#include "schedule/balance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/split.h"
#include "schedule/balance_problem.h"

namespace echelon {
namespace {

using namespace balance_detail;
using std::size_t;

BalanceProblem make_problem(const Schedule& schedule, const std::vector<double>& layers, double first_extra,
                            double last_extra, const std::vector<double>& in_first) {
  const auto sums_of = [](const std::vector<double>& costs) {
    std::vector<double> sums{0};
    for (double cost : costs) {
      check(std::isfinite(cost) && cost >= 0, "a layer's cost");
      sums.push_back(sums.back() + cost);
    }
    return sums;
  };
  BalanceProblem problem;
  problem.before = sums_of(layers);
  problem.before_in_first = sums_of(in_first);
  check(std::isfinite(first_extra) && first_extra >= 0 && std::isfinite(last_extra) && last_extra >= 0,
        "a stage's extra cost");
  problem.extra.assign(static_cast<size_t>(schedule.num_stages), 0);
  problem.extra.front() += first_extra;
  problem.extra.back() += last_extra;
  for (const auto& list : schedule.ranks) {
    std::map<size_t, double> forwards;
    for (const Instruction& i : list)
      if (i.op == Op::F) ++forwards[static_cast<size_t>(i.stage)];
    Shares shares;
    for (const auto& [stage, count] : forwards) shares.push_back({stage, count / schedule.num_microbatches});
    if (shares.empty()) continue;
    problem.ranks.push_back(shares);
    ++problem.num_ranks;
  }
  std::sort(problem.ranks.begin(), problem.ranks.end());
  problem.ranks.erase(std::unique(problem.ranks.begin(), problem.ranks.end()), problem.ranks.end());
  return problem;
}

// The mean over ranks; and of each rank its least, one layer in each stage.
double simple_bound(const BalanceProblem& problem) {
  const double all =
      problem.before_in_first.back() + std::accumulate(problem.extra.begin(), problem.extra.end(), 0.0);
  double bound = all / static_cast<double>(problem.num_ranks);
  if (problem.num_stages() == 1) return bound;
  for (const Shares& rank : problem.ranks) {
    double least = 0;
    for (const Share& share : rank) {
      // The stage has one of these layers: so many stages are before it and after it.
      const size_t last = problem.num_layers() - (problem.num_stages() - 1 - share.stage);
      double cheapest = std::numeric_limits<double>::infinity();
      const size_t from = share.stage + 1 == problem.num_stages() ? last - 1 : share.stage;
      const size_t to = share.stage == 0 ? 1 : last;
      for (size_t k = from; k < to; ++k) cheapest = std::min(cheapest, problem.cost(share.stage, k, k + 1));
      least += share.part * cheapest;
    }
    bound = std::max(bound, least);
  }
  return bound;
}

// Moves single layers from stage to stage, all boundaries between them with it: first as long as the slowest
// rank gets faster, then towards the even split as long as it gets no slower.
void improve(const BalanceProblem& problem, Counts& counts) {
  const size_t stages = counts.size();
  double best = slowest(problem, counts);
  const auto moved = [&](size_t from, size_t to) {
    --counts[from];
    ++counts[to];
    const double now = slowest(problem, counts);
    ++counts[from];
    --counts[to];
    return now;
  };
  for (bool more = true; more;) {
    more = false;
    double least = best * (1 - rounding);
    size_t best_from = 0, best_to = 0;
    for (size_t from = 0; from < stages; ++from)
      for (size_t to = 0; to < stages && counts[from] > 1; ++to) {
        const double now = from == to ? best : moved(from, to);
        if (now >= least) continue;
        least = now;
        best_from = from;
        best_to = to;
        more = true;
      }
    if (!more) break;
    --counts[best_from];
    ++counts[best_to];
    best = least;
  }
  for (bool more = true; more;) {
    more = false;
    for (size_t from = 0; from < stages; ++from)
      for (size_t to = 0; to < stages; ++to) {
        const std::int64_t excess = counts[from] - counts[to];
        if (!(excess > 1 || (excess == 1 && to < from)) || moved(from, to) > best * (1 + rounding)) continue;
        --counts[from];
        ++counts[to];
        more = true;
      }
  }
}

// For each stage the differing rank that has it; nothing where ranks share only some of theirs.
std::optional<std::vector<size_t>> owners(const BalanceProblem& problem) {
  constexpr size_t nobody = std::numeric_limits<size_t>::max();
  std::vector<size_t> owner(problem.num_stages(), nobody);
  for (size_t r = 0; r < problem.ranks.size(); ++r)
    for (const Share& share : problem.ranks[r]) {
      if (owner[share.stage] != nobody) return {};
      owner[share.stage] = r;
    }
  return owner;
}

// Layers that are all alike: a rank's cost depends on how many it has. Giving every layer to the rank that is
// least with it keeps the most least. Then the stages are filled evenly within what that allows each rank.
Counts balance_alike(const BalanceProblem& problem, const std::vector<size_t>& owner) {
  const double layer = problem.before[1];
  std::vector<double> fixed(problem.ranks.size(), 0), each(problem.ranks.size(), 0);
  Counts counts(problem.num_stages(), 1);
  for (size_t r = 0; r < problem.ranks.size(); ++r)
    for (const Share& share : problem.ranks[r]) {
      fixed[r] += share.part * (problem.extra[share.stage] + layer);
      each[r] = std::max(each[r], share.part * layer);
    }
  const auto left = static_cast<std::int64_t>(problem.num_layers() - problem.num_stages());
  std::vector<double> cost = fixed;
  for (std::int64_t k = 0; k < left; ++k) {
    size_t least = 0;
    for (size_t r = 1; r < cost.size(); ++r)
      if (cost[r] + each[r] < cost[least] + each[least]) least = r;
    cost[least] += each[least];
  }
  const double most = *std::max_element(cost.begin(), cost.end()) * (1 + rounding);
  cost = fixed;
  for (std::int64_t k = 0; k < left; ++k) {
    size_t smallest = counts.size();
    for (size_t s = 0; s < counts.size(); ++s)
      if (cost[owner[s]] + each[owner[s]] <= most &&
          (smallest == counts.size() || counts[s] < counts[smallest]))
        smallest = s;
    check(smallest < counts.size(), "a layer fits nowhere");
    ++counts[smallest];
    cost[owner[smallest]] += each[owner[smallest]];
  }
  return counts;
}

}  // namespace

Balance balance_layers(const Schedule& schedule, const std::vector<double>& layer_costs, double first_extra,
                       double last_extra, const std::vector<double>& in_first) {
  const auto num_layers = static_cast<std::int64_t>(layer_costs.size());
  if (num_layers < schedule.num_stages)
    refuse("{} has {} stages of at least one layer, and there are {} layers", schedule.name,
           schedule.num_stages, num_layers);
  check(in_first.empty() || in_first.size() == layer_costs.size(), "a cost of each layer");
  const std::vector<double>& first_costs = in_first.empty() ? layer_costs : in_first;
  const BalanceProblem problem = make_problem(schedule, layer_costs, first_extra, last_extra, first_costs);
  Balance balance;
  for (int s = 0; s < schedule.num_stages; ++s)
    balance.layers.push_back(split_range(num_layers, schedule.num_stages, s).size());
  const bool is_alike =
      first_costs == layer_costs &&
      std::all_of(layer_costs.begin(), layer_costs.end(), [&](double c) { return c == layer_costs[0]; });
  const auto owner = owners(problem);
  double bound = simple_bound(problem);
  if (owner && is_alike) {
    balance.layers = balance_alike(problem, *owner);
    bound = slowest(problem, balance.layers);
  } else {
    improve(problem, balance.layers);
    if (owner && is_fold(problem)) {
      balance_fold(problem, *owner, balance.layers, bound);
      improve(problem, balance.layers);
    }
  }
  balance.slowest = slowest(problem, balance.layers);
  balance.lower_bound = std::min(bound, balance.slowest);
  return balance;
}

}  // namespace echelon
