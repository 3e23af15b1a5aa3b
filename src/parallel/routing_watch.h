// Who looks at what a layer's router decides in training, and may decide otherwise: `verify` compares the
// decisions of two runs, and goes on with the same ones in both.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "spec/token_router.h"
#include "tensor/tensor.h"

namespace echelon {

// Whose tokens the rows of a microbatch are: sequence by sequence, from the first sample on.
struct RoutedTokens {
  std::int64_t sequences = 0;  // 0: in generation, where nobody looks
  std::int64_t step = 0, first_sample = 0;
  Tensor positions;  // (N, i32) in their sequences
};

class RoutingWatch {
 public:
  virtual ~RoutingWatch() = default;
  // A router has chosen `ids` (R, k, i32) for the rows that it has; what is there afterwards is the choice.
  virtual void on_choice(std::int64_t layer, const RoutedTokens& tokens, const TokenRouter& router,
                         const Tensor& logits, std::span<const double> bias, const Tensor& ids) = 0;
  // Of the choices `ids` of all rows (N, k, i32) those in `kept` stay, the others are -1 there; what is there
  // afterwards is kept. keep(weights): what would be by other weights than these (N, k). Without a capacity
  // all are kept, and `kept` is `ids`.
  using Keep = std::function<Tensor(const Tensor& weights)>;
  virtual void on_kept(std::int64_t layer, const RoutedTokens& tokens, const Tensor& ids,
                       const Tensor& weights, const Tensor& kept, const Keep& keep) = 0;
};

}  // namespace echelon
