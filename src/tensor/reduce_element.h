// One element of a reduction over ranks, as a device computes it, with the bits of comm/reduce.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/bf16.h"
#include "base/halving_tree.h"
#include "base/host_device.h"
#include "spec/reduce_op.h"

namespace echelon {

// How consecutive leaves are added by halves, precomputed so that a device need not know the tree.
struct ReductionOrder {
  static constexpr int most_sources = 64;
  std::int8_t merges[most_sources] = {};  // after each source
  static ReductionOrder of(int sources) {
    ReductionOrder order;
    for (int i = 0; i < sources; ++i)
      order.merges[i] = static_cast<std::int8_t>(tree_place(sources, i).merges);
    return order;
  }
};

// `T`: the type of sums; `From`: the stored type.
template <ReduceOp op, class T>
ECHELON_HOST_DEVICE inline T combined(T a, T b) {
  if constexpr (op == ReduceOp::sum) {
    if constexpr (std::is_integral_v<T>)  // which wraps around
      return static_cast<T>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
    else
      return a + b;
  } else {
    return a < b || b != b ? b : a;  // NaN stays
  }
}

template <ReduceOp op, class T, class From>
ECHELON_HOST_DEVICE inline T reduced(const From* const* sources, int num_sources, const ReductionOrder& order,
                                     std::int64_t i) {
  constexpr int most_waiting_sums = 7;  // of 64
  static_assert(most_waiting(ReductionOrder::most_sources) < most_waiting_sums);
  T waiting[most_waiting_sums];
  int top = 0;
  for (int k = 0; k < num_sources; ++k) {
    T sum = static_cast<T>(sources[k][i]);
    for (int merge = 0; merge < order.merges[k]; ++merge) sum = combined<op>(waiting[--top], sum);
    waiting[top++] = sum;
  }
  return waiting[0];
}

}  // namespace echelon
