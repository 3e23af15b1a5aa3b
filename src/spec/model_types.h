// The model types of transformers (model_type in config.json) that can be read and written: their names
// there, and how their files differ from ModelSpec.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace echelon {

struct ModelSpec;

struct TransformersType {
  const char* name;
  const char* architecture;  // the class in transformers
  // Replacements in parameter names, applied in turn: our part of a name, and the files'. Parameters that are
  // one tensor in the files map to the same name.
  std::vector<std::pair<const char*, const char*>> renamed = {};
  // Routers have selection biases, stored beside the parameters.
  bool router_biases = false;
  // A configuration may have a multi-token prediction module, stored as the layer after the last.
  bool predicts_more = false;
  // A prefix of names in place of "model.", though files may use that too; nullptr: "model." only.
  const char* prefix = nullptr;
  // A layer's experts are two tensors, gate_up_proj and down_proj: gate and up of each, one after the other.
  bool stacked_experts = false;
  // If so, the two tensors are (experts, in, out).
  bool turned_experts = false;
  // Rotations have the opposite sign, which is ours with the two halves of each query and key head swapped.
  bool turns_back = false;
  // What its configuration calls the standard deviation of new weights.
  const char* init_key = "initializer_range";
};

// The type as which a model is written. It does not promise that a configuration of this type can express the
// whole model.
const TransformersType& transformers_type(const ModelSpec& model);
// The type of a configuration, or of its text model if it has vision: its names are those in the files.
const TransformersType& transformers_type_of(const std::string& config_json, const std::string& where);

}  // namespace echelon
