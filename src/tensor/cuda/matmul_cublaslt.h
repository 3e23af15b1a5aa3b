// Products by cuBLASLt.
#pragma once

#include <memory>

#include "tensor/kernels.h"

namespace echelon {

// As cuBLAS recommends for sm_90; followed by memory for f32 sums that are rounded later.
inline constexpr std::int64_t cublaslt_workspace_bytes = std::int64_t{32} << 20,
                              cublaslt_sums_bytes = std::int64_t{8} << 20;

class CublasLt {
 public:
  // The workspace comes from the arena. `tf32`: whether f32 products use TF32 (spec/tf32.h).
  CublasLt(Arena& arena, bool tf32);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // Whether it takes these types: all f32 or all f64, or bf16 into bf16 or f32.
  static bool takes(const MatrixProduct& product);
  // c (M, N) = or += op(a) op(b), K > 0; each element of a bf16 c is rounded once. On the arena's stream.
  // Returns false, having done nothing, if cuBLASLt has no algorithm for the product, as may happen for odd
  // strides; with an epilogue (tensor/column_product.h), also if it has no such epilogue, or the epilogue's
  // memory is not aligned to 16 bytes. RunError on failure.
  bool multiply(const MatrixProduct& product, const Epilogue& epilogue = {});
  // Whether it has fp8 products of this shape: m, n and k are multiples of 16.
  static bool takes_fp8(const Fp8Product& product);
  // The same for fp8. Codes lie in the rooms as the tensor cores of sm_89 and sm_90 read them: op(a)'s rows
  // and op(b)'s columns, one after another; the scales, on the device, restore their magnitudes.
  bool multiply_fp8(const Fp8Product& product, const float* scale_a, const float* scale_b);
  // Of cublaslt_workspace_bytes and cublaslt_sums_bytes, for other work on the arena's stream.
  Tensor workspace() const;
  Tensor room_for_sums() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
