// The interface to an accelerator's runtime, which separates Echelon from the vendor. cuda/driver_cuda.cpp
// implements it with CUDA; tests have one whose device is this machine's memory.
//
// Work is queued on streams. Work on one stream runs in order; between streams only events order work. A call
// that queues work returns at once and has then read its arguments, except memory, which is accessed when the
// work runs.
//
// Any thread may call, for any stream. Every failure is a RunError of one sentence that names the device. A
// failed launch names its kernel, and once a device is lost every call for it says so. Functions that release
// something (free, destroy) never throw, since they are called while another failure propagates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "base/error.h"
#include "spec/dtype.h"
#include "spec/numerics.h"
#include "spec/precision.h"
#include "spec/reduce_op.h"

namespace echelon {

class Arena;
class DeviceCollectives;
class KernelBackend;

// Pointers of the vendor's API: cudaStream_t, cudaEvent_t, cudaGraphExec_t.
struct StreamHandle {
  void* handle = nullptr;
  int device = 0;
};
struct EventHandle {
  void* handle = nullptr;
  int device = 0;
};
struct GraphHandle {
  void* handle = nullptr;
  int device = 0;
};

// A device that is lost: every later call for it fails in the same way.
struct DeviceLost : RunError {
  DeviceLost(int its_device, const std::string& why);
  int device;
};

struct DeviceProperties {
  std::string name;  // "NVIDIA H100 80GB HBM3"
  std::size_t memory_bytes = 0;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::string id;  // unique over all machines
};

enum class CopyKind { to_host, from_host, on_device };

// A copy of rows of row_bytes each, at these strides.
struct RowsCopy {
  CopyKind kind = CopyKind::on_device;
  void* to = nullptr;
  std::size_t to_stride = 0;  // bytes
  const void* from = nullptr;
  std::size_t from_stride = 0;  // bytes
  std::size_t row_bytes = 0;
  std::size_t rows = 1;
};

// Element i of every destination = element i of all sources, reduced by halves (base/halving_tree.h). A
// destination may be a source. max propagates NaN; i32 sums wrap around; bf16 is summed in f32, and each sum
// rounded once. Bit for bit like reduce_elements() of comm/reduce.h.
struct Reduction {
  ReduceOp op = ReduceOp::sum;
  DType dtype = DType::f32;
  std::span<const std::byte* const> sources;
  std::span<std::byte* const> destinations;
  std::int64_t count = 0;
};

class DeviceDriver {
 public:
  DeviceDriver() = default;
  virtual ~DeviceDriver() = default;
  DeviceDriver(const DeviceDriver&) = delete;
  DeviceDriver& operator=(const DeviceDriver&) = delete;

  // Devices are numbered from 0.
  virtual int num_devices() = 0;
  virtual DeviceProperties properties(int device) = 0;
  // The least compute capability that the kernels are compiled for.
  virtual std::pair<int, int> least_capability() = 0;
  virtual std::size_t free_bytes(int device) = 0;
  // Later launches of the calling thread are for this device.
  virtual void use(int device) = 0;
  // Whether kernels on `device` can access the memory of `peer`. reach() enables this, and is false if it
  // cannot. Copies between two devices, on a stream of one of them, do not need it.
  virtual bool can_reach(int device, int peer) = 0;
  virtual bool reach(int device, int peer) = 0;

  // At least 256-byte aligned, contents undefined. Null if the device has no memory left.
  virtual std::byte* allocate(int device, std::size_t bytes) = 0;
  // The caller ensures that nothing queued or running still uses it.
  virtual void free(int device, std::byte* memory) noexcept = 0;
  // Pinned host memory, with which copies overlap computation. Null if there is none left.
  virtual std::byte* allocate_pinned(std::size_t bytes) = 0;
  virtual void free_pinned(std::byte* memory) noexcept = 0;

  virtual StreamHandle create_stream(int device) = 0;
  // Does not wait; the caller has.
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;
  // Waits for all queued work.
  virtual void synchronize(StreamHandle stream) = 0;

  virtual EventHandle create_event(int device) = 0;
  virtual void destroy_event(EventHandle event) noexcept = 0;
  // The event happens when all work queued so far on the stream, of the same device, is done. Only once for
  // each event.
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  // Work queued on the stream from now on starts after the event, which must have been recorded.
  virtual void wait(StreamHandle stream, EventHandle event) = 0;
  // Whether it has happened; does not wait.
  virtual bool has_happened(EventHandle event) = 0;
  virtual void synchronize(EventHandle event) = 0;
  // Both must have happened.
  virtual double seconds_between(EventHandle first, EventHandle second) = 0;

  // Captures work of a stream as a graph that can be queued again and again. What is queued on the stream
  // before end_capture() is recorded and does not run: kernels, fills, and copies on a device, with their
  // current arguments. Until then nobody may wait for the stream, record on it or make it wait. Memory may be
  // allocated, and other streams used. After any failure the capture is abandoned, nothing of it is left, and
  // the stream is as before.
  virtual void begin_capture(StreamHandle stream) = 0;
  virtual GraphHandle end_capture(StreamHandle stream) = 0;
  virtual void abandon_capture(StreamHandle stream) noexcept = 0;
  // The memory of the capture must still exist.
  virtual void launch(GraphHandle graph, StreamHandle stream) = 0;
  // Queued launches of it still run.
  virtual void destroy_graph(GraphHandle graph) noexcept = 0;

  // The host's side must be pinned memory.
  virtual void copy(const RowsCopy& rows, StreamHandle stream) = 0;
  virtual void fill_bytes(std::byte* to, std::uint8_t value, std::size_t bytes, StreamHandle stream) = 0;
  virtual void reduce(const Reduction& reduction, StreamHandle stream) = 0;

  // The vendor's collectives. no_collectives() says why there are none, and collectives() then throws
  // RequestError.
  virtual std::string no_collectives() = 0;
  virtual DeviceCollectives& collectives() = 0;

  // Called after a kernel launch: RunError naming the kernel if it failed.
  virtual void check_launch(const char* kernel) = 0;
  // Kernels for the device, on arena.stream(), with workspaces from the arena. RequestError for a precision
  // or numerics that they do not support.
  virtual std::shared_ptr<KernelBackend> make_backend(Arena& arena, const PrecisionRecipe& precision,
                                                      Numerics numerics) = 0;
  // What these take from the arena during their lifetime.
  virtual std::int64_t workspace_bytes(Numerics numerics) const = 0;
};

// The errors of a driver, each a RunError: how much memory was requested, and how much is free; which kernel;
// which device; that a graph could not be created or launched. `why` is the runtime's own message.
[[noreturn]] void fail_out_of_memory(DeviceDriver& driver, int device, std::size_t bytes);
[[noreturn]] void fail_launch(const std::string& kernel, int device, const std::string& why);
[[noreturn]] void fail_lost(int device, const std::string& why);
[[noreturn]] void fail_capture(int device, const std::string& why);
[[noreturn]] void fail_graph_launch(int device, const std::string& why);

// Why the driver's kernels do not run on this device (it is older than they are compiled for); empty if they
// do.
std::string no_kernels(DeviceDriver& driver, int device);

// The CUDA driver. RequestError if there is none; see no_cuda().
std::shared_ptr<DeviceDriver> make_cuda_driver();
// Why there is no CUDA device: this build has no CUDA, no driver is installed, the driver finds no device, or
// none that this build's kernels run on. Empty if there is one.
std::string no_cuda();

}  // namespace echelon
