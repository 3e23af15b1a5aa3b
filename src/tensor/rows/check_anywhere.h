#pragma once

#include "base/error.h"
#include "base/host_device.h"

namespace echelon {

// check() that may also run on a device: there the kernel stops, and its launch fails.
ECHELON_HOST_DEVICE inline void check_anywhere(bool holds, [[maybe_unused]] const char* what) {
#ifdef __CUDA_ARCH__
  if (!holds) __trap();
#else
  check(holds, what);
#endif
}

}  // namespace echelon
