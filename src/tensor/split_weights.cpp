#include "tensor/split_weights.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "base/split_weight.h"
#include "tensor/host.h"

namespace echelon {

void join_weights(const Tensor& values, const Tensor& remainders, std::span<float> weights) {
  const auto count = static_cast<std::size_t>(values.numel());
  check(values.dtype() == DType::bf16 && remainders.dtype() == DType::i16 &&
            remainders.numel() == values.numel() && weights.size() == count,
        "a remainder belongs to each value");
  if (count == 0) return;
  const HostBytes upper(values, true), lower(remainders, true);
  const auto* const value = reinterpret_cast<const bf16*>(upper.data());
  const auto* const remainder = reinterpret_cast<const std::int16_t*>(lower.data());
  for (std::size_t i = 0; i < count; ++i) weights[i] = SplitWeight(value[i], remainder[i]).joined();
}

void split_values(std::span<const float> weights, Out values) {
  std::vector<bf16> rounded(weights.size());
  std::transform(weights.begin(), weights.end(), rounded.begin(),
                 [](float weight) { return SplitWeight(weight).value; });
  copy_from_host(rounded, values);
}

void split_remainders(std::span<const float> weights, Out remainders) {
  std::vector<std::int16_t> left(weights.size());
  std::transform(weights.begin(), weights.end(), left.begin(),
                 [](float weight) { return SplitWeight(weight).remainder; });
  copy_from_host(left, remainders);
}

}  // namespace echelon
