// What of a model a training leaves as it is. A frozen parameter has a value and nothing else: no gradient,
// no optimizer state, no product for its gradient, nothing that travels of it but what ZeRO 3 gathers.
#pragma once

#include <string>
#include <vector>

namespace echelon {

struct BlockProgram;
struct ModelSpec;

struct FineTuning {
  // Patterns of the shell (*, ?, [...]) over the names of parameters; what one of them matches is frozen.
  std::vector<std::string> freeze;
  bool operator==(const FineTuning&) const = default;
};

// "none", or the patterns with commas between them.
std::string freeze_text(const FineTuning& tuning);
std::vector<std::string> parse_freeze(const std::string& text);
bool matches(const std::string& pattern, const std::string& name);

// Marks the block's parameters that are frozen; what backward passes read for their gradients alone is read
// no more.
void tune(BlockProgram& program, const ModelSpec& model);

// What is wrong with the patterns for this model; empty: nothing.
struct FreezeProblem {
  std::string words;
  std::vector<std::string> legal;  // names to give in place
};
FreezeProblem freeze_problem(const ModelSpec& model);

}  // namespace echelon
