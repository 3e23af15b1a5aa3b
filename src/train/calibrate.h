// Measures this machine and describes it as the planner's machines are described.
#pragma once

#include <string>
#include <vector>

#include "base/progress.h"
#include "spec/machine.h"

namespace echelon {

class DeviceDriver;

// One measurement, and what the machine that was made of all of them says of it.
struct CalibrationSample {
  std::string what;
  double measured_seconds = 0, described_seconds = 0;
};

struct Calibration {
  Machine machine;
  std::vector<CalibrationSample> samples;
};

// Products of several shapes and attention in f32 and in bf16, passes over memory, and an all-reduce of
// thread ranks by size; each the best of a few. One rank has `threads` compute threads; the machine is one
// node of as many ranks as there are cores for. With a driver: its device 0, by the device's clock, and two
// ranks that share it.
Calibration calibrate(int threads, const Progress& progress = {}, DeviceDriver* driver = nullptr);

}  // namespace echelon
