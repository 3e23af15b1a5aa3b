// Attention on tensor cores, compiled beside the other kernels.
#include "tensor/cuda/cuda_launch.cuh"
#include "tensor/device_attention.h"

namespace echelon {

template class WarpAttentionLaunch<CudaLaunch>;

}  // namespace echelon
