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
  // Parts of names of a layer's parameters: ours, and its files'.
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
  // Gate, up and down of MLPs and of experts are w1, w3 and w2.
  bool numbered_mlps = false;
};

// As which a model is written, and by whose names its files are read. Whether a configuration of this type
// says the whole model is not said by this.
const TransformersType& transformers_type(const ModelSpec& model);

}  // namespace echelon
