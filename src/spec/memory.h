// The bytes of one rank by category. One type for what plan/memory predicts and what tensor/arena measures.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace echelon {

enum class MemoryCategory { parameters, gradients, optimizer, activations, communication, other };
inline constexpr std::array<MemoryCategory, 6> all_memory_categories{
    MemoryCategory::parameters,  MemoryCategory::gradients,     MemoryCategory::optimizer,
    MemoryCategory::activations, MemoryCategory::communication, MemoryCategory::other};
const char* memory_category_name(MemoryCategory category);

struct Memory {
  std::array<std::int64_t, 6> bytes{};
  std::int64_t& operator[](MemoryCategory c) { return bytes[static_cast<std::size_t>(c)]; }
  std::int64_t operator[](MemoryCategory c) const { return bytes[static_cast<std::size_t>(c)]; }
  std::int64_t total() const;
  bool operator==(const Memory&) const = default;
};

// Bytes of offloaded activations: sent to the host, brought back, and held there at most. Predicted and
// measured alike.
struct HostActivations {
  std::int64_t out = 0, back = 0, most = 0;
  bool operator==(const HostActivations&) const = default;
};

}  // namespace echelon
