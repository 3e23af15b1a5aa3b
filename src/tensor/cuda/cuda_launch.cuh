// Runs the function objects of tensor/rows/ on a CUDA device, on the stream of the arena that provides their
// memory (tensor/launching.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <cuda_runtime.h>

#include "tensor/cuda/cuda_warp.cuh"
#include "tensor/device_driver.h"
#include "tensor/device_stream.h"
#include "tensor/kernels.h"
#include "tensor/rows/team.h"
#include "tensor/tensor.h"
#include "tensor/uploads.h"

namespace echelon {

constexpr int usual_block_lanes = 128;

// The number of lanes in a block of this kernel: whole warps.
template <class Kernel>
constexpr int block_lanes_of() {
  if constexpr (requires { Kernel::block_lanes; })
    return Kernel::block_lanes;
  else
    return usual_block_lanes;
}

// A thread block. The number of lanes is a constant, so that the compiler removes loops in which each lane
// has one turn.
template <int block_lanes>
class CudaTeam {
 public:
  __device__ CudaTeam(std::int64_t block, std::byte* shared) : block_(block), shared_(shared) {}
  __device__ std::int64_t block() const { return block_; }
  __device__ std::int64_t lane() const { return threadIdx.x; }
  __device__ static constexpr std::int64_t lanes() { return block_lanes; }
  __device__ void sync() const { __syncthreads(); }
  __device__ std::byte* shared() const { return shared_; }
  __device__ static CudaWarp warp() { return {}; }

  // Combines lanes 16, 8, ... 1 apart in each warp, then the warps in order.
  template <class X, class Op>
  __device__ X reduce(X x, const Op& op) const {
    __shared__ X of_warps[32];
    for (int apart = 16; apart > 0; apart /= 2) x = op(x, __shfl_down_sync(0xffffffffu, x, apart));
    __syncthreads();  // all have read the last reduction's results
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = of_warps[0];
    for (int warp = 1; warp < block_lanes / 32; ++warp) x = op(x, of_warps[warp]);
    return x;
  }

 private:
  std::int64_t block_;
  std::byte* shared_;
};

// One warp of a thread block, without its own memory.
class CudaWarpTeam {
 public:
  __device__ explicit CudaWarpTeam(std::int64_t block) : block_(block) {}
  __device__ std::int64_t block() const { return block_; }
  __device__ std::int64_t lane() const { return threadIdx.x % rows::warp_lanes; }
  __device__ static constexpr std::int64_t lanes() { return rows::warp_lanes; }
  __device__ void sync() const { __syncwarp(); }

  // Both lanes of a pair get the same bits, since every op here is commutative.
  template <class X, class Op>
  __device__ X reduce(X x, const Op& op) const {
    for (int apart = 16; apart > 0; apart /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, apart));
    return x;
  }

 private:
  std::int64_t block_;
};

// The number of blocks of a multiprocessor for which a kernel's registers must leave room.
template <class Kernel>
constexpr int blocks_at_once() {
  if constexpr (requires { Kernel::blocks_at_once; })
    return Kernel::blocks_at_once;
  else
    return 1;
}

template <class Kernel>
__global__ void __launch_bounds__(block_lanes_of<Kernel>(), blocks_at_once<Kernel>())
    run_blocks(const __grid_constant__ Kernel kernel, std::int64_t blocks) {
  extern __shared__ __align__(1024) std::byte shared[];
  __builtin_assume(threadIdx.x < block_lanes_of<Kernel>());
  for (std::int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    kernel(CudaTeam<block_lanes_of<Kernel>()>(block, shared));
    if (block + gridDim.x < blocks) __syncthreads();
  }
}

template <class Kernel>
__global__ void __launch_bounds__(usual_block_lanes)
    run_warps(const __grid_constant__ Kernel kernel, std::int64_t rows) {
  constexpr int warps = usual_block_lanes / rows::warp_lanes;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * warps;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * warps + threadIdx.x / rows::warp_lanes;
       row < rows; row += step)
    kernel(CudaWarpTeam(row));
}

class CudaLaunch {
 public:
  explicit CudaLaunch(Arena& arena);

  template <class T>
  static rows::Matrix<T> matrix(const Tensor& t) {
    return {t.on_device<T>(), t.rows(), t.cols(), t.row_stride()};
  }
  template <class T>
  static T* data(const Tensor& t) {
    return t.on_device<T>();
  }

