// spec/routing_balance on tensors.
#pragma once

#include "layer/router.h"
#include "spec/routing_balance.h"

namespace echelon {

// The same of choices ids (N, k, i32).
inline void count_routed(const Tensor& ids, std::int64_t experts, const RouterSpec& spec,
                         std::span<double> counts) {
  count_routed({ids.host<std::int32_t>(), static_cast<std::size_t>(ids.numel())}, ids.cols(), experts, spec,
               counts);
}

}  // namespace echelon
