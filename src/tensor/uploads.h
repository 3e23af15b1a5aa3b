// Copies the host's numbers to a device for kernels, with a cache: what layers need again and again (RoPE
// frequencies, ranges of sums) is not copied and waited for each time.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "tensor/tensor.h"

namespace echelon {

// For one rank, whose arena outlives it.
class Uploads {
 public:
  // A copy of these bytes, at least one, on the arena's device. Copies for passes that are replayed as graphs
  // (MemoryPool::passes) are kept forever, outside the memory of passes; of the others, the most recent.
  Tensor get(Arena& arena, std::span<const std::byte> bytes);

 private:
  struct Uploaded {
    std::vector<std::byte> bytes;
    Tensor there;
  };
  static Tensor send(Arena& arena, std::span<const std::byte> bytes);

  std::vector<Uploaded> last_, of_passes_;
  std::size_t next_ = 0;
};

}  // namespace echelon
