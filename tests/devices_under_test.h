// The devices that the tests of devices' kernels are run on (device_*_test.cpp, warp_attention_test.cpp): of
// the file that their program is linked with, one of emulated_devices.cpp and cuda_devices.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "spec/numerics.h"
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

// One that has tensor cores, which only ordinary numerics use for attention.
struct TensorCoresUnderTest {
  std::string name;
  std::function<std::string()> why_not;
  std::function<DeviceInUse(Numerics)> use;
  friend void PrintTo(const TensorCoresUnderTest& device, std::ostream* out) { *out << device.name; }
};

std::vector<TensorCoresUnderTest> devices_with_tensor_cores();

}  // namespace echelon::checks
