// ALiBi (Press et al. 2022, https://arxiv.org/abs/2108.12409): in place of positions, each score falls with
// the distance from the query back to its key, by a slope that differs from head to head.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"

namespace echelon {

struct Alibi {
  std::int64_t heads = 0;       // of queries in the model; 0: no ALiBi
  std::int64_t first_head = 0;  // the first of them that is here

  ECHELON_HOST_DEVICE bool is_used() const { return heads > 0; }
  // Of head `head` of those here. For n heads, a power of two, the slopes are 2^(-8 i / n), i = 1 ... n. For
  // others they are those of the power of two below, and then every second one of twice that power.
  ECHELON_HOST_DEVICE double slope(std::int64_t head) const {
    if (!is_used()) return 0;
    std::int64_t power = 1;
    while (2 * power <= heads) power *= 2;
    const std::int64_t at = first_head + head;
    const double steps = at < power ? static_cast<double>(at + 1) : static_cast<double>(at - power) + 0.5;
    return std::exp2(-8 * steps / static_cast<double>(power));
  }
};

}  // namespace echelon
