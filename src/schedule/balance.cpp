#include "schedule/balance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/split.h"
#include "base/units.h"
#include "schedule/balance_problem.h"

namespace echelon {
namespace {

using namespace balance_detail;
using std::size_t;

BalanceProblem make_problem(const std::vector<Shares>& ranks, const StageCosts& costs) {
  BalanceProblem problem;
  for (const std::vector<double>& layers : costs.layers) {
    check(layers.size() == costs.layers[0].size(), "a cost of each layer");
    std::vector<double>& sums = problem.sums.emplace_back(1, 0);
    for (double cost : layers) {
      check(std::isfinite(cost) && cost >= 0, "a layer's cost");
      sums.push_back(sums.back() + cost);
    }
  }
  problem.sums_of_stage = costs.of_stage;
  for (double extra : costs.extra) check(std::isfinite(extra) && extra >= 0, "a stage's extra cost");
  problem.extra = costs.extra;
  for (const Shares& shares : ranks) {
    if (shares.empty()) continue;
    problem.ranks.push_back(shares);
    ++problem.num_ranks;
  }
  std::sort(problem.ranks.begin(), problem.ranks.end());
  problem.ranks.erase(std::unique(problem.ranks.begin(), problem.ranks.end()), problem.ranks.end());
  return problem;
}

std::vector<Shares> shares_of(const Schedule& schedule) {
  std::vector<Shares> ranks;
  for (const auto& list : schedule.ranks) {
    std::map<size_t, double> forwards;
    for (const Instruction& i : list)
      if (i.op == Op::F) ++forwards[static_cast<size_t>(i.stage)];
    Shares& shares = ranks.emplace_back();
    for (const auto& [stage, count] : forwards) shares.push_back({stage, count / schedule.num_microbatches});
  }
  return ranks;
}

// The lower bound: the mean over ranks, and each rank's least cost with one layer in each stage.
double simple_bound(const BalanceProblem& problem) {
  double all = std::accumulate(problem.extra.begin(), problem.extra.end(), 0.0);
  for (size_t k = 0; k < problem.num_layers(); ++k) {
    double least = std::numeric_limits<double>::infinity();
    for (size_t list : problem.sums_of_stage)
      least = std::min(least, problem.sums[list][k + 1] - problem.sums[list][k]);
    all += least;
  }
  double bound = all / static_cast<double>(problem.num_ranks);
  if (problem.num_stages() == 1) return bound;
  for (const Shares& rank : problem.ranks) {
    double least = 0;
    for (const Share& share : rank) {
      // One layer is in this stage; at least one is in each stage before and after it.
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

// Moves single layers from stage to stage, shifting all boundaries in between: first as long as the slowest
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

// By stage, the (distinct) rank that has it; empty if ranks share only some of their stages.
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

// Whether a layer costs a rank the same, whichever it is, and in whichever of its stages.
bool are_alike(const BalanceProblem& problem) {
  std::vector<double> costs;  // of each list
  for (const std::vector<double>& sums : problem.sums) {
    costs.push_back(sums[1]);
    for (size_t k = 1; k < problem.num_layers(); ++k)
      if (std::abs(sums[k + 1] - sums[k] - sums[1]) > rounding * sums.back()) return false;
  }
  return std::all_of(problem.ranks.begin(), problem.ranks.end(), [&](const Shares& rank) {
    return std::all_of(rank.begin(), rank.end(), [&](const Share& share) {
      return costs[problem.sums_of_stage[share.stage]] == costs[problem.sums_of_stage[rank[0].stage]];
    });
  });
}

// All layers cost the same, so a rank's cost depends only on how many it has. Giving each layer to the rank
// that is cheapest with it minimizes the largest cost. Then the stages are filled evenly within what this
// allows each rank.
Counts balance_alike(const BalanceProblem& problem, const std::vector<size_t>& owner) {
  std::vector<double> fixed(problem.ranks.size(), 0), each(problem.ranks.size(), 0);
  Counts counts(problem.num_stages(), 1);
  for (size_t r = 0; r < problem.ranks.size(); ++r)
    for (const Share& share : problem.ranks[r]) {
      const double layer = problem.sums[problem.sums_of_stage[share.stage]][1];
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

Balance balance_layers(const std::vector<std::vector<StagePart>>& ranks, const StageCosts& costs) {
  const BalanceProblem problem = make_problem(ranks, costs);
  const auto num_layers = static_cast<std::int64_t>(problem.num_layers()),
             num_stages = static_cast<std::int64_t>(problem.num_stages());
  check(num_layers >= num_stages, "each stage has a layer");
  Balance balance;
  for (std::int64_t s = 0; s < num_stages; ++s)
    balance.layers.push_back(split_range(num_layers, num_stages, s).size());
  const auto owner = owners(problem);
  double bound = simple_bound(problem);
  if (owner && are_alike(problem)) {
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

Balance balance_layers(const Schedule& schedule, const std::vector<double>& layer_costs, double first_extra,
                       double last_extra, const std::vector<double>& in_first) {
  const auto num_layers = static_cast<std::int64_t>(layer_costs.size());
  if (num_layers < schedule.num_stages)
    refuse("{} has {} of at least one layer, and {} for them", schedule.name,
           counted(schedule.num_stages, "stage"), counted(num_layers, "layer"));
  const auto stages = static_cast<size_t>(schedule.num_stages);
  StageCosts costs{{layer_costs}, std::vector<size_t>(stages, 0), std::vector<double>(stages, 0)};
  costs.extra.front() += first_extra;
  costs.extra.back() += last_extra;
  if (!in_first.empty()) {
    costs.layers.push_back(in_first);
    costs.of_stage.front() = 1;
  }
  return balance_layers(shares_of(schedule), costs);
}

}  // namespace echelon
