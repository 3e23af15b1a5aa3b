#include "tensor/cuda/reduce_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "base/error.h"
#include "tensor/reduce_element.h"

namespace echelon {
namespace {

struct ReductionPointers {
  const void* sources[ReductionOrder::most_sources];
  void* destinations[ReductionOrder::most_sources];
  int num_sources, num_destinations;
};

constexpr int block_threads = 256;

// One thread reads an element from all sources before it writes it, so that destinations may be sources.
template <ReduceOp op, class T, class Stored>
__global__ void reduce_kernel(ReductionPointers pointers, ReductionOrder order, std::int64_t count) {
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += threads) {
    const auto sum = static_cast<Stored>(reduced<op, T>(
        reinterpret_cast<const Stored* const*>(pointers.sources), pointers.num_sources, order, i));
    for (int k = 0; k < pointers.num_destinations; ++k)
      static_cast<Stored*>(pointers.destinations[k])[i] = sum;
  }
}

template <class T, class Stored>
void launch(const Reduction& reduction, StreamHandle stream) {
  constexpr std::int64_t most_blocks = 1024;
  ReductionPointers pointers{};
  pointers.num_sources = static_cast<int>(reduction.sources.size());
  pointers.num_destinations = static_cast<int>(reduction.destinations.size());
  std::copy(reduction.sources.begin(), reduction.sources.end(), pointers.sources);
  std::copy(reduction.destinations.begin(), reduction.destinations.end(), pointers.destinations);
  const ReductionOrder order = ReductionOrder::of(pointers.num_sources);
  const auto blocks =
      static_cast<unsigned>(std::min(most_blocks, (reduction.count + block_threads - 1) / block_threads));
  auto* const queue = static_cast<cudaStream_t>(stream.handle);
  if (reduction.op == ReduceOp::sum)
    reduce_kernel<ReduceOp::sum, T, Stored>
        <<<blocks, block_threads, 0, queue>>>(pointers, order, reduction.count);
  else
    reduce_kernel<ReduceOp::max, T, Stored>
        <<<blocks, block_threads, 0, queue>>>(pointers, order, reduction.count);
}

}  // namespace

void launch_reduction(const Reduction& reduction, StreamHandle stream) {
  check(reduction.sources.size() <= ReductionOrder::most_sources &&
            reduction.destinations.size() <= ReductionOrder::most_sources,
        "a sum on a device is over at most 64 ranks");
  if (reduction.count == 0 || reduction.destinations.empty()) return;
  switch (reduction.dtype) {
    case DType::f32:
      return launch<float, float>(reduction, stream);
    case DType::f64:
      return launch<double, double>(reduction, stream);
    case DType::bf16:
      return launch<float, bf16>(reduction, stream);
    case DType::i32:
      return launch<std::int32_t, std::int32_t>(reduction, stream);
    case DType::i16:
    case DType::u8:
      break;
  }
  throw InvariantError("neither packed bytes nor remainders have a sum");
}

}  // namespace echelon
