#include "tensor/device_stream.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/units.h"

namespace echelon {

void fail_out_of_memory(DeviceDriver& driver, int device, std::size_t bytes) {
  fail("out of memory on device {}: {} asked, {} free", device, format_bytes(static_cast<double>(bytes)),
       format_bytes(static_cast<double>(driver.free_bytes(device))));
}

std::string no_kernels(DeviceDriver& driver, int device) {
  const DeviceProperties p = driver.properties(device);
  const auto [major, minor] = driver.least_capability();
  if (std::pair(p.major, p.minor) >= std::pair(major, minor)) return "";
  return fmt::format("device {} ({}) has compute capability {}.{}, and this build has kernels for {}.{} on",
                     device, p.name, p.major, p.minor, major, minor);
}

void fail_launch(const std::string& kernel, int device, const std::string& why) {
  fail("the kernel {} could not be launched on device {}: {}", kernel, device, why);
}

DeviceLost::DeviceLost(int its_device, const std::string& why)
    : RunError(fmt::format("device {} was lost: {}", its_device, why)), device(its_device) {}

void fail_lost(int device, const std::string& why) { throw DeviceLost(device, why); }

void fail_capture(int device, const std::string& why) {
  fail("a CUDA graph could not be captured on device {}: {}", device, why);
}

void fail_graph_launch(int device, const std::string& why) {
  fail("a CUDA graph could not be launched on device {}: {}", device, why);
}

DeviceEvent::DeviceEvent(DeviceDriver& driver, int device, StreamHandle stream)
    : driver_(driver), event_(driver.create_event(device)) {
  try {
    driver_.record(event_, stream);
  } catch (...) {
    driver_.destroy_event(event_);
    throw;
  }
}

PinnedMemory::PinnedMemory(DeviceDriver& driver, std::size_t bytes, const char* what_for)
    : driver_(driver), bytes_(bytes), data_(driver.allocate_pinned(bytes)) {
  if (data_ == nullptr)
    fail("out of memory: the system has no {} of pinned memory for {}",
         format_bytes(static_cast<double>(bytes)), what_for);
}

DeviceStream::DeviceStream(DeviceDriver& driver, int device) : driver_(driver), device_(device) {
  driver_.use(device);
  stream_ = driver_.create_stream(device);
}

DeviceStream::~DeviceStream() {
  try {
    synchronize();
  } catch (const RunError&) {  // the device is lost; whoever used it has reported that
  }
  for (Half& half : halves_) {
    half.in_use.reset();
    if (half.memory != nullptr) driver_.free_pinned(half.memory);
  }
  driver_.destroy_stream(stream_);
}

DeviceGraph::DeviceGraph(DeviceStream& stream, const std::function<void()>& work)
    : stream_(stream), graph_(stream.capture(work)) {}

DeviceGraph::~DeviceGraph() { stream_.driver().destroy_graph(graph_); }

void DeviceGraph::launch() const { stream_.driver().launch(graph_, stream_.handle()); }

GraphHandle DeviceStream::capture(const std::function<void()>& work) {
  synchronize();
  driver_.begin_capture(stream_);
  is_capturing_ = true;
  try {
    work();
  } catch (...) {
    is_capturing_ = false;
    driver_.abandon_capture(stream_);
    throw;
  }
  is_capturing_ = false;
  return driver_.end_capture(stream_);
}

void DeviceStream::refuse_in_capture(const char* why) const {
  if (is_capturing_) fail_capture(device_, why);
}

DeviceStream::Half& DeviceStream::next_half() {
  Half& half = halves_[next_];
  next_ = (next_ + 1) % halves_.size();
  if (half.in_use) half.in_use->synchronize();
  half.in_use.reset();
  if (half.memory == nullptr) half.memory = driver_.allocate_pinned(half_bytes);
  if (half.memory == nullptr)
    fail("out of memory: the system has no {} of pinned memory for copies to device {}",
         format_bytes(static_cast<double>(half_bytes)), device_);
  return half;
}

template <class Visit>
void DeviceStream::cut(std::size_t row_bytes, std::size_t rows, const Visit& visit) {
  if (row_bytes == 0) return;
  if (row_bytes <= half_bytes) {
    const std::size_t at_once = half_bytes / row_bytes;
    for (std::size_t row = 0; row < rows; row += at_once)
      visit(0, row_bytes, row, std::min(at_once, rows - row));
    return;
  }
  for (std::size_t row = 0; row < rows; ++row)
    for (std::size_t at = 0; at < row_bytes; at += half_bytes)
      visit(at, std::min(half_bytes, row_bytes - at), row, std::size_t{1});
}

static void copy_rows(StridedRows to, StridedRows from, std::size_t row_bytes, std::size_t rows) {
  for (std::size_t row = 0; row < rows; ++row)
    std::memcpy(static_cast<std::byte*>(to.data) + row * to.stride,
                static_cast<const std::byte*>(from.data) + row * from.stride, row_bytes);
}

static StridedRows at(StridedRows rows, std::size_t byte, std::size_t row) {
  return {static_cast<std::byte*>(rows.data) + row * rows.stride + byte, rows.stride};
}

void DeviceStream::copy_to_host(StridedRows to, StridedRows from, std::size_t row_bytes, std::size_t rows) {
  refuse_in_capture("the host reads what it computes");
  cut(row_bytes, rows, [&](std::size_t byte, std::size_t bytes, std::size_t row, std::size_t count) {
    const StridedRows pinned{next_half().memory, bytes}, source = at(from, byte, row);
    driver_.copy({.kind = CopyKind::to_host,
                  .to = pinned.data,
                  .to_stride = pinned.stride,
                  .from = source.data,
                  .from_stride = source.stride,
                  .row_bytes = bytes,
                  .rows = count},
                 stream_);
    synchronize();
    copy_rows(at(to, byte, row), pinned, bytes, count);
  });
}

void DeviceStream::copy_from_host(StridedRows to, StridedRows from, std::size_t row_bytes, std::size_t rows) {
  refuse_in_capture("it copies what the host has");
  cut(row_bytes, rows, [&](std::size_t byte, std::size_t bytes, std::size_t row, std::size_t count) {
    Half& half = next_half();
    const StridedRows pinned{half.memory, bytes}, destination = at(to, byte, row);
    copy_rows(pinned, at(from, byte, row), bytes, count);
    driver_.copy({.kind = CopyKind::from_host,
                  .to = destination.data,
                  .to_stride = destination.stride,
                  .from = pinned.data,
                  .from_stride = pinned.stride,
                  .row_bytes = bytes,
                  .rows = count},
                 stream_);
    half.in_use = record();
  });
}

}  // namespace echelon
