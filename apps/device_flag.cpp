// --device, for every verb that computes: a separate file, since calibrate is in the planner's build too,
// which has no other flags of runs.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "apps/flags.h"
#include "apps/launched.h"
#include "base/error.h"
#include "tensor/device_driver.h"

namespace echelon {

void add_device(CLI::App& app, std::string& device) {
  app.add_option("--device", device,
                 "What computes; auto: an accelerator where there is one (docs/devices.md)")
      ->type_name("cpu|cuda|auto")
      ->capture_default_str();
}

static void check_device(const std::string& device) {
  if (device != "cpu" && device != "cuda" && device != "auto")
    refuse("--device {}: legal: cpu, cuda, auto", device);
}

Device imagined(const std::string& device) {
  check_device(device);
  return device == "cuda" || (device == "auto" && no_cuda().empty()) ? Device::cuda : Device::cpu;
}

std::shared_ptr<DeviceDriver> driver_of(const std::string& device) {
  check_device(device);
  if (device == "cuda") return make_cuda_driver();
  if (device == "cpu") return nullptr;
  const std::string why = no_cuda();
  if (why.empty()) return make_cuda_driver();
  if (!is_another_process()) fmt::print(stderr, "echelon: --device auto takes the cpu: {}\n", why);
  return nullptr;
}

}  // namespace echelon