  template <class Kernel>
  void run(const char* name, std::int64_t blocks, const Kernel& kernel, std::size_t shared = 0) const {
    static_assert(std::is_trivially_copyable_v<Kernel>);
    if (blocks == 0) return;
    driver().use(arena_->stream().device());
    if (shared + beside_shared_bytes > default_shared_bytes)
      allow_shared(name, reinterpret_cast<const void*>(&run_blocks<Kernel>));
    run_blocks<Kernel><<<grid_of(blocks), block_lanes_of<Kernel>(), shared, stream()>>>(kernel, blocks);
    driver().check_launch(name);
  }
  // Short rows get one warp each, whose lanes synchronize without waiting for other warps; depends only on
  // the row's length.
  template <class Kernel>
  void run_rows(const char* name, std::int64_t rows, std::int64_t cols, const Kernel& kernel) const {
    static_assert(std::is_trivially_copyable_v<Kernel>);
    if (rows == 0) return;
    if (cols > short_row) return run(name, rows, kernel);
    driver().use(arena_->stream().device());
    constexpr std::int64_t warps = block_lanes / rows::warp_lanes;
    run_warps<Kernel><<<grid_of((rows + warps - 1) / warps), block_lanes, 0, stream()>>>(kernel, rows);
    driver().check_launch(name);
  }

  static constexpr std::int64_t lanes() { return block_lanes; }
  std::size_t most_shared_bytes() const { return most_shared_bytes_; }
  // Warpgroups that multiply (tensor/rows/fragments.h).
  bool has_warpgroups() const { return has_warpgroups_; }
  // Enough for each lane to have several elements in flight.
  static constexpr std::int64_t piece() { return 8 * block_lanes; }
  // Depends only on the number of rows. There are at most as many parts as rows in a part, so that neither of
  // a sum's two stages is long.
  static constexpr std::int64_t rows_at_once(std::int64_t rows, std::int64_t) {
    std::int64_t chunk = 64;
    while (chunk * chunk < rows) chunk *= 2;
    return chunk;
  }

  // Memory from the arena: its next user queues behind the kernels that use it.
  template <class T>
  class Memory {
   public:
    explicit Memory(Tensor bytes) : bytes_(std::move(bytes)) {}
    T* data() const { return reinterpret_cast<T*>(bytes_.address()); }

   private:
    Tensor bytes_;
  };
  template <class T>
  Memory<T> upload(std::span<const T> numbers) const {
    static_assert(std::is_trivially_copyable_v<T>);
    return Memory<T>(upload_bytes(std::as_bytes(numbers)));
  }
  template <class T>
  Memory<T> scratch(std::int64_t count) const {
    return Memory<T>(bytes_of(count * static_cast<std::int64_t>(sizeof(T))));
  }
  template <class T>
  std::vector<T> read(T* from, std::int64_t count) const {
    std::vector<T> numbers(static_cast<std::size_t>(count));
    const std::size_t bytes = numbers.size() * sizeof(T);
    if (bytes > 0) arena_->stream().copy_to_host({numbers.data(), bytes}, {from, bytes}, bytes, 1);
    return numbers;
  }

  Arena& arena() const { return *arena_; }
  DeviceDriver& driver() const { return arena_->stream().driver(); }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(arena_->stream().handle().handle); }

 private:
  static constexpr int block_lanes = usual_block_lanes;
  static constexpr std::int64_t short_row = 1024;
  static unsigned grid_of(std::int64_t blocks) {
    constexpr std::int64_t most_blocks = (std::int64_t{1} << 31) - 1;
    return static_cast<unsigned>(blocks < most_blocks ? blocks : most_blocks);
  }
  // The shared memory of a block without a request; and the part that reductions may use beside the requested
  // part, including alignment.
  static constexpr std::size_t default_shared_bytes = 48 << 10, beside_shared_bytes = 1 << 10;
  // Allows all available shared memory. The limit belongs to the kernel, for all who launch it: a lower limit
  // set by one rank might take effect between another rank's two calls.
  void allow_shared(const char* name, const void* kernel) const;
  // Never empty, so that it has an address.
  Tensor bytes_of(std::int64_t bytes) const {
    return {*arena_, MemoryCategory::other, DType::u8, {bytes > 0 ? bytes : 1}};
  }
  Tensor upload_bytes(std::span<const std::byte> bytes) const {
    return bytes.empty() ? bytes_of(0) : uploads_->get(*arena_, bytes);
  }

  Arena* arena_;
  std::size_t most_shared_bytes_;
  bool has_warpgroups_;
  std::shared_ptr<Uploads> uploads_ = std::make_shared<Uploads>();
  std::shared_ptr<std::set<const void*>> allowed_shared_ = std::make_shared<std::set<const void*>>();
};

}  // namespace echelon
