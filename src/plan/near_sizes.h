// Sizes near the requested one. If the number of devices and the global batch share a larger divisor, more
// meshes are legal, and axes other than data parallelism need fewer ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "plan/search.h"

namespace echelon {

struct NearSize {
  int gpus = 0;
  std::int64_t global_batch = 0;
  Estimate best;
};

// At most an eighth fewer devices, with which a step takes less time than `best` by more than a tie.
std::optional<NearSize> fewer_gpus(const SearchRequest& request, const Estimate& best);

// If `best` recomputes for lack of memory: the same size with state on the host, where a step so takes less
// time by more than a twentieth, which intervals of such plans can still tell apart. Not of this trainer,
// whose memory takes long to count.
std::optional<NearSize> with_offload(const SearchRequest& request, const Estimate& best);

// If nothing is legal: the best plans with fewer devices, with a smaller and with a larger global batch, each
// within an eighth, as far as there are any.
std::vector<NearSize> near_sizes(const SearchRequest& request);

}  // namespace echelon
