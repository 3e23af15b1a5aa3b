// What each rank writes of a checkpoint: its own part of each logical tensor, once.
//
// A tensor is stored whole under its name, or in parts under NAME|I/N|BEGIN-END: the flat elements [BEGIN,
// END) of what rank I of a tensor-parallel group of N holds of it. A rank of another mesh assembles the
// tensor from its parts (checkpoint_reader.h).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/safetensors.h"

namespace echelon {

struct TensorPart {
  std::string tensor;  // logical name
  int tp = 1, index = 0;
  Range range;
  bool whole = false;  // stored in its logical shape
  std::string key() const;
};
// A key that is not a part's is the name of a whole tensor.
TensorPart parse_part(const std::string& key);

struct OwnedTensor {
  StoredTensor stored;
  // May be narrower than the stored type: for split weights, the values, with the rounded-off rest in
  // `remainder`; for frozen weights there is only the narrow value.
  Tensor data;
  Tensor remainder = {};
};
// One of the files that a rank writes: "model", "optimizer" or "compression".
struct OwnedFile {
  std::string kind;
  std::vector<OwnedTensor> tensors;
};

// Appends the bytes as they are stored.
void copy_stored_bytes(const OwnedTensor& tensor, std::vector<std::byte>& to);

// The parts that this rank writes, as views of its tensors. Over all ranks of the mesh, each element of each
// tensor occurs once: a part of a ZeRO shard is written by its rank; ranks that hold the same whole tensors
// take turns.
std::vector<OwnedFile> owned_files(const Rank& rank, const ParameterStore& parameters,
                                   const CheckpointInfo& info, const std::vector<CarriedTensor>& carried,
                                   const RouterBiases& biases);

// Only those of "model".
std::vector<OwnedTensor> owned_weights(const Rank& rank, const ParameterStore& parameters,
                                       const ModelSpec& model, const RouterBiases& biases);

// "model.safetensors" for a single rank, else "model-00003.safetensors".
std::string file_name(const std::string& kind, const Rank& rank);

// The part that this rank writes of a tensor that is cut over tp like `spec`; `data` is what it holds, in
// local shape. No value if another rank writes the same.
std::optional<OwnedTensor> owned_slice(const Rank& rank, const ParamSpec& spec, const std::string& name,
                                       const Tensor& data);

}  // namespace echelon
