// The types of models that transformers has (model_type in config.json) and that are read and written here:
// what each is called there, and what its files have otherwise than ModelSpec says.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace echelon {

struct ModelSpec;

struct TransformersType {
  const char* name;
  const char* architecture;  // its class
  // Parts of names of parameters: ours, and its files', of which parameters that are one tensor there share
  // one. Each is replaced in turn.
  std::vector<std::pair<const char*, const char*>> renamed = {};
  // Routers choose by biases, which are beside the parameters.
  bool router_biases = false;
  // Configurations may have a module that predicts one more token, with the number of the layer behind the
  // last.
  bool predicts_more = false;
  // What names begin with in place of "model.", though they may begin with that too; nullptr: that alone.
  const char* prefix = nullptr;
  // The experts of a layer are two tensors: of each expert gate and up, one behind the other, and down.
  bool stacked_experts = false;
  // Where its experts are two tensors of a layer, these are (experts, in, out).
  bool turned_experts = false;
  // Positions turn the other way, as ours do where the two halves of each head of queries and keys change
  // places.
  bool turns_back = false;
};

// As which a model is written. Whether a configuration of this type says the whole model is not said by this.
const TransformersType& transformers_type(const ModelSpec& model);
// That of a configuration, or of its text where it sees images: by whose names its files are read.
const TransformersType& transformers_type_of(const std::string& config_json, const std::string& where);

}  // namespace echelon
