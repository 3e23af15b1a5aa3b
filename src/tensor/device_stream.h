// A rank's streams, events and graphs on a device, and what it moves between the host and there.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>

#include "tensor/device_driver.h"

namespace echelon {

class DeviceEvent {
 public:
  // Happens when what is queued on the stream now is done.
  DeviceEvent(DeviceDriver& driver, int device, StreamHandle stream);
  ~DeviceEvent() { driver_.destroy_event(event_); }
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  EventHandle handle() const { return event_; }
  bool has_happened() const { return driver_.has_happened(event_); }
  void synchronize() const { driver_.synchronize(event_); }
  // Of two that have happened.
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
  // RunError saying `what_for` where the system has no more of it.
  PinnedMemory(DeviceDriver& driver, std::size_t bytes, const char* what_for);
  // Nothing that is queued uses it any more.
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

// Work of a stream that is queued again by one call.
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

// Rows in memory of the host's own, which need not be pinned, or on the device.
struct StridedRows {
  void* data = nullptr;
  std::size_t stride = 0;  // bytes
};

// Of one rank: its copies come from that rank's thread. Others may record on it, and let it wait.
class DeviceStream {
 public:
  DeviceStream(DeviceDriver& driver, int device);
  // Waits for what is under way.
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
  // The host waits for all that is queued.
  void synchronize() const {
    refuse_in_capture("the host waits for what it computes");
    driver_.synchronize(stream_);
  }

  // What `work` queues here, which does not run: see DeviceDriver::begin_capture(). What was queued before is
  // waited for. RunError where it does what a graph cannot hold.
  GraphHandle capture(const std::function<void()>& work);
  bool is_capturing() const { return is_capturing_; }

  // Waits for the numbers, and so for all that was queued before. Through pinned memory.
  void copy_to_host(StridedRows to, StridedRows from, std::size_t row_bytes, std::size_t rows);
  // `from` may be changed when it returns; the copy is queued. Through pinned memory, and waits where that
  // is full of copies still under way.
  void copy_from_host(StridedRows to, StridedRows from, std::size_t row_bytes, std::size_t rows);

 private:
  // What is copied at a time; while one half is under way the other is filled.
  static constexpr std::size_t half_bytes = 2 << 20;
  struct Half {
    std::byte* memory = nullptr;
    std::shared_ptr<DeviceEvent> in_use;
  };
  void refuse_in_capture(const char* why) const;
  // A half whose copy is done.
  Half& next_half();
  // In pieces of at most half_bytes: visit(bytes from the row's begin, bytes of each row, first row, rows).
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
