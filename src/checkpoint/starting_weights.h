// Weights with which a training starts instead of random ones: at step 0, with a new optimizer state.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "checkpoint/held_checkpoint.h"
#include "checkpoint/hugging_face.h"

namespace echelon {

// Threads may share it.
class StartingWeights {
 public:
  // A model in Hugging Face's layout, a checkpoint, or a directory of checkpoints (the last is used).
  // RequestError naming what is missing or damaged.
  explicit StartingWeights(const std::string& path);

  const std::string& path() const { return path_; }  // of a directory of checkpoints: the step
  const ModelSpec& model() const { return hugging_face_ ? hugging_face_->model() : checkpoint_.model; }
  // The checkpoint they are from; nullptr if they are in Hugging Face's layout.
  const CheckpointInfo* checkpoint() const { return hugging_face_ ? nullptr : &checkpoint_; }
  // The number of tensors of a model's image part, which are left out.
  std::int64_t num_for_images() const { return hugging_face_ ? hugging_face_->num_for_images() : 0; }
  bool have_router_biases() const;
  // RequestError naming the first field in which the model differs; its name and what is frozen do not count.
  void refuse_other_model(const ModelSpec& model) const;
  // Fills what this rank holds, in the parameters' dtype, and returns the routers' biases. RequestError
  // naming a damaged tensor; NotFinite (finite.h) if a value is not finite.
  RouterBiases load(const Rank& rank, const ParameterStore& parameters) const;

 private:
  std::string path_;
  std::optional<HuggingFaceWeights> hugging_face_;
  std::shared_ptr<const HeldCheckpoint> held_;
  CheckpointInfo checkpoint_;  // of the one that is held
};

}  // namespace echelon
