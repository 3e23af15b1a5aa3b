// What both of NVIDIA's libraries of products call things.
#pragma once

#include <cublas_v2.h>

#include "tensor/kernels.h"

namespace echelon {

inline cudaDataType_t cuda_type(DType dtype) {
  return dtype == DType::bf16 ? CUDA_R_16BF : dtype == DType::f64 ? CUDA_R_64F : CUDA_R_32F;
}

// What it is computed in: f32 by way of TF32 where that was asked for.
inline cublasComputeType_t compute_type(const MatrixProduct& product, bool tf32) {
  if (product.c.dtype() == DType::f64) return CUBLAS_COMPUTE_64F;
  return tf32 && product.a.dtype() == DType::f32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

}  // namespace echelon
