// Exception safety for work that is queued on device streams in several calls, each of which may fail.
#pragma once

#include <span>

#include "base/error.h"
#include "tensor/device_stream.h"

namespace echelon {

// Runs body(), which queues work on these streams. If it throws half-way, some work is queued on memory that
// may be freed next: the host waits for that work.
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
