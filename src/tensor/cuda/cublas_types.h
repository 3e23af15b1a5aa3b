// Names shared by NVIDIA's two libraries of matrix products.
#pragma once

#include <cublas_v2.h>

#include "tensor/kernels.h"

namespace echelon {

inline cudaDataType_t cuda_type(DType dtype) {
  return dtype == DType::bf16 ? CUDA_R_16BF : dtype == DType::f64 ? CUDA_R_64F : CUDA_R_32F;
}

// The type to compute in: f32 via TF32 if requested.
inline cublasComputeType_t compute_type(const MatrixProduct& product, bool tf32) {
  if (product.c.dtype() == DType::f64) return CUBLAS_COMPUTE_64F;
  return tf32 && product.a.dtype() == DType::f32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

}  // namespace echelon
