// What Megatron-LM's functional tests say that torch's allocator holds behind a step (their golden values),
// against the planner's states.
#pragma once

#include <string>
#include <vector>

namespace echelon::published {

struct GoldenMemory {
  std::string label, implementation;  // of its layers
  bool fitted = false;
  double states = 0, allocated = 0;  // bytes: parameters, gradients, optimizer; and measured
};
// GPT of 12 layers on 8 devices, of the last pipeline rank, which writes the log. Left out: mixtures, latent
// attention, FSDP, several instances of the optimizer and uneven pipelines.
std::vector<GoldenMemory> golden_memory(const std::string& path);

// Median of what is allocated above the states, of the fitted rows of an implementation.
double fixed_bytes(const std::vector<GoldenMemory>& rows, const std::string& implementation);

}  // namespace echelon::published
