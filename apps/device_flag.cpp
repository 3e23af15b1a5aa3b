// --device, for whatever computes: calibrate is in the build of the planner alone, which has no other flags
// of runs.
#include <CLI/CLI.hpp>

#include "apps/flags.h"
#include "base/error.h"
#include "tensor/device_driver.h"

namespace echelon {

void add_device(CLI::App& app, std::string& device) {
  app.add_option("--device", device,
                 "What computes; auto: an accelerator where there is one (docs/devices.md)")
      ->type_name("cpu|cuda|auto")
      ->capture_default_str();
}

std::shared_ptr<DeviceDriver> driver_of(const std::string& device) {
  if (device != "cpu" && device != "cuda" && device != "auto")
    refuse("--device {}: legal: cpu, cuda, auto", device);
  return device == "cuda" || (device == "auto" && no_cuda().empty()) ? make_cuda_driver() : nullptr;
}

}  // namespace echelon
