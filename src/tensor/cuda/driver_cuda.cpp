// The driver for CUDA's runtime. Everything about kernels is in the other files of this folder.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "base/error.h"
#include "tensor/cuda/kernels_cuda.h"
#include "tensor/cuda/matmul_cublaslt.h"
#include "tensor/cuda/reduce_cuda.h"
#include "tensor/device_collectives.h"
#include "tensor/device_driver.h"
#include "tensor/kernel_backend.h"

namespace echelon {
namespace {

cudaStream_t of(StreamHandle stream) { return static_cast<cudaStream_t>(stream.handle); }
cudaEvent_t of(EventHandle event) { return static_cast<cudaEvent_t>(event.handle); }
cudaGraphExec_t of(GraphHandle graph) { return static_cast<cudaGraphExec_t>(graph.handle); }

// After these errors the context is unusable: every later call fails in the same way.
bool is_lost(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorMisalignedAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorContextIsDestroyed:
    case cudaErrorDevicesUnavailable:
    case cudaErrorExternalDevice:
      return true;
    default:
      return false;
  }
}

int current_device() {
  int device = 0;
  return cudaGetDevice(&device) == cudaSuccess ? device : 0;
}

std::string hex(const cudaUUID_t& id) {
  std::string text;
  for (const char byte : id.bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

// RunError for a failed request to the current device. `doing`: "copied to the host".
void expect(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // otherwise the next launch would report it
  if (is_lost(error)) fail_lost(current_device(), cudaGetErrorString(error));
  fail("device {}: {} failed: {}", current_device(), doing, cudaGetErrorString(error));
}

// The same for a capture.
void expect_captured(cudaError_t error, int device) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  if (is_lost(error)) fail_lost(device, cudaGetErrorString(error));
  fail_capture(device, cudaGetErrorString(error));
}

class CudaDriver final : public DeviceDriver {
 public:
  int num_devices() override {
    int count = 0;
    expect(cudaGetDeviceCount(&count), "counting devices");
    return count;
  }

  DeviceProperties properties(int device) override {
    cudaDeviceProp p{};
    expect(cudaGetDeviceProperties(&p, device), "asking for its properties");
    return {.name = p.name,
            .memory_bytes = p.totalGlobalMem,
            .major = p.major,
            .minor = p.minor,
            .multiprocessors = p.multiProcessorCount,
            .id = hex(p.uuid)};
  }
  std::pair<int, int> least_capability() override { return least_compiled_capability(); }

  std::size_t free_bytes(int device) override {
    use(device);
    std::size_t free = 0, total = 0;
    expect(cudaMemGetInfo(&free, &total), "asking for its free memory");
    return free;
  }

  void use(int device) override { expect(cudaSetDevice(device), "taking it"); }
  bool can_reach(int device, int peer) override {
    if (device == peer) return true;
    use(device);
    int can = 0;
    expect(cudaDeviceCanAccessPeer(&can, device, peer), "asking for access to another");
    return can != 0;
  }
  bool reach(int device, int peer) override {
    const std::lock_guard lock(mutex_);
    if (device == peer || reached_.contains({device, peer})) return true;
    if (!can_reach(device, peer)) return false;
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled)
      (void)cudaGetLastError();
    else
      expect(error, "getting access to another");
    reached_.insert({device, peer});
    return true;
  }

  std::byte* allocate(int device, std::size_t bytes) override {
    use(device);
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    return given(error, "allocating", memory);
  }
  void free(int device, std::byte* memory) noexcept override {
    (void)cudaSetDevice(device);
    (void)cudaFree(memory);
  }
  std::byte* allocate_pinned(std::size_t bytes) override {
    void* memory = nullptr;
    const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
    return given(error, "allocating pinned memory", memory);
  }
  void free_pinned(std::byte* memory) noexcept override { (void)cudaFreeHost(memory); }

  StreamHandle create_stream(int device) override {
    use(device);
    cudaStream_t stream = nullptr;
    expect(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
    return {stream, device};
  }
  void destroy_stream(StreamHandle stream) noexcept override { (void)cudaStreamDestroy(of(stream)); }
  void synchronize(StreamHandle stream) override {
    use(stream.device);
    expect(cudaStreamSynchronize(of(stream)), "waiting for a stream");
  }

  EventHandle create_event(int device) override {
    use(device);
    cudaEvent_t event = nullptr;
    expect(cudaEventCreate(&event), "making an event");
    return {event, device};
  }
  void destroy_event(EventHandle event) noexcept override { (void)cudaEventDestroy(of(event)); }
  void record(EventHandle event, StreamHandle stream) override {
    use(stream.device);
    expect(cudaEventRecord(of(event), of(stream)), "recording an event");
  }
  void wait(StreamHandle stream, EventHandle event) override {
    use(stream.device);
    expect(cudaStreamWaitEvent(of(stream), of(event), 0), "letting a stream wait");
  }
  bool has_happened(EventHandle event) override {
    use(event.device);
    const cudaError_t error = cudaEventQuery(of(event));
    if (error == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    expect(error, "asking for an event");
    return true;
  }
  void synchronize(EventHandle event) override {
    use(event.device);
    expect(cudaEventSynchronize(of(event)), "waiting for an event");
  }
  double seconds_between(EventHandle first, EventHandle second) override {
    float milliseconds = 0;
    expect(cudaEventElapsedTime(&milliseconds, of(first), of(second)), "timing");
    return static_cast<double>(milliseconds) * 1e-3;
  }

  // Relaxed: a pass may allocate, and other threads may use their own streams freely.
  void begin_capture(StreamHandle stream) override {
    use(stream.device);
    expect_captured(cudaStreamBeginCapture(of(stream), cudaStreamCaptureModeRelaxed), stream.device);
  }
  GraphHandle end_capture(StreamHandle stream) override {
    use(stream.device);
    cudaGraph_t captured = nullptr;
    expect_captured(cudaStreamEndCapture(of(stream), &captured), stream.device);
    cudaGraphExec_t graph = nullptr;
    const cudaError_t error = cudaGraphInstantiate(&graph, captured, 0);
    (void)cudaGraphDestroy(captured);
    expect_captured(error, stream.device);
    return {graph, stream.device};
  }
  void abandon_capture(StreamHandle stream) noexcept override {
    cudaGraph_t captured = nullptr;
    (void)cudaSetDevice(stream.device);
    (void)cudaStreamEndCapture(of(stream), &captured);
    if (captured != nullptr) (void)cudaGraphDestroy(captured);
    (void)cudaGetLastError();
  }
  void launch(GraphHandle graph, StreamHandle stream) override {
    use(stream.device);
    const cudaError_t error = cudaGraphLaunch(of(graph), of(stream));
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();
    if (is_lost(error)) fail_lost(stream.device, cudaGetErrorString(error));
    fail_graph_launch(stream.device, cudaGetErrorString(error));
  }
  void destroy_graph(GraphHandle graph) noexcept override {
    (void)cudaSetDevice(graph.device);
    (void)cudaGraphExecDestroy(of(graph));
  }

  // All memory has one address space, so a copy between two devices is like one on a device.
  void copy(const RowsCopy& rows, StreamHandle stream) override {
    use(stream.device);
    const cudaMemcpyKind kind = rows.kind == CopyKind::to_host     ? cudaMemcpyDeviceToHost
                                : rows.kind == CopyKind::from_host ? cudaMemcpyHostToDevice
                                                                   : cudaMemcpyDeviceToDevice;
    if (rows.rows == 1)
      expect(cudaMemcpyAsync(rows.to, rows.from, rows.row_bytes, kind, of(stream)), "copying");
    else
      expect(cudaMemcpy2DAsync(rows.to, rows.to_stride, rows.from, rows.from_stride, rows.row_bytes,
                               rows.rows, kind, of(stream)),
             "copying rows");
  }
  void fill_bytes(std::byte* to, std::uint8_t value, std::size_t bytes, StreamHandle stream) override {
    use(stream.device);
    expect(cudaMemsetAsync(to, value, bytes, of(stream)), "filling memory");
  }
  void reduce(const Reduction& reduction, StreamHandle stream) override {
    use(stream.device);
    launch_reduction(reduction, stream);
    check_launch("reduce");
  }

  std::string no_collectives() override { return no_nccl(); }
  DeviceCollectives& collectives() override {
    const std::lock_guard lock(mutex_);
    if (!collectives_) collectives_ = make_nccl();
    return *collectives_;
  }

  void check_launch(const char* kernel) override {
    const cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess) return;
    if (is_lost(error)) fail_lost(current_device(), cudaGetErrorString(error));
    fail_launch(kernel, current_device(), cudaGetErrorString(error));
  }

  std::shared_ptr<KernelBackend> make_backend(Arena& arena, const PrecisionRecipe& precision,
                                              Numerics numerics) override {
    return make_cuda_kernels(arena, precision, numerics);
  }
  std::int64_t workspace_bytes(Numerics numerics) const override {
    return numerics == Numerics::ordinary ? cublaslt_workspace_bytes + cublaslt_sums_bytes : 0;
  }

 private:
  std::mutex mutex_;
  std::set<std::pair<int, int>> reached_;  // device, peer
  std::unique_ptr<DeviceCollectives> collectives_;

  // Null if memory is exhausted, which is not yet a failure.
  static std::byte* given(cudaError_t error, const char* doing, void* memory) {
    if (error == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      return nullptr;
    }
    expect(error, doing);
    return static_cast<std::byte*>(memory);
  }
};

}  // namespace

std::string no_cuda() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (error == cudaErrorInsufficientDriver)
    return fmt::format("no NVIDIA driver is installed, or one that is too old for CUDA {}.{}",
                       CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
    return "the NVIDIA driver finds no device";
  if (error != cudaSuccess) return cudaGetErrorString(error);
  CudaDriver driver;
  std::string why;  // reason for the first failure
  for (int device = count - 1; device >= 0; --device)
    if (why = no_kernels(driver, device); why.empty()) break;
  return why;
}

std::shared_ptr<DeviceDriver> make_cuda_driver() {
  if (const std::string why = no_cuda(); !why.empty()) refuse("--device cuda: {}; legal: cpu", why);
  return std::make_shared<CudaDriver>();
}

}  // namespace echelon
