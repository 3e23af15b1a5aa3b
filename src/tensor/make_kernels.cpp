// Which kernels compute for a rank: by its arena's device, its precision and what this build has.
#include <fmt/core.h>

#include "tensor/device_stream.h"
#include "tensor/kernels.h"
#include "tensor/prepare_kernels.h"

namespace echelon {

// Decided by the type in which passes compute. For f32, missing fast kernels are refused when they are made.
bool has_fast_kernels(const PrecisionRecipe& precision) {
  return precision.activations == DType::f32 || (precision.activations == DType::bf16 && has_cpu_kernels());
}

const char* products_by(const PrecisionRecipe& precision) {
  const char* const fast = has_fast_kernels(precision) ? cpu_products(precision.activations) : nullptr;
  return fast != nullptr ? fast : "the reference kernels";
}

std::string kernels_by(const PrecisionRecipe& precision) {
  const std::string products = products_by(precision);
  const bool has_set = has_fast_kernels(precision) && has_cpu_kernels();
  return has_set ? fmt::format("{} and {}", products, cpu_instruction_set()) : products;
}

std::unique_ptr<Kernels> make_kernels(Arena& arena, const PrecisionRecipe& precision, int threads,
                                      Numerics numerics) {
  if (arena.device() == Device::none)
    return std::make_unique<Kernels>(nullptr,
                                     Tensor(arena, MemoryCategory::other, DType::u8,
                                            {threads == 0 ? 0 : kernel_scratch_bytes(precision, threads)}));
  if (arena.device() == Device::cuda)
    return std::make_unique<Kernels>(arena.stream().driver().make_backend(arena, precision, numerics));
  if (has_fast_kernels(precision)) return make_cpu_kernels(arena, precision.activations, threads, numerics);
  return make_reference_kernels();
}

std::int64_t kernel_scratch_bytes(const PrecisionRecipe& precision, int threads) {
  return has_fast_kernels(precision) ? cpu_kernels_scratch_bytes(precision.activations, threads) : 0;
}

void prepare_kernels(const PrecisionRecipe& precision) {
  Arena arena;
  (void)make_kernels(arena, precision, 1);
}

}  // namespace echelon
