// Converts the times of events on a device's streams to the host's clock.
#pragma once

#include <memory>

#include "base/clock.h"
#include "tensor/device_stream.h"

namespace echelon {

// Of one rank; used by its own thread.
class DeviceClock {
 public:
  // Marks work on this stream; `time` is the host's clock. The host waits for the stream.
  DeviceClock(DeviceStream& stream, const Time& time);
  DeviceClock(const DeviceClock&) = delete;
  DeviceClock& operator=(const DeviceClock&) = delete;

  // An event that happens when the work queued so far is done.
  std::shared_ptr<DeviceEvent> mark() const { return stream_.record(); }
  // When the event happened; the host waits for it.
  Clock::time_point time_of(const std::shared_ptr<DeviceEvent>& event);

 private:
  DeviceStream& stream_;
  std::shared_ptr<DeviceEvent> base_;
  Clock::time_point base_time_;
};

}  // namespace echelon
