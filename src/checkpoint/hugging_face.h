// Reads and writes models in the layout of Hugging Face's transformers: config.json, and the parameters under
// their names in model.safetensors, or in model-00001-of-0000N.safetensors with an index.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/stored_model.h"
#include "model/parameters.h"
#include "spec/block.h"
#include "spec/dtype.h"
#include "spec/model_spec.h"
#include "spec/routing_balance.h"
#include "text/tokenizer_files.h"

namespace echelon {

struct TransformersType;

// The tokens with which a model's tokenizer begins and ends a text; several may end one.
struct TextBounds {
  std::optional<std::int32_t> begin;
  std::vector<std::int32_t> ends;
};
// From the tokenizer in a directory with these files, and from the tokens with which generation begins and
// ends; only from the latter if there is no supported tokenizer.
TextBounds text_bounds(const TokenizerFiles& files, const std::string& directory);
// The config.json for transformers. Reading it back (model_from_hugging_face) gives the same model, in every
// field. RequestError if transformers has no class for the model, or naming the field that cannot be
// expressed. If `text` is empty, no token begins or ends a text: transformers' default would be another
// token.
std::string hugging_face_config(const ModelSpec& model, DType dtype, const TextBounds& text = {});

// Writes the parameters of a checkpoint to `directory`, which must not exist or be empty, in files of at most
// about `shard_bytes`, in `dtype` or the stored type. A tied output matrix is not written: it is the token
// embedding's. Adapters are added to their matrices. RequestError if the checkpoint is damaged, RunError if
// the disk is full.
void export_hugging_face(const std::string& checkpoint, const std::string& directory,
                         std::int64_t shard_bytes, std::optional<DType> dtype = {});

// Writes only a checkpoint's adapters, as PEFT reads them for the model that was fine-tuned:
// adapter_config.json and adapter_model.safetensors. RequestError if there are none.
void export_adapters(const std::string& checkpoint, const std::string& directory,
                     std::optional<DType> dtype = {});

// Whether a model's directory has weights, rather than only its configuration.
bool has_weights(const std::string& directory);

// The weights of a model in this layout, and where each parameter is in them. DeepSeek-V3's module that
// predicts one more token is read if it is there. Threads may share it.
class HuggingFaceWeights {
 public:
  // RequestError naming a tensor that is missing, unknown or of another shape; an output matrix stored beside
  // a tied embedding must equal it.
  explicit HuggingFaceWeights(const std::string& directory);
  ~HuggingFaceWeights();
  HuggingFaceWeights(HuggingFaceWeights&&) noexcept;

  const ModelSpec& model() const { return model_; }
  // The number of tensors of a model's image part; only the text model is read.
  std::int64_t num_for_images() const { return num_for_images_; }
  bool have_f64() const;  // whether any weights are F64
  // Fills what this rank holds, each number rounded once to the type that the optimizer updates. NotFinite
  // (finite.h) if one is NaN or infinite in that type.
  void load(const Rank& rank, const ParameterStore& parameters) const;
  // The routers' biases (DeepSeek-V3); empty for models without. NotFinite as in load().
  RouterBiases router_biases() const;

 private:
  ModelSpec model_;
  const TransformersType* type_;
  std::int64_t num_for_images_ = 0;
  std::unique_ptr<const StoredModel> stored_;
  std::map<std::string, StoredPlace> places_;  // by parameter
};

struct ImportedModel {
  std::string checkpoint;           // path
  std::int64_t num_for_images = 0;  // tensors that are left out
  bool rounds_f64 = false;          // F64 weights are rounded to a narrower type
};

// Makes a checkpoint at step 0 below `checkpoints` from the model in `directory`: values without moments.
// F64, F32, F16 and BF16 are read. RequestError naming a tensor that is missing, unknown or of another shape;
// if an output matrix stored beside a tied embedding differs from it; and for bf16, if the files store norms'
// weights less 1. NotFinite (finite.h) if a weight is NaN or infinite in `dtype`. After an error nothing has
// been written.
ImportedModel import_hugging_face(const std::string& directory, const std::string& checkpoints, DType dtype,
                                  std::uint64_t seed);

}  // namespace echelon
