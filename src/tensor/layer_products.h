// Matrix products of layers, whose operands the recipe may round to fp8 (spec/fp8.h).
#pragma once

#include <span>
#include <vector>

#include "spec/fp8.h"
#include "tensor/kernels.h"

namespace echelon {

// Allocates an fp8 operand's work space (Fp8Product), counted as `other`.
Tensor fp8_room(const Tensor& operand);

// One product with its epilogue; with rounded operands there are no blocks.
void multiply(Kernels& kernels, const MatrixProduct& product, const OperandFormats& formats,
              const Epilogue& epilogue = {});

}  // namespace echelon
