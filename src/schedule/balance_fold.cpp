// Exact balance of layers of any costs over ranks with one stage, or two in a V.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "schedule/balance_problem.h"

namespace echelon::balance_detail {

double slowest(const BalanceProblem& problem, const Counts& counts) {
  std::vector<double> stages;
  size_t begin = 0;
  for (size_t s = 0; s < counts.size(); ++s) {
    const size_t end = begin + static_cast<size_t>(counts[s]);
    stages.push_back(problem.cost(s, begin, end));
    begin = end;
  }
  double most = 0;
  for (const Shares& rank : problem.ranks) {
    double sum = 0;
    for (const Share& share : rank) sum += share.part * stages[share.stage];
    most = std::max(most, sum);
  }
  return most;
}

namespace {

// Layers are taken off both ends: after k stages at either end, [left, right) remain.
class Fold {
 public:
  Fold(const BalanceProblem& problem, const std::vector<size_t>& owner)
      : problem_(problem),
        owner_(owner),
        layers_(problem.num_layers()),
        levels_(problem.num_stages() / 2),
        capacity_(levels_ + 1, 0) {
    const size_t last = problem.num_stages() - 1;
    if (problem.num_stages() % 2 != 0) capacity_[levels_] = 1 / part(levels_);
    for (size_t k = levels_; k-- > 0;)
      capacity_[k] = capacity_[k + 1] + 1 / part(k) + (is_folded(k) ? 0 : 1 / part(last - k));
  }

  // Empty if some rank needs more.
  Counts split(double most) {
    reached_.assign(levels_ + 1, std::vector<char>((layers_ + 1) * (layers_ + 1), 0));
    reached_[0][cell(0, layers_)] = 1;
    for (size_t k = 0; k < levels_; ++k) take(k, most);
    for (size_t left = levels_; left <= layers_; ++left)
      for (size_t right = left; right <= layers_; ++right)
        if (reached_[levels_][cell(left, right)] != 0 && ends(left, right, most))
          return way_to(left, right, most);
    return {};
  }

 private:
  size_t cell(size_t left, size_t right) const { return left * (layers_ + 1) + right; }
  double part(size_t stage) const { return problem_.ranks[owner_[stage]][0].part; }
  double cost(size_t stage, size_t begin, size_t end) const {
    return part(stage) * problem_.cost(stage, begin, end);
  }
  bool is_folded(size_t k) const { return owner_[k] == owner_[problem_.num_stages() - 1 - k]; }

  // The most that the right stage may cost beside a left stage of this cost.
  double room(size_t k, double left_cost, double most) const {
    return is_folded(k) ? most - left_cost : most;
  }

  bool ends(size_t left, size_t right, double most) const {
    if (problem_.num_stages() % 2 == 0) return left == right;
    return left < right && cost(levels_, left, right) <= most;
  }

  void take(size_t k, double most) {
    const size_t stage = problem_.num_stages() - 1 - k;
    for (size_t left = k; left < layers_; ++left) {
      const char* from = &reached_[k][cell(left, 0)];
      const auto* first = std::find(from, from + layers_ + 1, 1);
      if (first == from + layers_ + 1) continue;
      size_t last = layers_;
      while (from[last] == 0) --last;
      for (size_t next = left + 1; next < layers_ && cost(k, left, next) <= most; ++next)
        take_right(k + 1, next, stage, from, {static_cast<size_t>(first - from), last},
                   room(k, cost(k, left, next), most), most * capacity_[k + 1]);
    }
  }

  // From each right end down to the lowest that the room allows, which rises with the end, as far as the
  // remaining ranks can take the remaining layers.
  void take_right(size_t level, size_t left, size_t stage, const char* from, std::pair<size_t, size_t> ends,
                  double allowed, double capacity) {
    char* to = &reached_[level][cell(left, 0)];
    const auto at = problem_.before().begin();
    const auto behind = std::upper_bound(at + static_cast<std::ptrdiff_t>(left), problem_.before().end(),
                                         problem_.before()[left] + capacity);
    const auto top = static_cast<size_t>(behind - at);
    size_t done = left, lowest = left;
    for (size_t right = std::max(ends.first, left + 1); right <= ends.second; ++right) {
      if (from[right] == 0) continue;
      if (done == left) {
        const double least = problem_.before()[right] + problem_.extra[stage] - allowed / part(stage);
        const double slack = rounding * problem_.before().back();
        lowest = static_cast<size_t>(
            std::lower_bound(at + static_cast<std::ptrdiff_t>(left), problem_.before().end(), least - slack) -
            at);
      }
      while (lowest < right && cost(stage, lowest, right) > allowed) ++lowest;
      for (size_t k = std::max(lowest, done); k < std::min(right, top); ++k) to[k] = 1;
      done = right;
    }
  }

  Counts way_to(size_t left, size_t right, double most) const {
    Counts counts(problem_.num_stages(), 0);
    if (problem_.num_stages() % 2 != 0) counts[levels_] = static_cast<std::int64_t>(right - left);
    for (size_t k = levels_; k-- > 0;) {
      const size_t stage = problem_.num_stages() - 1 - k;
      const auto [l, r] = before(k, stage, left, right, most);
      counts[k] = static_cast<std::int64_t>(left - l);
      counts[stage] = static_cast<std::int64_t>(r - right);
      left = l;
      right = r;
    }
    return counts;
  }
  std::pair<size_t, size_t> before(size_t k, size_t stage, size_t left, size_t right, double most) const {
    for (size_t l = left; l-- > 0;)
      for (size_t r = right + 1; r <= layers_ && cost(k, l, left) <= most; ++r)
        if (reached_[k][cell(l, r)] != 0 && cost(stage, right, r) <= room(k, cost(k, l, left), most))
          return {l, r};
    throw InvariantError("a way without a beginning");
  }

  const BalanceProblem& problem_;
  const std::vector<size_t>& owner_;
  size_t layers_, levels_;
  std::vector<double> capacity_;            // of the ranks with stages k to S-1-k, over that of one of them
  std::vector<std::vector<char>> reached_;  // after k stages at either end: [left][right]
};

}  // namespace

bool is_fold(const BalanceProblem& problem) {
  const size_t last = problem.num_stages() - 1;
  for (size_t s = 1; s < last; ++s)
    if (problem.sums_of_stage[s] != problem.sums_of_stage[last]) return false;
  for (const Shares& rank : problem.ranks)
    if (rank.size() > 2 || (rank.size() == 2 && rank[0].stage + rank[1].stage != last)) return false;
  constexpr size_t most_cells = 20'000'000;
  return (problem.num_stages() / 2 + 1) * (problem.num_layers() + 1) * (problem.num_layers() + 1) <=
         most_cells;
}

void balance_fold(const BalanceProblem& problem, const std::vector<size_t>& owner, Counts& counts,
                  double& bound) {
  Fold fold(problem, owner);
  double found = slowest(problem, counts);
  // Bisects between what is impossible and what was found, down to the rounding of costs.
  for (double most = bound; found - bound > 1e-10 * found; most = (bound + found) / 2) {
    const Counts split = fold.split(most * (1 + rounding));
    if (split.empty()) {
      bound = most;
      continue;
    }
    counts = split;
    found = std::min(most, slowest(problem, split));
  }
  bound = found;
}

}  // namespace echelon::balance_detail
