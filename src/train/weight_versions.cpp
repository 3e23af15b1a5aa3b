#include "train/weight_versions.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace echelon {

WeightVersions::WeightVersions(const Rank& rank, Tensor values, int count)
    : kernels_(&rank.kernels()), values_(std::move(values)) {
  for (int i = 1; i < count; ++i)
    stash_.push_back(
        {Tensor(rank.arena(), MemoryCategory::parameters, values_.dtype(), values_.shape()), -1});
}

void WeightVersions::restart() {
  present_ = 0;
  readers_.clear();
  for (Stash& stash : stash_) stash.version = -1;
}

void WeightVersions::use(int version) {
  if (version == present_) return;
  const auto found =
      std::find_if(stash_.begin(), stash_.end(), [&](const Stash& s) { return s.version == version; });
  check(found != stash_.end(), "a version of the weights is wanted that is not kept");
  Tensor::swap_memory(values_, found->memory);
  std::swap(present_, found->version);
}

void WeightVersions::advance(int version) {
  use(version);
  // Nobody asks for a version below the newest again, but for the microbatches that have been forward with
  // it.
  const auto room = std::find_if(stash_.begin(), stash_.end(), [&](const Stash& s) {
    return s.version < version && (s.version < 0 || readers_[s.version] == 0);
  });
  if (room != stash_.end()) {
    kernels_->copy(values_, room->memory);
    readers_.erase(room->version);
    room->version = version;
  } else {
    check(readers_[version] == 0, "a version of the weights goes that is still needed");
  }
  present_ = version + 1;
}

}  // namespace echelon
