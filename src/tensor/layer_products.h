// Products of layers, whose recipe may round operands to fp8 (spec/fp8.h).
#pragma once

#include <span>
#include <vector>

#include "spec/fp8.h"
#include "tensor/kernels.h"

namespace echelon {

// What an operand in fp8 needs room for (Fp8Product), counted as `other`.
Tensor fp8_room(const Tensor& operand);

// One product by itself, and what follows; there are no blocks where operands are rounded.
void multiply(Kernels& kernels, const MatrixProduct& product, const OperandFormats& formats,
              const Epilogue& epilogue = {});

}  // namespace echelon
