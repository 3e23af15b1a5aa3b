// Experts' capacity, and the order in which tokens stand before them.
#pragma once

#include <cstdint>
#include <vector>

#include "spec/routing.h"
#include "tensor/tensor.h"

namespace echelon {

// spec/routing_balance on tensors: ids and kept (N, k, i32), weights (N, k), which count as equal where they
// agree in half the digits of their type.
std::int64_t drop_over_capacity(const Tensor& ids, const Tensor& weights, std::int64_t experts,
                                std::int64_t capacity, DropPolicy policy, const Tensor& kept);

// Tokens' copies sorted by expert, and by token for each: places (N, k) is where each choice went, -1 where
// it was dropped; tokens (M) is whose copy stands at each place, -1 after the last; M is room for all.
// Returns where each expert's run begins, and after the last one where it ends: E + 1 numbers.
std::vector<std::int64_t> sort_by_expert(const Tensor& kept, std::int64_t experts, const Tensor& places,
                                         const Tensor& tokens);

}  // namespace echelon
