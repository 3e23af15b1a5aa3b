// StartingWeights that a training starts from, in place of new ones: at step 0, with an optimizer that has
// seen nothing.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "checkpoint/hugging_face.h"

namespace echelon {

// Safe to share by threads.
class StartingWeights {
 public:
  // A model in Hugging Face's layout, a checkpoint, or a directory of checkpoints (the last is used).
  // RequestError naming what is missing or damaged.
  explicit StartingWeights(const std::string& path);

  const std::string& path() const { return path_; }  // the step of a directory of checkpoints
  const ModelSpec& model() const { return hugging_face_ ? hugging_face_->model() : checkpoint_.model; }
  // The checkpoint that they are from; nullptr where it is none of ours.
  const CheckpointInfo* checkpoint() const { return hugging_face_ ? nullptr : &checkpoint_; }
  // Tensors of a model that sees images, which are left out.
  std::int64_t num_for_images() const { return hugging_face_ ? hugging_face_->num_for_images() : 0; }
  bool have_router_biases() const;
  // RequestError naming the first field in which the model is another one; what it is called and what is
  // frozen of it do not count.
  void refuse_other_model(const ModelSpec& model) const;
  // Fills what this rank holds, in whatever dtype that is, and returns the routers' biases. RequestError
  // naming the tensor that is damaged, NotFinite (finite.h) where a value is none.
  RouterBiases load(const Rank& rank, const ParameterStore& parameters) const;

 private:
  std::string path_;
  std::optional<HuggingFaceWeights> hugging_face_;
  CheckpointInfo checkpoint_;
};

}  // namespace echelon
