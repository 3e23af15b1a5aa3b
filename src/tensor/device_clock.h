// When a device came to the events of its streams, on the host's clock.
#pragma once

#include <memory>

#include "base/clock.h"
#include "tensor/device_stream.h"

namespace echelon {

// Of one rank, by its own thread.
class DeviceClock {
 public:
  // What is queued on the stream is marked; the clock of `time` is the host's. The host waits for the stream.
  DeviceClock(DeviceStream& stream, const Time& time);
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

  // Happens when what is queued on the stream now is done.
  std::shared_ptr<DeviceEvent> mark() const { return stream_.record(); }
  // The host waits until it has happened.
  Clock::time_point time_of(const std::shared_ptr<DeviceEvent>& event);

 private:
  DeviceStream& stream_;
  std::shared_ptr<DeviceEvent> base_;
  Clock::time_point base_time_;
};

}  // namespace echelon
