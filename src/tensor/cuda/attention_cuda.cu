// Attention that keeps its scores in registers, compiled beside the other kernels.
#include "tensor/cuda/cuda_launch.cuh"
#include "tensor/device_attention.h"

namespace echelon {

template class AttentionLaunch<CudaLaunch>;

}  // namespace echelon
