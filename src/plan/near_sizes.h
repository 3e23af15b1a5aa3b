// Sizes beside those that were asked for: where the number of devices and the global batch share a larger
// divisor, more meshes are legal, and less is left to axes other than data parallelism.
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

// Fewer devices, by up to an eighth, that take less time than `best` by more than a tie.
std::optional<NearSize> fewer_gpus(const SearchRequest& request, const Estimate& best);

// Where nothing is legal: the best plans of fewer devices, of a smaller and of a larger global batch, each
// within an eighth, where there are any.
std::vector<NearSize> near_sizes(const SearchRequest& request);

}  // namespace echelon
