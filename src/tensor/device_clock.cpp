#include "tensor/device_clock.h"

#include <cmath>

namespace echelon {

DeviceClock::DeviceClock(DeviceStream& stream, const Time& time) : stream_(stream), base_(mark()) {
  base_->synchronize();
  base_time_ = time.now();
}

// Devices measure the time between two events as floats: a base that is too old is replaced while floats
// still resolve microseconds.
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
