// Checkpoints hold logical tensors, so that one saved on any mesh loads on any other.
//
//   DIR/step-00000100/model-00003.safetensors       rank 3's part of the parameters (checkpoint_parts.h),
//   under
//                                                   their Hugging Face names
//                     optimizer-00003.safetensors   NAME.exp_avg, NAME.exp_avg_sq
//                     compression-00003.safetensors what gradient compression carries over
//                     tokenizer.json, ...           the tokenizer it was trained with, as it was given
//                     checkpoint.json               step, seed, model, dtype, XXH3-64 of every part and of
//                     itself
//
// Each rank writes what it owns, once; one rank's files have no number. A checkpoint is written under a
// temporary name, flushed, and renamed: it exists whole or not at all.
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
#include "spec/routing_balance.h"
#include "text/tokenizer_files.h"

namespace echelon {

struct CheckpointInfo {
  std::string path;          // DIR/step-...
  std::int64_t step = 0;     // steps done
  std::int64_t updates = 0;  // optimizer steps done: more than one a step under PipeDream
  std::uint64_t seed = 0;    // of initial values and data order
  std::int64_t tokens = 0;   // trained on so far
  DType dtype = DType::f32;
  ModelSpec model;
  // Whose ids it has learned: those of bytes, or of a tokenizer that made token files or came with the model.
  TokenData::Kind trained_on = TokenData::Kind::text;
  std::string data;         // TokenData::fingerprint() of what it was trained on; empty where it is not known
  Compression compression;  // of the gradients; not none only where something is carried over
  int residual_ranks = 0;   // dp ranks whose residuals there are
  // How it was trained, by flag, so far as a run that goes on may do otherwise without a word: "--lr"
  // "0.001".
  std::map<std::string, std::string> settings;
  // The files of whose ids it has learned, or generation_config.json alone, with which generation ends; null:
  // none are known.
  std::shared_ptr<const TokenizerFiles> tokenizer;
};

// Whether bytes mean to the model what it has learned. A vocabulary of bytes and end of text leaves no doubt.
bool reads_bytes(const CheckpointInfo& info);
// What text means to the model: the tokenizer in the checkpoint, or that of bytes where the model reads them;
// null where it has learned the ids of a tokenizer that is not there. RequestError where the tokenizer's
// vocabulary is larger than the model's.
std::shared_ptr<const Tokenizer> tokenizer_of(const CheckpointInfo& info);

// Whatever in a directory has the name of a checkpoint, whole or not, by step; empty when it does not exist.
std::vector<std::string> named_as_checkpoints(const std::string& directory);
// The checkpoints of a directory by step; empty when it does not exist or holds none. Unfinished ones do not
// count.
std::vector<std::string> list_checkpoints(const std::string& directory);

// The step that a path names as a checkpoint (.../step-00000100); nothing for any other path.
std::optional<std::int64_t> checkpoint_step(const std::string& path);
// Whether the directory is one checkpoint itself, rather than the directory above.
bool is_checkpoint(const std::string& directory);

// The step directory that a path names: itself, or the last step when it is the directory above. RequestError
// when there is none. `field` is what named the path.
std::string find_checkpoint(const std::string& path, const std::string& field);
// Reads checkpoint.json there.
// RequestError when there is none or it is damaged or foreign.
CheckpointInfo read_checkpoint_info(const std::string& path, const std::string& field = "--checkpoint");
// RequestError naming `field` where there is nothing at the path, or what keeps it from being looked at.
void refuse_absent(const std::string& path, const std::string& field);

// Collective over the mesh. `carried` and `biases` (router_biases.h): this rank's, the first under
// `info.compression`. RunError (disk full, ...) leaves the earlier checkpoints untouched. Returns the path
// when the checkpoint is whole, and all but the last `keep` are removed (0: none is). See also
// CheckpointWriter.
std::string save_checkpoint(const Rank& rank, const ParameterStore& parameters, const std::string& directory,
                            const CheckpointInfo& info, const std::vector<CarriedTensor>& carried = {},
                            const RouterBiases& biases = {}, std::int64_t keep = 0);

// Fills parameters, and the moments and what is `carried` unless `values_only`, when the parameters may be of
// another dtype than the checkpoint. Every rank reads what it
// holds. Returns the routers' biases, of all layers. RequestError naming the tensor when one is missing, of
// another shape or damaged, NotFinite (finite.h) where a value is; nothing is changed in the checkpoint.
RouterBiases load_checkpoint(const Rank& rank, const ParameterStore& parameters, const CheckpointInfo& info,
                             bool values_only, const std::vector<CarriedTensor>& carried = {});

}  // namespace echelon
