// What V-half and V-min share: each rank has two half stages, placed in a V (rank r holds stages r and
// 2P-1-r), and a building block is repeated for every microbatch.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace echelon {

// When a rank starts, for microbatch 0: F of its first chunk, F of its second, B of its second and B of its
// first; in slots of half a stage. Microbatch m starts 6m slots later, so no two of the four may agree modulo
// 6. W takes the two free slots.
using BlockStarts = std::array<int, 4>;

// The passes in the order of their slots. `blocks`: by rank.
Schedule repeat_blocks(const std::string& name, int microbatches, const std::vector<BlockStarts>& blocks);

// The same passes without gaps: a rank runs whichever pass is ready, the earliest of the pattern first, and W
// if none is. No rank ever holds more activations than the largest number that a rank holds in the pattern,
// nor more of its first chunk than it does there.
Schedule squeeze_blocks(const std::string& name, int microbatches, const std::vector<BlockStarts>& blocks);

}  // namespace echelon
