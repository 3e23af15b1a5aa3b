// The kernels of a CUDA device: our own (tensor/device_kernels.h), and products by cuBLASLt.
#pragma once

#include <memory>

#include "spec/numerics.h"
#include "tensor/kernel_backend.h"

namespace echelon {

// On arena.stream(); workspaces come from the arena (category other). Computes in f32, bf16 and f64, each
// product in its own precision (no TF32). With ordinary numerics cuBLASLt multiplies what is of one type
// (bf16 into bf16 or f32); what it has no algorithm for, mixtures of bf16 and f32, sums in blocks, and all
// products under invariant numerics are multiplied by our own tiles, whose sums show no shape. The same call
// gives the same bits.
std::shared_ptr<KernelBackend> make_cuda_kernels(Arena& arena, Numerics numerics);

}  // namespace echelon
