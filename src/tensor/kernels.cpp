#include "tensor/kernels.h"

namespace echelon {

std::unique_ptr<Kernels> make_kernels(Arena& arena, DType dtype, int threads) {
  return dtype == DType::f64 ? make_reference_kernels() : make_cpu_kernels(arena, threads);
}

std::int64_t kernel_scratch_bytes(DType dtype, int threads) {
  return dtype == DType::f64 ? 0 : cpu_kernels_scratch_bytes(threads);
}

}  // namespace echelon
