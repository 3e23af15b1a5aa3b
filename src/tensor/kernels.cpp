#include "tensor/kernels.h"

#include "tensor/prepare_kernels.h"

namespace echelon {

std::unique_ptr<Kernels> make_kernels(Arena& arena, DType dtype, int threads) {
  return dtype == DType::f64 ? make_reference_kernels() : make_cpu_kernels(arena, threads);
}

std::int64_t kernel_scratch_bytes(DType dtype, int threads) {
  return dtype == DType::f64 ? 0 : cpu_kernels_scratch_bytes(threads);
}

void prepare_kernels(DType dtype) {
  Arena arena;
  (void)make_kernels(arena, dtype, 1);
}

}  // namespace echelon
