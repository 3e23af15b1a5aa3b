// Measures this machine and describes it in the planner's format.
#pragma once

#include <string>
#include <vector>

#include "base/progress.h"
#include "spec/machine.h"

namespace echelon {

class DeviceDriver;

// One measurement, and what the resulting machine description predicts for it.
struct CalibrationSample {
  std::string what;
  double measured_seconds = 0, described_seconds = 0;
};

struct Calibration {
  Machine machine;
  std::vector<CalibrationSample> samples;
};

// Measures matrix products of several shapes and attention in f32 and bf16, passes over memory, and
// all-reduces of thread ranks by size; each is the best of a few runs. One rank has `threads` compute
// threads; the machine is one node with as many ranks as there are cores for. With a driver: its device 0, by
// the device's clock, and two ranks that share it.
Calibration calibrate(int threads, const Progress& progress = {}, DeviceDriver* driver = nullptr);

}  // namespace echelon
