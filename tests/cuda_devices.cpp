#include "devices_under_test.h"
#include "tensor/device_driver.h"

namespace echelon::checks {

static DeviceInUse in_use(Numerics numerics) {
  static const std::shared_ptr<DeviceDriver> driver = make_cuda_driver();
  auto arena = std::make_unique<Arena>(driver.get(), 0);
  auto kernels = make_kernels(*arena, PrecisionRecipe(), 1, numerics);
  return {std::move(arena), std::move(kernels)};
}

std::vector<DeviceUnderTest> devices_under_test() {
  const auto with = [](const char* name, Numerics numerics) {
    return DeviceUnderTest{name, 256, no_cuda, [numerics] { return in_use(numerics); }};
  };
  return {with("cuda", Numerics::ordinary), with("cuda_invariant", Numerics::invariant)};
}

std::vector<TensorCoresUnderTest> devices_with_tensor_cores() { return {{"cuda", no_cuda, in_use}}; }

}  // namespace echelon::checks
