// What Echelon asks of an accelerator's runtime: the seam between the rest of the house and a vendor.
// cuda/driver_cuda.cpp is that of CUDA; tests have one whose device is this machine's memory.
//
// Work is queued on streams. What is queued on one stream runs in that order; between streams only events
// give an order. A call that queues work returns at once, and its arguments are read when it returns, but
// for memory, which is read and written when the work runs.
//
// Any thread may call, about any stream. Every failure is a RunError of one sentence that names the device:
// a launch that failed names its kernel, and once a device is lost every call about it says so. What gives
// back (free, destroy) never throws: it is called while another failure is on its way.
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

// What a vendor's header knows as a pointer: cudaStream_t, cudaEvent_t, cudaGraphExec_t.
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

// A device that is of no more use: every later call about it says so too.
struct DeviceLost : RunError {
  DeviceLost(int its_device, const std::string& why);
  int device;
};

struct DeviceProperties {
  std::string name;  // "NVIDIA H100 80GB HBM3"
  std::size_t memory_bytes = 0;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::string id;  // that no other device has, on any machine
};

enum class CopyKind { to_host, from_host, on_device };

// Rows of as many bytes each, so far apart.
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
// rounded once. As reduce_elements() of comm/reduce.h, bit for bit.
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
  // The least compute capability that its kernels are compiled for.
  virtual std::pair<int, int> least_capability() = 0;
  virtual std::size_t free_bytes(int device) = 0;
  // What the calling thread launches from now on is for this device.
  virtual void use(int device) = 0;
  // Whether what runs on `device` can be let use the memory of `peer`; reach() lets it from now on, and is
  // false where it cannot. Copies between two devices need no leave, on a stream of one of the two.
  virtual bool can_reach(int device, int peer) = 0;
  virtual bool reach(int device, int peer) = 0;

  // At least 256-byte aligned, contents undefined. Null where the device has no room for it.
  virtual std::byte* allocate(int device, std::size_t bytes) = 0;
  // Nothing that is queued or under way uses it any more: the caller has seen to that.
  virtual void free(int device, std::byte* memory) noexcept = 0;
  // The host's own memory, from and to which copies run beside computation. Null where there is no room.
  virtual std::byte* allocate_pinned(std::size_t bytes) = 0;
  virtual void free_pinned(std::byte* memory) noexcept = 0;

  virtual StreamHandle create_stream(int device) = 0;
  // Waits for nothing: the caller has.
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;
  // Waits for all that is queued.
  virtual void synchronize(StreamHandle stream) = 0;

  virtual EventHandle create_event(int device) = 0;
  virtual void destroy_event(EventHandle event) noexcept = 0;
  // The event happens when all that is queued on the stream, of the same device, so far is done. Once for
  // each event.
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  // What is queued on the stream from now on begins after the event, which has been recorded.
  virtual void wait(StreamHandle stream, EventHandle event) = 0;
  // Whether it has happened; never waits.
  virtual bool has_happened(EventHandle event) = 0;
  virtual void synchronize(EventHandle event) = 0;
  // Between two that have happened.
  virtual double seconds_between(EventHandle first, EventHandle second) = 0;

  // Work of a stream as one piece that can be queued again and again. What is queued on the stream from here
  // to end_capture() becomes that, and does not run: kernels, fills, and copies on a device, with the
  // arguments that they have now. Until then nobody waits for the stream, records on it or lets it wait.
  // Memory may be allocated meanwhile, and other streams used. After a failure, its own too, the capture is
  // abandoned: nothing of it is left, and the stream is as it was before.
  virtual void begin_capture(StreamHandle stream) = 0;
  virtual GraphHandle end_capture(StreamHandle stream) = 0;
  virtual void abandon_capture(StreamHandle stream) noexcept = 0;
  // The memory that it was captured with is still there.
  virtual void launch(GraphHandle graph, StreamHandle stream) = 0;
  // What of it is queued still runs.
  virtual void destroy_graph(GraphHandle graph) noexcept = 0;

  // The host's side is pinned memory.
  virtual void copy(const RowsCopy& rows, StreamHandle stream) = 0;
  virtual void fill_bytes(std::byte* to, std::uint8_t value, std::size_t bytes, StreamHandle stream) = 0;
  virtual void reduce(const Reduction& reduction, StreamHandle stream) = 0;

  // The vendor's collectives between its devices: why there are none here; RequestError where that is so.
  virtual std::string no_collectives() = 0;
  virtual DeviceCollectives& collectives() = 0;

  // After a kernel was launched: RunError naming it when that failed.
  virtual void check_launch(const char* kernel) = 0;
  // What computes on the device, on arena.stream(). Workspaces come from the arena. RequestError for a
  // precision or numerics that it has not.
  virtual std::shared_ptr<KernelBackend> make_backend(Arena& arena, const PrecisionRecipe& precision,
                                                      Numerics numerics) = 0;
  // What that takes from the arena for as long as it lives.
  virtual std::int64_t workspace_bytes(Numerics numerics) const = 0;
};

// What a driver's failures say, each a RunError: how much was asked of the device, and how much is free;
// which kernel; which device; that a graph could not be made, or launched. `why` is the runtime's own word
// for it.
[[noreturn]] void fail_out_of_memory(DeviceDriver& driver, int device, std::size_t bytes);
[[noreturn]] void fail_launch(const std::string& kernel, int device, const std::string& why);
[[noreturn]] void fail_lost(int device, const std::string& why);
[[noreturn]] void fail_capture(int device, const std::string& why);
[[noreturn]] void fail_graph_launch(int device, const std::string& why);

// Why the driver's kernels do not run on this device, which is older than they are compiled for; empty where
// they do.
std::string no_kernels(DeviceDriver& driver, int device);

// The driver of CUDA. RequestError where there is none, as no_cuda() says.
std::shared_ptr<DeviceDriver> make_cuda_driver();
// Why there is no CUDA device here, one of: this build has no CUDA, no driver is installed, the driver finds
// no device, or none that this build's kernels run on. Empty where there is one.
std::string no_cuda();

}  // namespace echelon
