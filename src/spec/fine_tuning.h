// Which parameters training changes. A frozen parameter has only its value: no gradient and no optimizer
// state, and no communication except that ZeRO 3 gathers it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

struct BlockProgram;
struct ModelSpec;
struct ParamSpec;

// Low-rank adaptation (LoRA; Hu et al. 2021, https://arxiv.org/abs/2106.09685): the whole model is frozen,
// and beside a matrix W two small ones are trained, A (rank, in) and B (out, rank): y = x W^T + alpha / rank
// (x A^T) B^T. B starts as zero, so that the model is unchanged at first.
struct Lora {
  std::int64_t rank = 0;  // 0: none
  double alpha = 0;
  std::vector<std::string> targets;  // ends of matrices' names, without ".weight"; empty: those of attention
  double scale() const { return alpha / static_cast<double>(rank); }
  bool operator==(const Lora&) const = default;
};

struct FineTuning {
  // Shell patterns (*, ?, [...]) over parameter names; parameters that match one are frozen.
  std::vector<std::string> freeze;
  Lora lora;
  bool operator==(const FineTuning&) const = default;
};

// "none", or the patterns separated by commas.
std::string freeze_text(const FineTuning& tuning);
std::vector<std::string> parse_freeze(const std::string& text);
bool matches(const std::string& pattern, const std::string& name);
// "none", or rank=16,alpha=32,targets=q_proj,v_proj. RequestError naming `field` and what is legal.
std::string lora_text(const Lora& lora);
Lora parse_lora(const std::string& text, const std::string& field);

// Marks the block's frozen parameters, adds LoRA adapters to its matrices, and drops the backward reads that
// only gradients of frozen parameters needed.
void tune(BlockProgram& program, const ModelSpec& model);

// How many blocks the backward pass need not reach: the embedding and the first layers, as long as nothing in
// them or before them is trained and they have no routers, whose losses have gradients. 0 if the embedding is
// trained.
std::int64_t idle_blocks(const ModelSpec& model);

// The matrices of all layers that may have adapters.
std::vector<ParamSpec> adaptable_matrices(const ModelSpec& model);
// A matrix's name without ".weight"; its adapters are named after it.
std::string module_of(const ParamSpec& weight);

// What is wrong with the patterns or the adapters for this model; empty words: nothing.
struct TuningProblem {
  std::string words;
  std::vector<std::string> legal;  // values to give instead
};
TuningProblem freeze_problem(const ModelSpec& model);
TuningProblem lora_problem(const ModelSpec& model);

}  // namespace echelon
