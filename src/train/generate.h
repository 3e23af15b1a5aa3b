// Samples text from a model. Keys and values of earlier tokens are cached, so each new token costs one pass
// over one row.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "model/held_stages.h"

namespace echelon {

struct GenerateOptions {
  std::int64_t max_tokens = 256;
  double temperature = 0.8;  // 0: the most likely token
  std::int64_t top_k = 40;   // sample among the k most likely; 0: all
  double top_p = 1;          // of these, among the fewest whose probabilities add up to this
  std::uint64_t seed = 1;
  std::vector<std::int32_t> stop_tokens{};  // end the text
  // Called after each token, alike on every rank: whether the text ends with it. May be empty.
  std::function<bool(std::int32_t)> ends;
};

// RequestError naming the flag.
void validate(const GenerateOptions& options);
void validate(const GenerateOptions& options, const ModelSpec& model,
              const std::vector<std::int32_t>& prompt);

// The plan under which a rank generates text of `positions` tokens, prompt included.
Plan plan_of_text(const Plan& plan, std::int64_t positions);

// Returns the tokens after `prompt` (not empty). `plan`, `parameters` and `biases` are those of the run, on
// any mesh; every rank calls this and gets the same tokens. `on_token` is called for each token as it comes.
// Rotary positions that depend on the sequence length (dynamic, longrope) use that of prompt and max_tokens
// together, from the first token on. RequestError if prompt and max_tokens exceed the model's positions.
// NotFinite (finite.h), on every rank, naming the position at which logits are NaN or infinite.
std::vector<std::int32_t> generate(const Rank& rank, const Plan& plan, const ParameterStore& parameters,
                                   const RouterBiases& biases, const std::vector<std::int32_t>& prompt,
                                   const GenerateOptions& options,
                                   const std::function<void(std::int32_t)>& on_token = {});

}  // namespace echelon
