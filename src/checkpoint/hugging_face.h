// Models in the layout that Hugging Face's transformers reads and writes: config.json, and the parameters
// under their names in model.safetensors, or in model-00001-of-0000N.safetensors with an index.
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

// The tokens that begin and end a text, of a model's tokenizer; several may end one.
struct TextBounds {
  std::optional<std::int32_t> begin;
  std::vector<std::int32_t> ends;
};
// As the tokenizer in a directory, of these files, has them, and what generation begins and ends with; that
// alone where there is no tokenizer that is understood here.
TextBounds text_bounds(const TokenizerFiles& files, const std::string& directory);
// What transformers needs to know of the model: read back (model_from_hugging_face) it is the model, in every
// field. RequestError for one that transformers has no class for, and naming the field that has no place.
// Where nothing is known of them no token begins or ends a text: transformers' own would be another one.
std::string hugging_face_config(const ModelSpec& model, DType dtype, const TextBounds& text = {});

// Writes the parameters of a checkpoint to `directory`, which must not exist or be empty, in files of about
// `shard_bytes` at most, in `dtype` or as they are kept. A tied output matrix is not written: it is the token
// embedding's. RequestError where the checkpoint is damaged, RunError where the disk is full.
// Adapters are added to the matrices that they stand beside.
void export_hugging_face(const std::string& checkpoint, const std::string& directory,
                         std::int64_t shard_bytes, std::optional<DType> dtype = {});

// Writes a checkpoint's adapters alone, as PEFT reads them for the model that it was trained from:
// adapter_config.json and adapter_model.safetensors. RequestError where there are none.
void export_adapters(const std::string& checkpoint, const std::string& directory,
                     std::optional<DType> dtype = {});

// Whether a model's directory has its values, rather than its configuration alone.
bool has_weights(const std::string& directory);

// The weights of a model in this layout, and which of them each parameter is. DeepSeek-V3's module that
// predicts one more token is read where it is there. Safe to share by threads.
class HuggingFaceWeights {
 public:
  // RequestError naming the tensor that is missing, foreign or of another shape; an output matrix beside a
  // tied embedding must be the same.
  explicit HuggingFaceWeights(const std::string& directory);
  ~HuggingFaceWeights();
  HuggingFaceWeights(HuggingFaceWeights&&) noexcept;

  const ModelSpec& model() const { return model_; }
  // How many tensors of a model that sees images are beside its text model, which alone is read.
  std::int64_t num_for_images() const { return num_for_images_; }
  bool have_f64() const;  // any of them
  // Fills what this rank holds, each number rounded once to what its optimizer updates. NotFinite (finite.h)
  // where one is NaN or infinite in that.
  void load(const Rank& rank, const ParameterStore& parameters) const;
  // By which the routers choose (DeepSeek-V3); empty for others. NotFinite as load().
  RouterBiases router_biases() const;

 private:
  ModelSpec model_;
  const TransformersType* type_;
  std::int64_t num_for_images_ = 0;
  std::unique_ptr<const StoredModel> stored_;
  std::map<std::string, StoredPlace> places_;  // by parameter
};

struct ImportedModel {
  std::string checkpoint;           // its path
  std::int64_t num_for_images = 0;  // tensors that are left out
  bool rounds_f64 = false;          // to a narrower type
};

// Makes a checkpoint at step 0 below `checkpoints` of the model in `directory`: its values, no moments. F64,
// F32, F16 and BF16 are read. RequestError naming the tensor that is missing, foreign or of another shape; an
// output matrix beside a tied embedding must be the same; and for bf16 where the files have the weights of
// norms less 1. NotFinite (finite.h) where a weight is NaN or infinite in `dtype`. Nothing is written then.
ImportedModel import_hugging_face(const std::string& directory, const std::string& checkpoints, DType dtype,
                                  std::uint64_t seed);

}  // namespace echelon
