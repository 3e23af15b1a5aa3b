// A family: from a model's sizes to its blocks, with the names that transformers gives their parameters.
#pragma once

#include "spec/block.h"

namespace echelon {

struct Gpt2 {
  static BlockProgram embedding(const ModelSpec& model);
  static BlockProgram layer(const ModelSpec& model, std::int64_t layer);
  static BlockProgram head(const ModelSpec& model);
};

// GPT-NeoX, and Pythia with it.
struct Neox {
  static BlockProgram embedding(const ModelSpec& model);
  static BlockProgram layer(const ModelSpec& model, std::int64_t layer);
  static BlockProgram head(const ModelSpec& model);
};

// Also its mixtures: Mixtral's and DeepSeek's.
struct Llama {
  static BlockProgram embedding(const ModelSpec& model);
  static BlockProgram layer(const ModelSpec& model, std::int64_t layer);
  static BlockProgram head(const ModelSpec& model);
};

}  // namespace echelon
