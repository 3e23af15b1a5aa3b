// Work on streams of devices that is queued in several calls, any of which may fail.
#pragma once

#include <span>

#include "base/error.h"
#include "tensor/device_stream.h"

namespace echelon {

// body() queues on these streams. What throws half-way has queued some of it, on memory that may be given
// back next: the host waits for that.
template <class Body>
void whole_or_waited_for(std::span<const DeviceStream* const> streams, const Body& body) {
  try {
    body();
  } catch (...) {
    for (const DeviceStream* stream : streams) try {
        stream->synchronize();
      } catch (const RunError&) {  // the device is lost
      }
    throw;
  }
}

}  // namespace echelon
