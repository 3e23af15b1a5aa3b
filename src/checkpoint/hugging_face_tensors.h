// The tensors of a model in Hugging Face's layout: their names, which parameters are in each, and in what
// order.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "spec/model_spec.h"
#include "spec/model_types.h"

namespace echelon {

// A tensor of the files. Usually one parameter, or several, one after another along their first dimension;
// with turns > 1, runs of rows of each alternate. Or the parameters of all experts of a layer (gpt-oss): a
// row for each expert, with its `expert_parts` parameters transposed to (in, out) and their elements
// alternating.
struct FileTensor {
  std::string name;
  std::vector<ParamSpec> parts;
  std::int64_t turns = 1;
  std::int64_t expert_parts = 0;        // 0: not of all experts
  bool in_turn = true;                  // false: parts follow each other (Qwen3-VL)
  bool depthwise = false;               // of a depthwise convolution: (channels, 1, positions)
  std::int64_t stacked = 0;             // number of equal runs along an additional first dimension; 0: none
  std::optional<double> constant = {};  // the same number in every file, and not part of the model

  std::vector<std::int64_t> shape() const;
  std::int64_t numel() const;
};

// What parameters' names begin with.
inline constexpr const char* model_prefix = "model.";

// A parameter's name in files of this type.
std::string renamed(const TransformersType& type, std::string name);

// Whether transformers keeps a bias of each router beside the parameters.
bool has_router_biases(const ModelSpec& model, const TransformersType& type);

// Layers with such a bias.
std::vector<std::int64_t> biased_layers(const ModelSpec& model, const TransformersType& type);

// The tensors of a file of this type in model order, routers' biases last. Parts of one tensor are adjacent
// in that order, except for those of all experts.
std::vector<FileTensor> file_tensors(const ModelSpec& model, const TransformersType& type);

// Copies of other parts of the model that the next-token module has in files: name in the file, name in the
// model.
std::array<std::pair<std::string, std::string>, 2> shared_with_module(const ModelSpec& model);

// The order of a parameter's rows in files, if it differs: some types rotate neighbouring elements, rather
// than elements half the rotated width apart. The rotated rows are the first of each head, DeepSeek's the
// last. Layers without rotation have queries and keys in that order too, which changes none of their
// products. In other types (turns_back) the two halves are exchanged.
std::vector<std::int64_t> rows_in_files(const ModelSpec& model, const ParamSpec& spec);

// By how much numbers in files are less than the parameter's.
double less_in_files(const ModelSpec& model, const ParamSpec& spec);

}  // namespace echelon
