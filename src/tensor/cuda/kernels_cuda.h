// The kernels of a CUDA device: our own (tensor/device_kernels.h), and products by cuBLASLt.
#pragma once

#include <memory>
#include <utility>

#include "spec/numerics.h"
#include "tensor/kernel_backend.h"

namespace echelon {

// Of all that this build has kernels for. By the compiler's word for it: asking the runtime for a kernel
// would make a context on the device, and leave it there.
std::pair<int, int> least_compiled_capability();

// On arena.stream(); workspaces come from the arena (category other). Computes in f32, bf16 and f64, each
// product in its own precision, f32 by way of TF32 where the recipe says so; layers' products in fp8 are
// cuBLASLt's where m, n and k are multiples of 16. With ordinary numerics cuBLASLt
// multiplies what is of one type (bf16 into bf16 or f32), and cuBLAS groups of it; what these have no
// algorithm for, mixtures of bf16 and f32, sums in blocks, and all products under invariant numerics are
// multiplied by our own tiles, whose sums show no shape. The same call gives the same bits.
std::shared_ptr<KernelBackend> make_cuda_kernels(Arena& arena, const PrecisionRecipe& precision,
                                                 Numerics numerics);

}  // namespace echelon
