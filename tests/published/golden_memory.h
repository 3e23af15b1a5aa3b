// What Megatron-LM's functional tests say that torch's allocator holds behind a step (their golden values),
// against the planner's states and what such a program keeps beside them.
#pragma once

#include <string>
#include <vector>

namespace echelon::published {

struct GoldenMemory {
  std::string test;
  std::string environment;  // tests of one value set the same variables for cuBLAS
  bool fitted = false;
  double states = 0;     // bytes: parameters, gradients, optimizer; under ZeRO 3 what is gathered, too
  double kept = 0;       // bytes: buffers of a known size
  double workspace = 0;  // bytes: cuBLAS's, of the environment
  double allocated = 0;  // bytes, measured
  double predicted() const { return states + kept + workspace; }
};
// On the last pipeline rank, which writes the log. Left out are tests whose number of devices (releases),
// vocabulary (NullTokenizer), layers of the last stage (uneven pipelines) or ranks of latent attention the
// table does not give.
std::vector<GoldenMemory> golden_memory(const std::string& path);

}  // namespace echelon::published
