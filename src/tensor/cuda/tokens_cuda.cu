// Kernels of tokens, their experts and their states, compiled beside the other kernels.
#include "tensor/cuda/cuda_launch.cuh"
#include "tensor/token_kernels.h"

namespace echelon {

template class TokenKernels<CudaLaunch>;

}  // namespace echelon
