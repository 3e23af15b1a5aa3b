// Finds the parameters of a model among the tensors of its files: transformers and those who publish models
// have several names and shapes for the same ones.
#pragma once

#include <map>
#include <string>

#include "checkpoint/stored_model.h"
#include "spec/model_spec.h"
#include "spec/model_types.h"

namespace echelon {

// For each parameter of the model and each router's bias: its place. RequestError naming a tensor that is
// missing, unknown or of another shape.
std::map<std::string, StoredPlace> stored_places(const StoredModel& stored, const ModelSpec& model,
                                                 const TransformersType& type);

// Whether the tensor is of a module that predicts one more token.
bool predicts_more(const ModelSpec& model, const TransformersType& type, const std::string& name);

// Whether the tensor is of the image part of a model that also sees images.
bool is_for_images(const std::string& name);

}  // namespace echelon
