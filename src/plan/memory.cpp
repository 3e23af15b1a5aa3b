#include "plan/memory.h"

namespace echelon {

StateBytes state_bytes(const Plan& plan) {
  const PrecisionRecipe& r = plan.precision;
  const std::int64_t remainder = r.has_master() ? element_bytes(DType::i16) : 0,
                     moments = plan.offloads_optimizer() ? 0 : 2 * element_bytes(r.moments);
  return {element_bytes(r.parameters), element_bytes(r.gradients), remainder + moments};
}

Memory kept_state(std::int64_t whole, std::int64_t own, int zero, const StateBytes& bytes) {
  Memory memory;
  memory[MemoryCategory::parameters] = bytes.value * (zero >= 3 ? own : whole);
  memory[MemoryCategory::gradients] = bytes.gradient * (zero >= 2 ? own : whole);
  memory[MemoryCategory::optimizer] = bytes.optimizer * (zero >= 1 ? own : whole);
  return memory;
}

}  // namespace echelon
