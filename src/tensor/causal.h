// The keys that a causal mask leaves, on the host and on devices.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace echelon {

// How many of `count` keys, at positions 0, step, 2 step ..., are not after `position`.
ECHELON_HOST_DEVICE inline std::int64_t causal_keys(std::int64_t position, std::int64_t step,
                                                    std::int64_t count) {
  if (position < 0) return 0;
  const std::int64_t keys = (step == 1 ? position : position / step) + 1;
  return keys < count ? keys : count;
}

}  // namespace echelon
