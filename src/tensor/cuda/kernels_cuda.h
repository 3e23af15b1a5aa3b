// The kernels of a CUDA device: our own (tensor/device_kernels.h), and cuBLASLt's products.
#pragma once

#include <memory>
#include <utility>

#include "spec/numerics.h"
#include "tensor/kernel_backend.h"

namespace echelon {

// The least compute capability for which this build has kernels. Known at compile time: asking the runtime
// about a kernel would create a context on the device, which would stay there.
std::pair<int, int> least_compiled_capability();

// Runs on arena.stream(); workspaces come from the arena (category other). Computes in f32, bf16 and f64,
// each product in its own precision, f32 via TF32 if the recipe says so; layers' products in fp8 are
// cuBLASLt's if m, n and k are multiples of 16. With ordinary numerics, cuBLASLt multiplies operands of one
// type (bf16 into bf16 or f32), and cuBLAS groups of such products. Our own tiles multiply everything else:
// products without an algorithm there, mixtures of bf16 and f32, sums in blocks, and all products under
// invariant numerics, since the sums in tiles do not depend on shapes. The same call gives the same bits.
std::shared_ptr<KernelBackend> make_cuda_kernels(Arena& arena, const PrecisionRecipe& precision,
                                                 Numerics numerics);

}  // namespace echelon
