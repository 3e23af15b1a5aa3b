#include "case_choice.h"
#include "devices_under_test.h"
#include "emulated_launch.h"
#include "tensor/device_kernels.h"

namespace echelon::checks {

namespace {

// With tensor cores for products of fp8 whose sizes are multiples of 4: what a vendor's library is given, by
// plain loops.
class WithTensorCores final : public DeviceKernels<EmulatedLaunch> {
 public:
  using DeviceKernels<EmulatedLaunch>::DeviceKernels;

 protected:
  bool takes_codes(const Fp8Product& p) const override {
    const MatrixProduct& of = p.product;
    return of.a.numel() > 0 && of.c.rows() % 4 == 0 && of.c.cols() % 4 == 0 && depth(of) % 4 == 0;
  }
  bool multiply_codes(const Fp8Product& p, const float* scale_a, const float* scale_b) override {
    const std::int64_t k = depth(p.product);
    const auto codes = [](const Tensor& room) {
      return reinterpret_cast<const std::uint8_t*>(room.address());
    };
    with_stored_type(p.product.c, [&]<class T>(T) {
      const rows::Matrix<T> c = matrix<T>(p.product.c);
      for (std::int64_t i = 0; i < c.rows; ++i)
        for (std::int64_t j = 0; j < c.cols; ++j) {
          Wide<T> sum = 0;
          for (std::int64_t l = 0; l < k; ++l)
            sum += fp8_value(codes(p.room_a)[i * k + l], p.formats.a) *
                   fp8_value(codes(p.room_b)[j * k + l], p.formats.b);
          sum *= static_cast<Wide<T>>(*scale_a) * static_cast<Wide<T>>(*scale_b);
          c[i][j] = T(p.product.accumulate ? c[i][j] + sum : sum);
        }
    });
    return true;
  }

 private:
  static std::int64_t depth(const MatrixProduct& p) {
    return p.ta == Transpose::yes ? p.a.rows() : p.a.cols();
  }
};

}  // namespace

static DeviceInUse in_use(const EmulatedLaunch& launch, Numerics numerics) {
  return {std::make_unique<Arena>(),
          std::make_unique<Kernels>(std::make_shared<WithTensorCores>(launch, numerics))};
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

// Fewer warps to a block than a CUDA device has, as many, and these as a warpgroup.
std::vector<TensorCoresUnderTest> devices_with_tensor_cores() {
  const auto of = [](const char* name, const EmulatedLaunch& launch) {
    return TensorCoresUnderTest{name, [] { return std::string(); },
                                [launch](Numerics numerics) { return in_use(launch, numerics); }};
  };
  std::vector<TensorCoresUnderTest> devices{of("one_warp", EmulatedLaunch(32, false, 64, 16, 160 << 10)),
                                            of("two_warps", EmulatedLaunch(64, true, 64, 16, 160 << 10))};
  if (takes_wide_cases()) {  // as slow as it is large
    devices.push_back(of("four_warps", EmulatedLaunch(128, false, 64, 16, 160 << 10)));
    devices.push_back(of("warpgroup", EmulatedLaunch(128, false, 64, 16, 226 << 10, true)));
    devices.push_back(of("warpgroup_falling", EmulatedLaunch(128, true, 64, 16, 226 << 10, true)));
  }
  return devices;
}

}  // namespace echelon::checks
