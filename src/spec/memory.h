// Bytes of one rank by category: predicted by plan/memory, measured by tensor/arena, one type for both.
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

// What a rank's activations do on the host, where they are offloaded: bytes that go there and come back, and
// that lie there at most. Predicted and measured too.
struct HostActivations {
  std::int64_t out = 0, back = 0, most = 0;
  bool operator==(const HostActivations&) const = default;
};

}  // namespace echelon
