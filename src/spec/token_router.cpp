#include "spec/token_router.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/least_shift.h"

namespace echelon {

void TokenRouter::score(std::span<const double> logits, Row& row) const {
  const auto n = static_cast<std::size_t>(experts_);
  check(logits.size() == n, "a router has a logit of each expert");
  row.softmax.resize(n);
  row.scores.resize(n);
  const RouterSums sums = score_experts(rules(), logits.data(), row.softmax.data(), row.scores.data());
  row.log_sum = sums.log_sum;
  row.score_sum = sums.score_sum;
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
  row.taken.resize(row.wanted.size());
  row.seen.resize(std::max(row.wanted.size(), static_cast<std::size_t>(spec_.groups)));
  row.group_sums.resize(static_cast<std::size_t>(spec_.groups));
  check(std::ssize(row.wanted) == experts_ && std::ssize(ids) == k_, "a choice is of all experts");
  check(choose_experts(rules(), row.wanted.data(), {row.taken.data(), row.seen.data(), row.group_sums.data()},
                       ids.data()),
        "a router has at least as many experts as it must choose");
}

void TokenRouter::weigh(const Row& row, std::span<const std::int32_t> ids, std::span<double> weights) const {
  const double factor = weight_factor(rules(), row.scores.data(), ids.data());
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
  return router_loss(rules(), {row.log_sum, row.score_sum}, row.scores.data(),
                     factors.empty() ? nullptr : factors.data(), z_loss);
}

void TokenRouter::backward(Row& row, std::span<const std::int32_t> ids, std::span<const double> d_weights,
                           std::span<const double> factors, double z_loss, double loss_scale,
                           std::span<double> d_logits) const {
  row.d_scores.resize(row.scores.size());
  router_gradient(
      rules(), {row.log_sum, row.score_sum}, row.scores.data(), row.softmax.data(), ids.data(),
      [&](std::int64_t j) { return d_weights[static_cast<std::size_t>(j)]; },
      factors.empty() ? nullptr : factors.data(), z_loss, loss_scale, row.d_scores.data(), d_logits.data());
}

}  // namespace echelon
