// The model families: each turns a model's sizes into its blocks, with transformers' names for the
// parameters.
#pragma once

#include "spec/block.h"

namespace echelon {

struct Gpt2 {
  static BlockProgram embedding(const ModelSpec& model);
  static BlockProgram layer(const ModelSpec& model, std::int64_t layer);
  static BlockProgram head(const ModelSpec& model);
};

// GPT-NeoX, which includes Pythia.
struct Neox {
  static BlockProgram embedding(const ModelSpec& model);
  static BlockProgram layer(const ModelSpec& model, std::int64_t layer);
  static BlockProgram head(const ModelSpec& model);
};

// Also the mixtures of experts built on it: Mixtral's and DeepSeek's.
struct Llama {
  static BlockProgram embedding(const ModelSpec& model);
  static BlockProgram layer(const ModelSpec& model, std::int64_t layer);
  static BlockProgram head(const ModelSpec& model);
};

}  // namespace echelon
