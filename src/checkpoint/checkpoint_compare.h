// What can be said of checkpoints without training: whether one is whole, and how two differ.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/progress.h"

namespace echelon {

struct CheckpointContents {
  std::int64_t tensors = 0, parts = 0, bytes = 0, files = 0;
};
// Reads every byte: each part against its checksum, each tensor of the model and each of its moments from its
// parts. RequestError naming the file, the field or the tensor that is damaged, NotFinite (finite.h) where
// one holds NaN or infinite values; Unreadable (open_file.h), ForeignFormat (checkpoint_manifest.h) where
// that is not known.
CheckpointContents check_checkpoint(const std::string& path, const Progress& progress = {});

struct TensorDifference {
  std::string name;
  double rel_diff = 0;  // max |a - b| / max |a|; infinite where one has it and the other does not
  enum class Holder { both, first, second } holder = Holder::both;
};
// By logical tensor, whatever meshes saved them, those that differ. RequestError where one is damaged or the
// models are others.
std::vector<TensorDifference> diff_checkpoints(const std::string& a, const std::string& b,
                                               const Progress& progress = {});

}  // namespace echelon
