// Which experts the tokens of one rank go to: spec/token_router on tensors. What needs the tokens of other
// ranks, the counts behind balance losses, is handed in.
//
// The E numbers of a token are worked on in double precision whatever the dtype, on the host: the counts that
// come of them decide what is computed and sent next.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layer/linear.h"
#include "spec/token_router.h"
#include "tensor/tensor.h"

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

class Router {
 public:
  Router() = default;
  // gate maps C to E; each token goes to `k` experts.
  Router(Linear gate, const RouterSpec& spec, std::int64_t k)
      : gate_(gate), token_(spec, gate.out_features(), k) {}

  const Linear& gate() const { return gate_; }
  std::int64_t num_experts() const { return token_.num_experts(); }
  std::int64_t experts_per_token() const { return token_.experts_per_token(); }
  const RouterSpec& spec() const { return token_.spec(); }
  const TokenRouter& token() const { return token_; }

  // logits (N, E) -> ids (N, k, i32), the best first, and weights (N, k). `bias` (E, or empty) is added to
  // the scores for the choice alone (Wang et al. 2024, https://arxiv.org/abs/2408.15664). Equal ones: the
  // lower id first.
  void choose(const Tensor& logits, std::span<const double> bias, const Tensor& ids,
              const Tensor& weights) const;
  // The weights of choices that someone else made.
  void weigh(const Tensor& logits, const Tensor& ids, const Tensor& weights) const;
  // d_logits (N, E) = the gradient through the weights, whose gradient is d_weights (N, k), plus loss_scale
  // times that of the losses. The choice itself has none.
  void backward(const Tensor& logits, const Tensor& ids, const Tensor& d_weights, const RouterLosses& losses,
                double loss_scale, const Tensor& d_logits) const;
  // The losses summed over the tokens.
  double loss(const Tensor& logits, const RouterLosses& losses) const;

 private:
  template <class Body>
  void each_token(const Tensor& logits, const Tensor& ids, const Tensor& weights, const Body& body) const;

  Linear gate_;
  TokenRouter token_;
};

}  // namespace echelon
