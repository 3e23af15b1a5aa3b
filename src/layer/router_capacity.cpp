#include "layer/router_capacity.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "spec/routing_balance.h"
#include "tensor/reference_view.h"

namespace echelon {

// Half the digits of a weight. Tokens that have the same weight (the only choice of k = 1; the same tokens at
// the beginning of a sequence) have it up to rounding, which is another one on another mesh: what is equal
// here is equal there.
template <class F>
static F drop_priority(F weight) {
  constexpr F digits = sizeof(F) == 8 ? F(0x1p26) : F(0x1p12);
  return std::nearbyint(weight * digits);
}

std::int64_t drop_over_capacity(const Tensor& ids, const Tensor& weights, std::int64_t experts,
                                std::int64_t capacity, DropPolicy policy, const Tensor& kept) {
  const auto choices = static_cast<std::size_t>(ids.numel());
  std::vector<double> values(choices);
  with_float_type(weights, [&]<class F>(F) {
    const F* weight = flat<F>(weights, ids.numel());
    std::transform(weight, weight + ids.numel(), values.begin(), drop_priority<F>);
  });
  return drop_over_capacity({flat<std::int32_t>(ids, ids.numel()), choices}, values, experts, capacity,
                            policy, {flat<std::int32_t>(kept, ids.numel()), choices});
}

std::vector<std::int64_t> sort_by_expert(const Tensor& kept, std::int64_t experts, const Tensor& places,
                                         const Tensor& tokens) {
  const std::int64_t choices = kept.numel(), k = kept.cols();
  const std::int32_t* id = flat<std::int32_t>(kept, choices);
  std::int32_t* place = flat<std::int32_t>(places, choices);
  std::int32_t* token = flat<std::int32_t>(tokens, tokens.numel());
  std::vector<std::int64_t> bounds(static_cast<std::size_t>(experts) + 1);
  for (std::int64_t i = 0; i < choices; ++i)
    if (id[i] >= 0) ++bounds[static_cast<std::size_t>(id[i]) + 1];
  for (std::size_t e = 1; e < bounds.size(); ++e) bounds[e] += bounds[e - 1];
  check(bounds.back() <= tokens.numel(), "there is room for every copy of a token");
  std::vector<std::int64_t> next(bounds.begin(), bounds.end() - 1);
  for (std::int64_t i = 0; i < choices; ++i) {
    place[i] = -1;
    if (id[i] < 0) continue;
    place[i] = static_cast<std::int32_t>(next[static_cast<std::size_t>(id[i])]++);
    token[place[i]] = static_cast<std::int32_t>(i / k);
  }
  std::fill(token + bounds.back(), token + tokens.numel(), -1);
  return bounds;
}

}  // namespace echelon
