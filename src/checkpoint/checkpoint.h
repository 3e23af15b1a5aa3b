// Checkpoints hold logical tensors, so that one saved on any mesh loads on any other.
//
//    DIR/step-00000100/model-00003.safetensors        rank 3's part of the parameters (checkpoint_parts.h),
//                                                     under their Hugging Face names
//                      optimizer-00003.safetensors    NAME.exp_avg, and of what AdamW updates
//                                                     NAME.exp_avg_sq
//                      compression-00003.safetensors  what gradient compression carries over
//                      tokenizer.json, ...            the tokenizer it was trained with, unchanged
//                      checkpoint.json                step, seed, model, dtype, XXH3-64 of every part and
//                                                     of itself
//
// Each rank writes what it owns, once; files of a single rank have no number. A checkpoint is written under a
// temporary name, flushed, and renamed: it exists completely or not at all.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/tokens.h"
#include "model/parameters.h"
#include "parallel/compression.h"
#include "spec/optimizer.h"
#include "spec/routing_balance.h"
#include "text/tokenizer_files.h"

namespace echelon {

struct CheckpointInfo {
  std::string path;          // DIR/step-...
  std::int64_t step = 0;     // completed steps
  std::int64_t updates = 0;  // completed optimizer steps: more than one per step under PipeDream
  std::uint64_t seed = 0;    // of initial values and data order
  std::int64_t tokens = 0;   // trained on so far
  DType dtype = DType::f32;
  OptimizerKind optimizer = OptimizerKind::adamw;  // whose moments it holds
  ModelSpec model;
  // What its token ids mean: bytes, or the ids of a tokenizer that made token files or came with the model.
  TokenData::Kind trained_on = TokenData::Kind::text;
  std::string data;         // TokenData::fingerprint() of the training data; empty if unknown
  Compression compression;  // of the gradients; only set if something is carried over
  int residual_ranks = 0;   // number of dp ranks whose residuals are stored
  // Settings of the training run, by flag, as far as a resumed run may change them without being told: "--lr"
  // "0.001".
  std::map<std::string, std::string> settings;
  // The files of the tokenizer with whose ids it was trained, or only generation_config.json, which says with
  // what generation ends; null if none are known.
  std::shared_ptr<const TokenizerFiles> tokenizer;
};

// Whether the model was trained on bytes. A vocabulary of bytes and end of text is enough to tell.
bool reads_bytes(const CheckpointInfo& info);
// The tokenizer for the model's text: the one in the checkpoint, or that of bytes if the model reads bytes;
// null if the model was trained with a tokenizer that is missing. RequestError if the tokenizer's vocabulary
// is larger than the model's.
std::shared_ptr<const Tokenizer> tokenizer_of(const CheckpointInfo& info);

// All paths in a directory that are named like checkpoints, complete or not, by step; empty if it does not
// exist.
std::vector<std::string> named_as_checkpoints(const std::string& directory);
// The checkpoints of a directory, by step; empty if it does not exist or holds none. Unfinished ones are left
// out.
std::vector<std::string> list_checkpoints(const std::string& directory);

// The step that a checkpoint's path names (.../step-00000100); no value for any other path.
std::optional<std::int64_t> checkpoint_step(const std::string& path);
// Whether the directory is itself a checkpoint, rather than a directory of checkpoints.
bool is_checkpoint(const std::string& directory);

// The step directory that a path names: itself, or the last step of a directory of checkpoints. RequestError
// if there is none. `field` is the flag or field that named the path.
std::string find_checkpoint(const std::string& path, const std::string& field);
// Reads checkpoint.json there. RequestError if it is missing, damaged or of another format.
CheckpointInfo read_checkpoint_info(const std::string& path, const std::string& field = "--checkpoint");
// RequestError naming `field` if there is nothing at the path, or it cannot be examined.
void refuse_absent(const std::string& path, const std::string& field);

// Collective over the mesh. `carried` and `biases` (router_biases.h): this rank's, `carried` only under
// `info.compression`. RunError (disk full, ...) leaves earlier checkpoints untouched. Returns the path once
// the checkpoint is complete, and all but the last `keep` are removed (0: none is removed; one that is held,
// held_checkpoint.h, is left). See also CheckpointWriter.
std::string save_checkpoint(const Rank& rank, const ParameterStore& parameters, const std::string& directory,
                            const CheckpointInfo& info, const std::vector<CarriedTensor>& carried = {},
                            const RouterBiases& biases = {}, std::int64_t keep = 0);

// Fills parameters; and moments and what is `carried`, unless `values_only`, with which the parameters' dtype
// may differ from the checkpoint's. Every rank reads what it holds. Returns the routers' biases, of all
// layers. RequestError naming the tensor if one is missing, damaged or of another shape; NotFinite (finite.h)
// if a value is not finite. The checkpoint is not changed.
RouterBiases load_checkpoint(const Rank& rank, const ParameterStore& parameters, const CheckpointInfo& info,
                             bool values_only, const std::vector<CarriedTensor>& carried = {});

}  // namespace echelon
