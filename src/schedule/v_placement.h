// What V-half and V-min share: two half stages a rank in a V (rank r holds stages r and 2P-1-r), and a
// building block that is repeated for every microbatch.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace echelon {

// When a rank starts F of its first chunk, F of its second, B of its second and B of its first for microbatch
// 0, in slots of half a stage. Microbatch m starts 6m slots later, so no two of the four may agree modulo 6;
// W takes the two slots that they leave free.
using BlockStarts = std::array<int, 4>;

// The passes in the order of their slots. `blocks` has one entry for each rank.
Schedule repeat_blocks(const std::string& name, int microbatches, const std::vector<BlockStarts>& blocks);

// The same passes closer together: a rank runs whichever is ready, the earliest of the pattern first, and W
// when none is. It never holds more activations than some rank does in the pattern, nor more of its first
// chunk than itself does there.
Schedule squeeze_blocks(const std::string& name, int microbatches, const std::vector<BlockStarts>& blocks);

}  // namespace echelon
