// Private to balance: its problem in plain arrays.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace echelon::balance_detail {

using std::size_t;
using Counts = std::vector<std::int64_t>;

constexpr double rounding = 1e-12;  // of sums of costs, relative

struct Share {
  size_t stage = 0;
  double part = 1;  // of the microbatches
  auto operator<=>(const Share&) const = default;
};
using Shares = std::vector<Share>;  // of one rank, by stage

struct BalanceProblem {
  std::vector<double> before;  // cost of the layers before layer k; the last one: of all
  std::vector<double> before_in_first;  // the same of layers in the first stage
  std::vector<double> extra;   // of each stage
  std::vector<Shares> ranks;   // those that differ
  size_t num_ranks = 0;        // with those that are alike

  size_t num_stages() const { return extra.size(); }
  size_t num_layers() const { return before.size() - 1; }
  double cost(size_t stage, size_t begin, size_t end) const {
    const std::vector<double>& sums = stage == 0 ? before_in_first : before;
    return sums[end] - sums[begin] + extra[stage];
  }
};

double slowest(const BalanceProblem& problem, const Counts& counts);

// Whether each rank has one stage, or two in a V (k and S-1-k), and not too many layers to look at all
// splits.
bool is_fold(const BalanceProblem& problem);
// The least that the slowest rank of a fold can need: improves `counts` until no split has less, and raises
// `bound`, which no split goes below, to that. `owner`: of each stage its place among the ranks.
void balance_fold(const BalanceProblem& problem, const std::vector<size_t>& owner, Counts& counts,
                  double& bound);

}  // namespace echelon::balance_detail
