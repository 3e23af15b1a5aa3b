// Chooses the experts of one token (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538), and computes its
// balance losses and their gradients. Kernels and plan/routing_simulation use this. The arithmetic is in
// spec/router_row.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "spec/router_row.h"
#include "spec/routing.h"

namespace echelon {

// A router's losses, per token: the sum over e of factors[e] p[e], plus z_loss times the square of the
// logits' log-sum-exp. p are the scores; sigmoid scores are divided by their sum. The factors contain the
// counts of the token's scope, through which no gradient flows.
struct RouterLosses {
  std::vector<double> factors = {};  // (scopes, E); empty: none
  std::int64_t rows_per_scope = 1;   // consecutive rows of the microbatch that form a scope
  std::int64_t first_row = 0;        // of the microbatch: index of the first row here
  double z_loss = 0;
};

class TokenRouter {
 public:
  TokenRouter() = default;
  // Each token goes to `k` of `experts`.
  TokenRouter(const RouterSpec& spec, std::int64_t experts, std::int64_t k)
      : spec_(spec), experts_(experts), k_(k) {}

  const RouterSpec& spec() const { return spec_; }
  std::int64_t num_experts() const { return experts_; }
  std::int64_t experts_per_token() const { return k_; }

  // What a token's logits (E) yield, with p = scores / score_sum, and work space. Reused from token to token.
  struct Row {
    std::vector<double> scores, softmax;
    double log_sum = 0;    // of the logits' exponentials
    double score_sum = 0;  // 1 of a softmax
    std::vector<double> wanted, d_scores, group_sums;
    std::vector<unsigned char> taken, seen;
  };
  RouterRules rules() const { return {spec_, experts_, k_}; }
  void score(std::span<const double> logits, Row& row) const;

  // Chooses ids (k), the best first, and their weights (k). `bias` (E, or empty) is added to the scores for
  // the choice only (Wang et al. 2024, https://arxiv.org/abs/2408.15664). Ties: the lower id wins.
  void choose(Row& row, std::span<const double> bias, std::span<std::int32_t> ids,
              std::span<double> weights) const;
  // The steps of choose(): the biased scores, the choice, and the weights of a choice, whoever made it.
  void want(Row& row, std::span<const double> bias) const;
  void choose_wanted(Row& row, std::span<std::int32_t> ids) const;
  void weigh(const Row& row, std::span<const std::int32_t> ids, std::span<double> weights) const;
  // How far the row's `wanted` would have to move, up for `ids` and down for all others, to make `ids` the
  // choice: 0 if they are the choice, infinite if no shift makes them so.
  double shift_to_choose(const Row& row, std::span<const std::int32_t> ids) const;

  // The sum over e of factors[e] p[e], plus z_loss times the square of log_sum. factors (E), or empty for
  // none.
  double loss(const Row& row, std::span<const double> factors, double z_loss) const;
  // d_logits (E) = the gradient through the weights, given d_weights (k), plus loss_scale times the gradient
  // of loss(). The choice itself has no gradient.
  void backward(Row& row, std::span<const std::int32_t> ids, std::span<const double> d_weights,
                std::span<const double> factors, double z_loss, double loss_scale,
                std::span<double> d_logits) const;

 private:
  RouterSpec spec_;
  std::int64_t experts_ = 0, k_ = 1;
};

}  // namespace echelon
