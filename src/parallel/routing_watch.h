// An observer of a layer's routing decisions in training, which may change them: `verify` compares the
// decisions of two runs and makes both continue with the same ones.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "spec/token_router.h"
#include "tensor/tensor.h"

namespace echelon {

// Which tokens the rows of a microbatch are: sequence by sequence, from first_sample on.
struct RoutedTokens {
  std::int64_t sequences = 0;  // 0: generation, which has no observer
  std::int64_t step = 0, first_sample = 0;
  Tensor positions;  // (N, i32) within their sequences
};

class RoutingWatch {
 public:
  virtual ~RoutingWatch() = default;
  // Called when a router has chosen `ids` (R, k, i32) for its rows. The observer may overwrite them.
  virtual void on_choice(std::int64_t layer, const RoutedTokens& tokens, const TokenRouter& router,
                         const Tensor& logits, std::span<const double> bias, const Tensor& ids) = 0;
  // Called when `kept` is decided: `ids` of all rows (N, k, i32) with dropped choices replaced by -1. The
  // observer may overwrite it. keep(weights) returns what would be kept with other weights (N, k). Without a
  // capacity all are kept, and `kept` is `ids`.
  using Keep = std::function<Tensor(const Tensor& weights)>;
  virtual void on_kept(std::int64_t layer, const RoutedTokens& tokens, const Tensor& ids,
                       const Tensor& weights, const Tensor& kept, const Keep& keep) = 0;
};

}  // namespace echelon
