#include "spec/memory.h"

#include "base/split.h"

namespace echelon {

const char* memory_category_name(MemoryCategory category) {
  switch (category) {
    case MemoryCategory::parameters:
      return "parameters";
    case MemoryCategory::gradients:
      return "gradients";
    case MemoryCategory::optimizer:
      return "optimizer";
    case MemoryCategory::activations:
      return "activations";
    case MemoryCategory::communication:
      return "communication";
    case MemoryCategory::other:
      return "other";
  }
  return "?";
}

std::int64_t Memory::total() const { return sum_of(bytes); }

}  // namespace echelon
