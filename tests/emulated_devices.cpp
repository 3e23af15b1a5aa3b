#include "case_choice.h"
#include "devices_under_test.h"
#include "emulated_launch.h"
#include "tensor/device_kernels.h"

namespace echelon::checks {

static DeviceInUse in_use(const EmulatedLaunch& launch, Numerics numerics) {
  return {std::make_unique<Arena>(),
          std::make_unique<Kernels>(std::make_shared<DeviceKernels<EmulatedLaunch>>(launch, numerics))};
}

static DeviceUnderTest emulated(const char* name, std::int64_t widest_head, const EmulatedLaunch& launch) {
  return {name, widest_head, [] { return std::string(); },
          [launch] { return in_use(launch, Numerics::ordinary); }};
}

// One lane, and one block for a row; several lanes and small pieces; more lanes than most rows have elements.
std::vector<DeviceUnderTest> devices_under_test() {
  return {emulated("one_lane", 128, EmulatedLaunch(1, false, 1 << 20, 1 << 20, 48 << 10)),
          emulated("three_lanes", 12, EmulatedLaunch(3, false, 5, 4, 3000)),
          emulated("eight_lanes", 24, EmulatedLaunch(8, true, 16, 3, 6000))};
}

// Fewer warps to a block than a CUDA device has, and as many.
std::vector<TensorCoresUnderTest> devices_with_tensor_cores() {
  const auto of = [](const char* name, const EmulatedLaunch& launch) {
    return TensorCoresUnderTest{name, [] { return std::string(); },
                                [launch](Numerics numerics) { return in_use(launch, numerics); }};
  };
  std::vector<TensorCoresUnderTest> devices{of("one_warp", EmulatedLaunch(32, false, 64, 16, 160 << 10)),
                                            of("two_warps", EmulatedLaunch(64, true, 64, 16, 160 << 10))};
  if (takes_all_cases())  // as slow as it is large
    devices.push_back(of("four_warps", EmulatedLaunch(128, false, 64, 16, 160 << 10)));
  return devices;
}

}  // namespace echelon::checks
