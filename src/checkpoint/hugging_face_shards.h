// Writes parameters of a checkpoint as tensors of the files of a model in Hugging Face's layout.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/hugging_face_tensors.h"
#include "spec/block.h"
#include "spec/dtype.h"

namespace echelon {

// A file and its tensors.
struct Shard {
  std::string name;
  std::vector<FileTensor> tensors;
};

// Routers' biases decide between close scores: transformers keeps them in at least f32.
DType type_in_file(const FileTensor& tensor, DType dtype);

// Files of at most about `shard_bytes`.
std::vector<Shard> cut_into_shards(const std::vector<FileTensor>& all, DType dtype, std::int64_t shard_bytes);

using Adapters = std::map<std::string, AdaptedMatrix>;  // by the adapted matrix's name

Adapters adapters_of(const ModelSpec& model);

// Adds adapters to their matrices. Weights of another dtype are rounded to this one.
void write_shard(CheckpointReader& reader, const Shard& shard, const Adapters& adapters,
                 const std::string& path, DType dtype);

}  // namespace echelon
