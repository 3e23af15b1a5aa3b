// Passes over rows and elements, compiled beside the other kernels.
#include "tensor/cuda/cuda_launch.cuh"
#include "tensor/row_kernels.h"
#include "tensor/token_kernels.h"

namespace echelon {

extern template class TokenKernels<CudaLaunch>;  // tokens_cuda.cu
template class RowKernels<CudaLaunch, TokenKernels<CudaLaunch>>;

}  // namespace echelon
