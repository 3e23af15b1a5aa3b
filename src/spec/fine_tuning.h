// What of a model a training changes. A frozen parameter has a value and nothing else: no gradient, no
// optimizer state, no product for its gradient, nothing that travels of it but what ZeRO 3 gathers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace echelon {

struct BlockProgram;
struct ModelSpec;
struct ParamSpec;

// Low-rank adaptation (Hu et al. 2021, https://arxiv.org/abs/2106.09685): all that the model has is frozen,
// and beside a matrix W two small ones are trained, A (rank, in) and B (out, rank): y = x W^T + alpha / rank
// (x A^T) B^T. B starts as zero, so that nothing changes at first.
struct Lora {
  std::int64_t rank = 0;  // 0: none
  double alpha = 0;
  std::vector<std::string> targets;  // ends of matrices' names, without ".weight"; empty: those of attention
  double scale() const { return alpha / static_cast<double>(rank); }
  bool operator==(const Lora&) const = default;
};

struct FineTuning {
  // Patterns of the shell (*, ?, [...]) over the names of parameters; what one of them matches is frozen.
  std::vector<std::string> freeze;
  Lora lora;
  bool operator==(const FineTuning&) const = default;
};

// "none", or the patterns with commas between them.
std::string freeze_text(const FineTuning& tuning);
std::vector<std::string> parse_freeze(const std::string& text);
bool matches(const std::string& pattern, const std::string& name);
// "none", or rank=16,alpha=32,targets=q_proj,v_proj. RequestError naming `field` and what is legal.
std::string lora_text(const Lora& lora);
Lora parse_lora(const std::string& text, const std::string& field);

// Marks the block's parameters that are frozen, and puts adapters beside its matrices. What backward passes
// read for gradients that nobody takes is read no more.
void tune(BlockProgram& program, const ModelSpec& model);

// The embedding and the layers from the first one on that have nothing that is trained, in them or before
// them, and no routers, whose backward passes count: gradients need not come so far.
std::int64_t idle_blocks(const ModelSpec& model);

// Matrices of every layer that may have adapters.
std::vector<ParamSpec> adaptable_matrices(const ModelSpec& model);
// The name of a matrix without ".weight": what adapters are named after.
std::string module_of(const ParamSpec& weight);

// What is wrong with these for the model; empty: nothing.
struct TuningProblem {
  std::string words;
  std::vector<std::string> legal;  // values to give in place
};
TuningProblem freeze_problem(const ModelSpec& model);
TuningProblem lora_problem(const ModelSpec& model);

}  // namespace echelon
