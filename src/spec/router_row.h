// The arithmetic of TokenRouter on one token's numbers, for host and device. E experts. The caller owns all
// arrays.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "spec/routing.h"

namespace echelon {

struct RouterRules {
  RouterSpec spec;
  std::int64_t experts = 0, k = 1;
};

// The logits' log-sum-exp, and the sum of the scores (1 for a softmax).
struct RouterSums {
  double log_sum, score_sum;
};

// Computes softmax and scores (E) from logits (E).
ECHELON_HOST_DEVICE inline RouterSums score_experts(const RouterRules& r, const double* logits,
                                                    double* softmax, double* scores) {
  double max = logits[0];
  for (std::int64_t e = 1; e < r.experts; ++e)
    if (max < logits[e]) max = logits[e];
  double sum = 0;
  for (std::int64_t e = 0; e < r.experts; ++e) sum += softmax[e] = std::exp(logits[e] - max);
  for (std::int64_t e = 0; e < r.experts; ++e) softmax[e] /= sum;
  RouterSums sums{max + std::log(sum), 1};
  for (std::int64_t e = 0; e < r.experts; ++e) scores[e] = softmax[e];
  if (r.spec.scores == RouterScores::softmax) return sums;
  sums.score_sum = 0;
  for (std::int64_t e = 0; e < r.experts; ++e) sums.score_sum += scores[e] = 1 / (1 + std::exp(-logits[e]));
  return sums;
}

// Index of the largest value of [begin, end) that is not taken; the first of equal ones. NaN loses to every
// number. -1: all are taken.
ECHELON_HOST_DEVICE inline std::int64_t best_of(const double* values, std::int64_t begin, std::int64_t end,
                                                const unsigned char* taken) {
  std::int64_t best = -1;
  for (std::int64_t i = begin; i < end; ++i) {
    if (taken[i]) continue;
    const double leading = best < 0 ? 0 : values[best];
    if (best < 0 || values[i] > leading || (leading != leading && values[i] == values[i])) best = i;
  }
  return best;
}

// Work space of choose_experts(): taken (E), group_sums (groups).
struct ChoiceSpace {
  unsigned char* taken;
  unsigned char* seen;  // (the larger of E and groups)
  double* group_sums;
};

// Chooses ids (k), the best first, by `wanted` (E). False if fewer experts remain than it must choose.
ECHELON_HOST_DEVICE inline bool choose_experts(const RouterRules& r, const double* wanted,
                                               const ChoiceSpace& space, std::int32_t* ids) {
  for (std::int64_t e = 0; e < r.experts; ++e) space.taken[e] = 0;
  if (r.spec.most_groups < r.spec.groups) {
    // Experts outside the best groups count as taken.
    const std::int64_t size = r.experts / r.spec.groups, even = r.k / r.spec.most_groups;
    const std::int64_t counted = r.spec.group_best > 0 ? r.spec.group_best
                                 : even < 1            ? 1
                                 : even > size         ? size
                                                       : even;
    for (std::int64_t e = 0; e < r.experts; ++e) space.seen[e] = 0;
    for (std::int64_t g = 0; g < r.spec.groups; ++g) {
      space.group_sums[g] = 0;
      for (std::int64_t n = 0; n < counted; ++n) {
        const std::int64_t best = best_of(wanted, g * size, (g + 1) * size, space.seen);
        if (best < 0) return false;
        space.seen[best] = 1;
        space.group_sums[g] += wanted[best];
      }
    }
    for (std::int64_t g = 0; g < r.spec.groups; ++g) space.seen[g] = 0;
    for (std::int64_t n = 0; n < r.spec.most_groups; ++n) {
      const std::int64_t best = best_of(space.group_sums, 0, r.spec.groups, space.seen);
      if (best < 0) return false;
      space.seen[best] = 1;
    }
    for (std::int64_t e = 0; e < r.experts; ++e) space.taken[e] = space.seen[e / size] ? 0 : 1;
  }
  for (std::int64_t j = 0; j < r.k; ++j) {
    const std::int64_t best = best_of(wanted, 0, r.experts, space.taken);
    if (best < 0) return false;
    space.taken[best] = 1;
    ids[j] = static_cast<std::int32_t>(best);
  }
  return true;
}

// The factor that turns the score of a chosen expert into its weight.
ECHELON_HOST_DEVICE inline double weight_factor(const RouterRules& r, const double* scores,
                                                const std::int32_t* ids) {
  double sum = r.spec.epsilon;
  for (std::int64_t j = 0; j < r.k; ++j) sum += scores[ids[j]];
  return r.spec.normalise ? r.spec.scale / sum : r.spec.scale;
}

// A token's balance losses (RouterLosses). factors (E), or null for none.
ECHELON_HOST_DEVICE inline double router_loss(const RouterRules& r, const RouterSums& sums,
                                              const double* scores, const double* factors, double z_loss) {
  double total = z_loss * sums.log_sum * sums.log_sum;
  for (std::int64_t e = 0; factors != nullptr && e < r.experts; ++e)
    total += factors[e] * scores[e] / sums.score_sum;
  return total;
}

// Computes d_logits (E); d_weight(j) is the gradient of the weight of ids[j]. d_scores (E) is work space.
template <class DWeight>
ECHELON_HOST_DEVICE void router_gradient(const RouterRules& r, const RouterSums& sums, const double* scores,
                                         const double* softmax, const std::int32_t* ids,
                                         const DWeight& d_weight, const double* factors, double z_loss,
                                         double loss_scale, double* d_scores, double* d_logits) {
  for (std::int64_t e = 0; e < r.experts; ++e) d_scores[e] = 0;
  // weight = scale s / (epsilon + sum of the chosen s), so d s = scale / (epsilon + sum) (d weight - <d
  // weight, s> / (epsilon + sum)). d_weight is taken relative to its first element: if all are equal, as with
  // one expert, only epsilon's share remains, without rounding errors.
  const double first_weight = r.spec.normalise ? d_weight(0) : 0;
  double sum = r.spec.epsilon, inner = 0;
  for (std::int64_t j = 0; j < r.k; ++j) {
    sum += scores[ids[j]];
    inner += (d_weight(j) - first_weight) * scores[ids[j]];
  }
  for (std::int64_t j = 0; j < r.k; ++j)
    d_scores[ids[j]] =
        r.spec.normalise
            ? r.spec.scale / sum *
                  (d_weight(j) - first_weight - inner / sum + first_weight * r.spec.epsilon / sum)
            : r.spec.scale * d_weight(j);
  // p = s / sum of all s; again relative to the first element.
  if (factors != nullptr) {
    double mean = 0;
    for (std::int64_t e = 0; e < r.experts; ++e)
      mean += (factors[e] - factors[0]) * scores[e] / sums.score_sum;
    for (std::int64_t e = 0; e < r.experts; ++e)
      d_scores[e] += loss_scale * (factors[e] - factors[0] - mean) / sums.score_sum;
  }
  double mean = 0;
  for (std::int64_t e = 0; e < r.experts; ++e) mean += d_scores[e] * scores[e];
  for (std::int64_t e = 0; e < r.experts; ++e) {
    const double s = scores[e];
    d_logits[e] =
        r.spec.scores == RouterScores::softmax ? s * (d_scores[e] - mean) : s * (1 - s) * d_scores[e];
    d_logits[e] += loss_scale * z_loss * 2 * sums.log_sum * softmax[e];
  }
}

}  // namespace echelon
