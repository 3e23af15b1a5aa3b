// What each rank writes of a checkpoint: its own part of each logical tensor, once.
//
// A tensor is stored whole under its name, or in parts under NAME|I/N|BEGIN-END: elements [BEGIN, END) of
// what rank I of a tensor-parallel group of N holds of it, flat. Where a rank of another mesh needs the
// tensor, it puts the parts together (checkpoint_reader.h).
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
  // May be narrower than what is stored: of weights that are split the values, beside what they are rounded
  // off by; of frozen ones all there is.
  Tensor data;
  Tensor remainder = {};
};
// One of the files that a rank writes; "model", "optimizer" or "compression".
struct OwnedFile {
  std::string kind;
  std::vector<OwnedTensor> tensors;
};

// As it is stored.
void copy_stored_bytes(const OwnedTensor& tensor, std::vector<std::byte>& to);

// The parts that this rank writes: views of its tensors. Over all ranks of the mesh each element of each
// tensor is there once: a part of a ZeRO shard is its rank's; what several ranks hold whole they take in
// turns.
std::vector<OwnedFile> owned_files(const Rank& rank, const ParameterStore& parameters,
                                   const CheckpointInfo& info, const std::vector<CarriedTensor>& carried,
                                   const RouterBiases& biases);

// Those of "model" alone.
std::vector<OwnedTensor> owned_weights(const Rank& rank, const ParameterStore& parameters,
                                       const ModelSpec& model, const RouterBiases& biases);

// "model.safetensors" of one rank, else "model-00003.safetensors".
std::string file_name(const std::string& kind, const Rank& rank);

// The part of a tensor cut over tp as `spec` is that this rank writes, where `data` is what it holds in local
// shape, if it is this rank that does: nothing where another one holds the same.
std::optional<OwnedTensor> owned_slice(const Rank& rank, const ParamSpec& spec, const std::string& name,
                                       const Tensor& data);

}  // namespace echelon
