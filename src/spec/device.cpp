#include "spec/device.h"

#include "base/error.h"

namespace echelon {

Device parse_device(const std::string& text, const std::string& field) {
  for (const Device device : {Device::cpu, Device::none})
    if (text == device_name(device)) return device;
  refuse("{}: '{}' is not a device; legal: cpu, none", field, text);
}

}  // namespace echelon
