#include "devices_under_test.h"
#include "emulated_launch.h"
#include "tensor/device_kernels.h"

namespace echelon::checks {

static DeviceUnderTest emulated(const char* name, std::int64_t widest_head, const EmulatedLaunch& launch) {
  return {name, widest_head, [] { return std::string(); },
          [launch] {
            return DeviceInUse{
                std::make_unique<Arena>(),
                std::make_unique<Kernels>(std::make_shared<DeviceKernels<EmulatedLaunch>>(launch))};
          }};
}

// One lane, and one block for a row; several lanes and small pieces; more lanes than most rows have elements.
std::vector<DeviceUnderTest> devices_under_test() {
  return {emulated("one_lane", 128, EmulatedLaunch(1, false, 1 << 20, 1 << 20, 48 << 10)),
          emulated("three_lanes", 12, EmulatedLaunch(3, false, 5, 4, 3000)),
          emulated("eight_lanes", 24, EmulatedLaunch(8, true, 16, 3, 6000))};
}

}  // namespace echelon::checks
