// Which experts one token goes to (Shazeer et al. 2017, https://arxiv.org/abs/1701.06538), what its balance
// losses are, and their gradients: the arithmetic of Kernels, and of plan/routing_simulation. What is done to
// numbers is in spec/router_row.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "spec/router_row.h"
#include "spec/routing.h"

namespace echelon {

// Losses of a router, as what they are of one token: sum over e of factors[e] p[e], plus z_loss times the
// square of the logits' log-sum-exp. p are the scores, of sigmoids divided by their sum. Factors hold the
// counts of the token's scope, through which no gradient flows.
struct RouterLosses {
  std::vector<double> factors = {};  // (scopes, E); empty: none
  std::int64_t rows_per_scope = 1;   // a run of rows of the microbatch
  std::int64_t first_row = 0;        // of the microbatch: where the rows at hand begin
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

  // What is made of a token's logits (E): p = scores / score_sum. Used again from token to token.
  struct Row {
    std::vector<double> scores, softmax;
    double log_sum = 0;    // of the logits' exponentials
    double score_sum = 0;  // 1 of a softmax
    std::vector<double> wanted, d_scores, group_sums;
    std::vector<unsigned char> taken, seen;
  };
  RouterRules rules() const { return {spec_, experts_, k_}; }
  void score(std::span<const double> logits, Row& row) const;

  // ids (k), the best first, and weights (k). `bias` (E, or empty) is added to the scores for the choice
  // alone (Wang et al. 2024, https://arxiv.org/abs/2408.15664). Equal ones: the lower id first.
  void choose(Row& row, std::span<const double> bias, std::span<std::int32_t> ids,
              std::span<double> weights) const;
  // Its parts: what the choice is made by, the choice, and the weights of one, whoever made it.
  void want(Row& row, std::span<const double> bias) const;
  void choose_wanted(Row& row, std::span<std::int32_t> ids) const;
  void weigh(const Row& row, std::span<const std::int32_t> ids, std::span<double> weights) const;
  // By how much the `wanted` of the row would have to move, up for `ids` and down for all others, for `ids`
  // to be the choice: 0 where they are. Infinite where nothing makes them that.
  double shift_to_choose(const Row& row, std::span<const std::int32_t> ids) const;

  // Sum over e of factors[e] p[e], plus z_loss times the square of log_sum; factors (E, or empty: none).
  double loss(const Row& row, std::span<const double> factors, double z_loss) const;
  // d_logits (E) = the gradient through the weights, whose gradient is d_weights (k), plus loss_scale times
  // that of loss(). The choice itself has none.
  void backward(Row& row, std::span<const std::int32_t> ids, std::span<const double> d_weights,
                std::span<const double> factors, double z_loss, double loss_scale,
                std::span<double> d_logits) const;

 private:
  RouterSpec spec_;
  std::int64_t experts_ = 0, k_ = 1;
};

}  // namespace echelon
