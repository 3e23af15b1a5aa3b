#include "tensor/layer_products.h"

namespace echelon {

Tensor fp8_room(const Tensor& operand) {
  return operand.beside(MemoryCategory::other, DType::bf16, {operand.rows(), operand.cols()});
}

void multiply(Kernels& kernels, const MatrixProduct& p, const OperandFormats& formats,
              const Epilogue& epilogue) {
  if (!formats.in_fp8) return kernels.matmul(p, epilogue);
  {
    const Fp8Product rounded{p, formats, fp8_room(p.a), fp8_room(p.b)};
    kernels.fp8_matmul({&rounded, 1});
  }
  kernels.finish(p, epilogue);
}

}  // namespace echelon
