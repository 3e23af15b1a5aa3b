// A rank's streams, events and graphs on a device, and copies between the host and the device.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>

#include "tensor/device_driver.h"

namespace echelon {

class DeviceEvent {
 public:
  // Happens when the work queued on the stream so far is done.
  DeviceEvent(DeviceDriver& driver, int device, StreamHandle stream);
  ~DeviceEvent() { driver_.destroy_event(event_); }
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  EventHandle handle() const { return event_; }
  bool has_happened() const { return driver_.has_happened(event_); }
  void synchronize() const { driver_.synchronize(event_); }
  // Both must have happened.
  double seconds_since(const DeviceEvent& other) const {
    return driver_.seconds_between(other.event_, event_);
  }

 private:
  DeviceDriver& driver_;
  EventHandle event_;
};

// Page-locked memory of the host.
class PinnedMemory {
 public:
  // RunError saying `what_for` if the system has none left.
  PinnedMemory(DeviceDriver& driver, std::size_t bytes, const char* what_for);
  // Nothing queued may still use it.
  ~PinnedMemory() { driver_.free_pinned(data_); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  DeviceDriver& driver_;
  std::size_t bytes_;
  std::byte* data_;
};

class DeviceStream;

// Work of a stream that one call queues again.
class DeviceGraph {
 public:
  // See DeviceStream::capture(). The stream outlives it.
  DeviceGraph(DeviceStream& stream, const std::function<void()>& work);
  ~DeviceGraph();
  DeviceGraph(const DeviceGraph&) = delete;
  DeviceGraph& operator=(const DeviceGraph&) = delete;

  void launch() const;

 private:
  DeviceStream& stream_;
  GraphHandle graph_;
};

// Rows in host memory, which need not be pinned, or on the device.
struct StridedRows {
  void* data = nullptr;
  std::size_t stride = 0;  // bytes
};

// The stream of one rank: only that rank's thread copies. Others may record on it, and make it wait.
class DeviceStream {
 public:
  DeviceStream(DeviceDriver& driver, int device);
  // Waits for work in progress.
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  DeviceDriver& driver() const { return driver_; }
  int device() const { return device_; }
  StreamHandle handle() const { return stream_; }

  std::shared_ptr<DeviceEvent> record() const {
    refuse_in_capture("an event is recorded in it");
    return std::make_shared<DeviceEvent>(driver_, device_, stream_);
  }
  void wait_for(const DeviceEvent& event) const {
    refuse_in_capture("it waits for another stream");
    driver_.wait(stream_, event.handle());
  }
  // Makes the host wait for all queued work.
  void synchronize() const {
    refuse_in_capture("the host waits for what it computes");
    driver_.synchronize(stream_);
  }

  // Captures what `work` queues here without running it: see DeviceDriver::begin_capture(). Waits for earlier
  // work first. RunError if it does something that a graph cannot contain.
  GraphHandle capture(const std::function<void()>& work);
  bool is_capturing() const { return is_capturing_; }

  // Waits for the data, and so for all earlier work. Goes through pinned memory.
  void copy_to_host(StridedRows to, StridedRows from, std::size_t row_bytes, std::size_t rows);
  // Queues the copy; `from` may be changed afterwards. Goes through pinned memory, and waits if that is full
  // of pending copies.
  void copy_from_host(StridedRows to, StridedRows from, std::size_t row_bytes, std::size_t rows);

 private:
  // The size of a copy; one half is in flight while the other is filled.
  static constexpr std::size_t half_bytes = 2 << 20;
  struct Half {
    std::byte* memory = nullptr;
    std::shared_ptr<DeviceEvent> in_use;
  };
  void refuse_in_capture(const char* why) const;
  // A half whose copy has finished.
  Half& next_half();
  // Calls visit(offset within the row, bytes of each row, first row, rows) for pieces of at most half_bytes.
  template <class Visit>
  static void cut(std::size_t row_bytes, std::size_t rows, const Visit& visit);

  DeviceDriver& driver_;
  const int device_;
  StreamHandle stream_;
  bool is_capturing_ = false;
  std::array<Half, 2> halves_;
  std::size_t next_ = 0;
};

}  // namespace echelon
