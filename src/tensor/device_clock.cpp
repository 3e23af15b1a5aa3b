#include "tensor/device_clock.h"

#include <cmath>

namespace echelon {

DeviceClock::DeviceClock(DeviceStream& stream, const Time& time) : stream_(stream), base_(mark()) {
  base_->synchronize();
  base_time_ = time.now();
}

// Devices tell the time between two events in floats: a base that is long ago is moved on, while microseconds
// are still told apart.
Clock::time_point DeviceClock::time_of(const std::shared_ptr<DeviceEvent>& event) {
  constexpr double longest_seconds = 10;
  event->synchronize();
  const double seconds = event->seconds_since(*base_);
  const auto time = base_time_ + std::chrono::round<Clock::duration>(std::chrono::duration<double>(seconds));
  if (std::abs(seconds) > longest_seconds) {
    base_ = event;
    base_time_ = time;
  }
  return time;
}

}  // namespace echelon
