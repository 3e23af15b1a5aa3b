#include "layer/router.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "tensor/reference_view.h"

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
  const std::int64_t counted = std::clamp<std::int64_t>(k / spec.most_groups, 1, size);
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

template <class F>
void read_row(const Matrix<F>& m, std::int64_t i, Values& row) {
  row.assign(m[i], m[i] + m.cols);
}

}  // namespace

// What the backward pass and the losses need of one token.
struct Router::Row {
  Values scores, softmax;
  double log_sum = 0;    // of the logits' exponentials
  double score_sum = 0;  // 1 of a softmax
};

void Router::score(const double* logits, Row& row) const {
  const auto n = static_cast<std::size_t>(num_experts());
  row.softmax.resize(n);
  const double max = *std::max_element(logits, logits + n);
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

void Router::choose(const Tensor& logits, std::span<const double> bias, const Tensor& ids,
                    const Tensor& weights) const {
  check(logits.cols() == num_experts() && (bias.empty() || std::ssize(bias) == num_experts()),
        "a router's logits and bias have a place for each expert");
  with_float_type(logits, [&]<class F>(F) {
    const Matrix<F> in(logits);
    std::int32_t* id = flat<std::int32_t>(ids, in.rows * k_);
    F* weight = flat<F>(weights, in.rows * k_);
    Row row;
    Values values, wanted;
    std::vector<bool> taken;
    for (std::int64_t i = 0; i < in.rows; ++i, id += k_, weight += k_) {
      read_row(in, i, values);
      score(values.data(), row);
      wanted = row.scores;
      for (std::size_t e = 0; e < bias.size(); ++e) wanted[e] += bias[e];
      taken.assign(wanted.size(), false);
      if (spec_.most_groups < spec_.groups) limit_groups(wanted, spec_, k_, taken);
      std::int64_t j = 0;
      double sum = 0;
      take_best(wanted, 0, num_experts(), k_, taken, [&](std::int64_t e) {
        id[j++] = static_cast<std::int32_t>(e);
        sum += row.scores[static_cast<std::size_t>(e)];
      });
      const double factor = spec_.normalise ? spec_.scale / sum : spec_.scale;
      for (j = 0; j < k_; ++j)
        weight[j] = static_cast<F>(factor * row.scores[static_cast<std::size_t>(id[j])]);
    }
  });
}

namespace {

const double* factors_of(const RouterLosses& losses, std::int64_t row, std::int64_t experts) {
  if (losses.factors.empty()) return nullptr;
  const std::int64_t scope = (losses.first_row + row) / losses.rows_per_scope;
  check((scope + 1) * experts <= std::ssize(losses.factors), "balance factors are there for every scope");
  return losses.factors.data() + scope * experts;
}

}  // namespace

double Router::loss(const Tensor& logits, const RouterLosses& losses) const {
  double total = 0;
  with_float_type(logits, [&]<class F>(F) {
    const Matrix<F> in(logits);
    Row row;
    Values values;
    for (std::int64_t i = 0; i < in.rows; ++i) {
      read_row(in, i, values);
      score(values.data(), row);
      total += losses.z_loss * row.log_sum * row.log_sum;
      const double* factors = factors_of(losses, i, num_experts());
      for (std::size_t e = 0; factors != nullptr && e < values.size(); ++e)
        total += factors[e] * row.scores[e] / row.score_sum;
    }
  });
  return total;
}

void Router::backward(const Tensor& logits, const Tensor& ids, const Tensor& d_weights,
                      const RouterLosses& losses, double loss_scale, const Tensor& d_logits) const {
  with_float_type(logits, [&]<class F>(F) {
    const Matrix<F> in(logits), out(d_logits);
    check_same(in, out, "router: shapes of the logits and of their gradient differ");
    const std::int32_t* id = flat<std::int32_t>(ids, in.rows * k_);
    const F* d_weight = flat<F>(d_weights, in.rows * k_);
    Row row;
    Values values, d_scores;
    for (std::int64_t i = 0; i < in.rows; ++i, id += k_, d_weight += k_) {
      read_row(in, i, values);
      score(values.data(), row);
      d_scores.assign(values.size(), 0.0);
      // weight = scale s / sum of the chosen s: d s = scale / sum (d weight - <d weight, s> / sum).
      double sum = 0, inner = 0;
      for (std::int64_t j = 0; j < k_; ++j) {
        const double s = row.scores[static_cast<std::size_t>(id[j])];
        sum += s;
        inner += static_cast<double>(d_weight[j]) * s;
      }
      for (std::int64_t j = 0; j < k_; ++j) {
        const auto d = static_cast<double>(d_weight[j]);
        d_scores[static_cast<std::size_t>(id[j])] =
            spec_.normalise ? spec_.scale / sum * (d - inner / sum) : spec_.scale * d;
      }
      // p = s / sum of all s.
      if (const double* factors = factors_of(losses, i, num_experts())) {
        double mean = 0;
        for (std::size_t e = 0; e < values.size(); ++e) mean += factors[e] * row.scores[e] / row.score_sum;
        for (std::size_t e = 0; e < values.size(); ++e)
          d_scores[e] += loss_scale * (factors[e] - mean) / row.score_sum;
      }
      double mean = 0;
      for (std::size_t e = 0; e < values.size(); ++e) mean += d_scores[e] * row.scores[e];
      for (std::size_t e = 0; e < values.size(); ++e) {
        const double s = row.scores[e];
        double d =
            spec_.scores == RouterScores::softmax ? s * (d_scores[e] - mean) : s * (1 - s) * d_scores[e];
        d += loss_scale * losses.z_loss * 2 * row.log_sum * row.softmax[e];
        out[i][e] = static_cast<F>(d);
      }
    }
  });
}

}  // namespace echelon
