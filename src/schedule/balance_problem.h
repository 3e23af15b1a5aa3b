// Private to balance: its problem as plain arrays.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/balance.h"

namespace echelon::balance_detail {

using std::size_t;
using Counts = std::vector<std::int64_t>;

constexpr double rounding = 1e-12;  // relative error of sums of costs

using Share = StagePart;
using Shares = std::vector<Share>;  // of one rank, ordered by stage

struct BalanceProblem {
  // Lists of the cost of the layers before layer k; the last entry: of all layers. Each stage has one of
  // them.
  std::vector<std::vector<double>> sums;
  std::vector<size_t> sums_of_stage;
  std::vector<double> extra;  // by stage
  std::vector<Shares> ranks;  // distinct ones only
  size_t num_ranks = 0;       // duplicates included

  size_t num_stages() const { return extra.size(); }
  size_t num_layers() const { return sums[0].size() - 1; }
  // In all stages but the first, where these are alike.
  const std::vector<double>& before() const { return sums[sums_of_stage.back()]; }
  double cost(size_t stage, size_t begin, size_t end) const {
    const std::vector<double>& of = sums[sums_of_stage[stage]];
    return of[end] - of[begin] + extra[stage];
  }
};

double slowest(const BalanceProblem& problem, const Counts& counts);

// Whether each rank has one stage, or two in a V (k and S-1-k), layers cost the same in all stages but the
// first, and there are few enough layers for the exact search.
bool is_fold(const BalanceProblem& problem);
// Exact search for a fold: improves `counts` to an optimal split, and raises `bound` to its cost. `owner`: by
// stage, the index of its rank in problem.ranks.
void balance_fold(const BalanceProblem& problem, const std::vector<size_t>& owner, Counts& counts,
                  double& bound);

}  // namespace echelon::balance_detail
