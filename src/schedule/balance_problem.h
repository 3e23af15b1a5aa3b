// Private to balance: its problem in plain arrays.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/balance.h"

namespace echelon::balance_detail {

using std::size_t;
using Counts = std::vector<std::int64_t>;

constexpr double rounding = 1e-12;  // of sums of costs, relative

using Share = StagePart;
using Shares = std::vector<Share>;  // of one rank, by stage

struct BalanceProblem {
  // Cost of the layers before layer k, the last one of all: as in each stage.
  std::vector<std::vector<double>> sums;
  std::vector<size_t> sums_of_stage;
  std::vector<double> extra;   // of each stage
  std::vector<Shares> ranks;   // those that differ
  size_t num_ranks = 0;        // with those that are alike

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
// first, and there are not too many to look at all splits.
bool is_fold(const BalanceProblem& problem);
// The least that the slowest rank of a fold can need: improves `counts` until no split has less, and raises
// `bound`, which no split goes below, to that. `owner`: of each stage its place among the ranks.
void balance_fold(const BalanceProblem& problem, const std::vector<size_t>& owner, Counts& counts,
                  double& bound);

}  // namespace echelon::balance_detail
