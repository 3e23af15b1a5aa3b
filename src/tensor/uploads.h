// Numbers of the host that kernels of a device are given: what layers ask for again and again (frequencies of
// RoPE, ranges of sums) is not copied, nor waited for, each time.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "tensor/tensor.h"

namespace echelon {

// Of one rank, whose arena outlives it.
class Uploads {
 public:
  // A copy of these bytes, of which there is one at least, on the arena's device. What a pass asks for that
  // runs again as a graph (MemoryPool::passes) stays for good, outside the memory of passes; of the rest the
  // last ones are kept.
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
