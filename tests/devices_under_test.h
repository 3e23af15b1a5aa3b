// The devices that device_kernels_test.cpp is run on: of the file that its program is linked with, one of
// emulated_devices.cpp and cuda_devices.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "tensor/kernels.h"

namespace echelon::checks {

// Memory and the kernels that compute there, which go first.
struct DeviceInUse {
  std::unique_ptr<Arena> arena;
  std::unique_ptr<Kernels> kernels;
};

struct DeviceUnderTest {
  std::string name;
  std::int64_t widest_head;  // whose attention in f64 it has memory for; not for one 16 times as wide
  std::function<std::string()> why_not;  // it cannot be used here; empty: it can
  std::function<DeviceInUse()> use;
  friend void PrintTo(const DeviceUnderTest& device, std::ostream* out) { *out << device.name; }
};

std::vector<DeviceUnderTest> devices_under_test();

}  // namespace echelon::checks
