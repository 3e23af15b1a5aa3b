// Checks and comparisons of checkpoints without training: whether one is intact, and how two differ.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/progress.h"

namespace echelon {

struct CheckpointContents {
  std::int64_t step = 0, tensors = 0, parts = 0, bytes = 0, files = 0;
};
// Reads every byte: each part against its checksum, and each tensor of the model and each moment from its
// parts. RequestError naming the damaged file, field or tensor; NotFinite (finite.h) if one holds NaN or
// infinite values; Unreadable (open_file.h) or ForeignFormat (checkpoint_manifest.h) if it cannot be checked.
CheckpointContents check_checkpoint(const std::string& path, const Progress& progress = {});

struct TensorDifference {
  std::string name;
  // max |a - b| / max |a|, of finite values; infinite if only one of them has it, or a number there is finite
  // in one alone.
  double rel_diff = 0;
  enum class Holder { both, first, second } holder = Holder::both;
};
// The logical tensors that differ, whatever meshes saved them and whatever of the model was trained.
// RequestError if a checkpoint is damaged or the models differ.
std::vector<TensorDifference> diff_checkpoints(const std::string& a, const std::string& b,
                                               const Progress& progress = {});

}  // namespace echelon
