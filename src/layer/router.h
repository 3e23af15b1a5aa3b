// What decides which experts the tokens of one rank go to: the product that scores them, and
// spec/token_router, by which Kernels choose and weigh. What needs the tokens of other ranks, the counts
// behind balance losses, is handed in there.
#pragma once

#include <cstdint>

#include "layer/linear.h"
#include "spec/token_router.h"

namespace echelon {

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

 private:
  Linear gate_;
  TokenRouter token_;
};

}  // namespace echelon
