// Products by cuBLASLt.
#pragma once

#include <memory>

#include "tensor/kernels.h"

namespace echelon {

// As cuBLAS asks for on sm_90; and behind that room for sums in f32 of what is rounded later.
inline constexpr std::int64_t cublaslt_workspace_bytes = std::int64_t{32} << 20,
                              cublaslt_sums_bytes = std::int64_t{8} << 20;

class CublasLt {
 public:
  // The workspace comes from the arena. `tf32`: how products of f32 are multiplied (spec/tf32.h).
  CublasLt(Arena& arena, bool tf32);
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // Whether these types are its: f32 or f64 all through, or bf16 into bf16 or f32.
  static bool takes(const MatrixProduct& product);
  // c (M, N) = or += op(a) op(b), K > 0; each element of a bf16 c rounded once. On the arena's stream. False,
  // and nothing done, where cuBLASLt has no algorithm for such a product: it may have none for odd strides.
  // RunError where it fails. With what follows (tensor/column_product.h) that is false too where it has no
  // pass for it, or the memory of that begins at no multiple of 16 bytes.
  bool multiply(const MatrixProduct& product, const Epilogue& epilogue = {});
  // Whether it has products of fp8 of this shape: all of m, n and k are multiples of 16.
  static bool takes_fp8(const Fp8Product& product);
  // The same of fp8, whose codes lie in the rooms as the tensor cores of sm_89 and sm_90 read them: op(a)'s
  // rows and op(b)'s columns one after another; the scales, on the device, make of them the numbers' size.
  bool multiply_fp8(const Fp8Product& product, const float* scale_a, const float* scale_b);
  // Of cublaslt_workspace_bytes and cublaslt_sums_bytes, for what else runs on the arena's stream.
  Tensor workspace() const;
  Tensor room_for_sums() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
