// Chosen by CMake where the CPU kernels are not built (ECHELON_CPU_KERNELS=OFF).
#include "base/error.h"
#include "tensor/kernels.h"
#include "tensor/normals.h"

namespace echelon {

std::unique_ptr<Kernels> make_cpu_kernels(Arena&, DType, int, Numerics) {
  refuse(
      "--precision f32: this build has no CPU kernels (ECHELON_CPU_KERNELS=OFF); legal: f64, bf16, "
      "bf16-lean, fp8, on the reference "
      "kernels");
}

const char* cpu_products(DType) { return nullptr; }
const char* cpu_instruction_set() { return nullptr; }

const char* cpu_product(const ProductShape&, int) { return nullptr; }
std::int64_t cpu_kernels_scratch_bytes(DType, int) { return 0; }

void fill_normals(const Philox& random, double deviation, std::uint64_t first, std::span<float> out) {
  for (float& x : out) x = static_cast<float>(deviation * random.normal(first++));
}

}  // namespace echelon
