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

namespace {

// Writes directly to host memory; otherwise via a copy.
template <class T, class Take>
void take_of_each(std::span<const float> weights, const Tensor& to, const Take& take) {
  const auto each = [&](T* out) {
    std::transform(weights.begin(), weights.end(), out, [&](float x) { return take(SplitWeight(x)); });
  };
  check(static_cast<std::int64_t>(weights.size()) == to.numel(), "there is a place for each weight");
  if (to.device() == Device::cpu && to.contiguous()) return each(to.host<T>());
  std::vector<T> taken(weights.size());
  each(taken.data());
  copy_from_host(taken, to);
}

}  // namespace

void split_values(std::span<const float> weights, Out values) {
  take_of_each<bf16>(weights, values, [](const SplitWeight& split) { return split.value; });
}

void split_remainders(std::span<const float> weights, Out remainders) {
  take_of_each<std::int16_t>(weights, remainders, [](const SplitWeight& split) { return split.remainder; });
}

}  // namespace echelon
