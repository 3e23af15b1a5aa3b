#include "spec/token_router.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/least_shift.h"

namespace echelon {
namespace {

using Values = std::vector<double>;

// The best `count` of [begin, end) that are not taken yet, in falling order, equal ones by number; what is no
// number loses to every number. They are marked as taken.
template <class Take>
void take_best(const Values& values, std::int64_t begin, std::int64_t end, std::int64_t count,
               std::vector<bool>& taken, const Take& take) {
  for (; count > 0; --count) {
    std::int64_t best = -1;
    for (std::int64_t i = begin; i < end; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double value = values[at];
      if (taken[at]) continue;
      const double leading = best < 0 ? 0 : values[static_cast<std::size_t>(best)];
      if (best < 0 || value > leading || (std::isnan(leading) && !std::isnan(value))) best = i;
    }
    check(best >= 0, "a router has at least as many experts as it must choose");
    taken[static_cast<std::size_t>(best)] = true;
    take(best);
  }
}

// Experts outside of the best `most` of `groups` are marked as taken.
void limit_groups(const Values& wanted, const RouterSpec& spec, std::int64_t k, std::vector<bool>& taken) {
  const auto size = static_cast<std::int64_t>(wanted.size()) / spec.groups;
  const std::int64_t counted =
      spec.group_best > 0 ? spec.group_best : std::clamp<std::int64_t>(k / spec.most_groups, 1, size);
  Values sums(static_cast<std::size_t>(spec.groups));
  for (std::int64_t g = 0; g < spec.groups; ++g) {
    std::vector<bool> seen(wanted.size());
    double& sum = sums[static_cast<std::size_t>(g)];
    take_best(wanted, g * size, (g + 1) * size, counted, seen,
              [&](std::int64_t e) { sum += wanted[static_cast<std::size_t>(e)]; });
  }
  std::vector<bool> chosen(sums.size());
  take_best(sums, 0, spec.groups, spec.most_groups, chosen, [](std::int64_t) {});
  for (std::size_t e = 0; e < wanted.size(); ++e) taken[e] = !chosen[e / static_cast<std::size_t>(size)];
}

}  // namespace

void TokenRouter::score(std::span<const double> logits, Row& row) const {
  const auto n = static_cast<std::size_t>(experts_);
  check(logits.size() == n, "a router has a logit of each expert");
  row.softmax.resize(n);
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (std::size_t e = 0; e < n; ++e) sum += row.softmax[e] = std::exp(logits[e] - max);
  for (double& p : row.softmax) p /= sum;
  row.log_sum = max + std::log(sum);
  row.scores = row.softmax;
  row.score_sum = 1;
  if (spec_.scores == RouterScores::softmax) return;
  row.score_sum = 0;
  for (std::size_t e = 0; e < n; ++e) row.score_sum += row.scores[e] = 1 / (1 + std::exp(-logits[e]));
}

void TokenRouter::choose(Row& row, std::span<const double> bias, std::span<std::int32_t> ids,
                         std::span<double> weights) const {
  want(row, bias);
  choose_wanted(row, ids);
  weigh(row, ids, weights);
}

void TokenRouter::want(Row& row, std::span<const double> bias) const {
  row.wanted = row.scores;
  for (std::size_t e = 0; e < bias.size(); ++e) row.wanted[e] += bias[e];
}

void TokenRouter::choose_wanted(Row& row, std::span<std::int32_t> ids) const {
  row.taken.assign(row.wanted.size(), false);
  if (spec_.most_groups < spec_.groups) limit_groups(row.wanted, spec_, k_, row.taken);
  std::size_t j = 0;
  take_best(row.wanted, 0, experts_, k_, row.taken,
            [&](std::int64_t e) { ids[j++] = static_cast<std::int32_t>(e); });
}

void TokenRouter::weigh(const Row& row, std::span<const std::int32_t> ids, std::span<double> weights) const {
  double sum = 0;
  for (const std::int32_t id : ids) sum += row.scores[static_cast<std::size_t>(id)];
  const double factor = spec_.normalise ? spec_.scale / sum : spec_.scale;
  for (std::size_t j = 0; j < ids.size(); ++j)
    weights[j] = factor * row.scores[static_cast<std::size_t>(ids[j])];
}

double TokenRouter::shift_to_choose(const Row& row, std::span<const std::int32_t> ids) const {
  std::vector<bool> inside(row.wanted.size());
  for (const std::int32_t id : ids) inside[static_cast<std::size_t>(id)] = true;
  Row moved;
  std::vector<std::int32_t> chosen(ids.size());
  double magnitude = 0;
  for (const double w : row.wanted) magnitude = std::max(magnitude, std::abs(w));
  return least_shift(magnitude, [&](double shift) {
    moved.wanted = row.wanted;
    for (std::size_t e = 0; e < inside.size(); ++e) moved.wanted[e] += inside[e] ? shift : -shift;
    choose_wanted(moved, chosen);
    return std::all_of(chosen.begin(), chosen.end(),
                       [&](std::int32_t id) { return inside[static_cast<std::size_t>(id)]; });
  });
}

double TokenRouter::loss(const Row& row, std::span<const double> factors, double z_loss) const {
  double total = z_loss * row.log_sum * row.log_sum;
  for (std::size_t e = 0; e < factors.size(); ++e) total += factors[e] * row.scores[e] / row.score_sum;
  return total;
}

void TokenRouter::backward(Row& row, std::span<const std::int32_t> ids, std::span<const double> d_weights,
                           std::span<const double> factors, double z_loss, double loss_scale,
                           std::span<double> d_logits) const {
  const std::size_t n = row.scores.size();
  row.d_scores.assign(n, 0.0);
  // weight = scale s / sum of the chosen s: d s = scale / sum (d weight - <d weight, s> / sum). Counted from
  // the first, so that where all are equal, as the only one is, nothing is left, not even rounding.
  const double first_weight = spec_.normalise ? d_weights[0] : 0;
  double sum = 0, inner = 0;
  for (std::size_t j = 0; j < ids.size(); ++j) {
    const double s = row.scores[static_cast<std::size_t>(ids[j])];
    sum += s;
    inner += (d_weights[j] - first_weight) * s;
  }
  for (std::size_t j = 0; j < ids.size(); ++j)
    row.d_scores[static_cast<std::size_t>(ids[j])] =
        spec_.normalise ? spec_.scale / sum * (d_weights[j] - first_weight - inner / sum)
                        : spec_.scale * d_weights[j];
  // p = s / sum of all s; counted in the same way.
  if (!factors.empty()) {
    double mean = 0;
    for (std::size_t e = 0; e < n; ++e) mean += (factors[e] - factors[0]) * row.scores[e] / row.score_sum;
    for (std::size_t e = 0; e < n; ++e)
      row.d_scores[e] += loss_scale * (factors[e] - factors[0] - mean) / row.score_sum;
  }
  double mean = 0;
  for (std::size_t e = 0; e < n; ++e) mean += row.d_scores[e] * row.scores[e];
  for (std::size_t e = 0; e < n; ++e) {
    const double s = row.scores[e];
    d_logits[e] =
        spec_.scores == RouterScores::softmax ? s * (row.d_scores[e] - mean) : s * (1 - s) * row.d_scores[e];
    d_logits[e] += loss_scale * z_loss * 2 * row.log_sum * row.softmax[e];
  }
}

}  // namespace echelon
