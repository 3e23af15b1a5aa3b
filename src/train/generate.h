// Sampling text from a model: keys and values of earlier tokens are kept, so each new token costs one pass
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
  double top_p = 1;          // and of these among the fewest that together have this probability
  std::uint64_t seed = 1;
  std::vector<std::int32_t> stop_tokens{};  // that end the text
  // Asked after each token, on every rank alike: whether the text ends with it. May be empty.
  std::function<bool(std::int32_t)> ends;
};

// Throws RequestError naming the flag.
void validate(const GenerateOptions& options);
void validate(const GenerateOptions& options, const ModelSpec& model,
              const std::vector<std::int32_t>& prompt);

// As which a rank of the plan makes text of so many tokens, the prompt's among them.
Plan plan_of_text(const Plan& plan, std::int64_t positions);

// The tokens after `prompt` (not empty). `plan`, `parameters` and `biases` are those of the run, on any mesh;
// every rank of it calls this and gets the same tokens. `on_token` is called for each token
// as it comes. RequestError when the prompt and max_tokens exceed the model's positions. Rotary positions
// that depend on a sequence's length (dynamic, longrope) are those of one as long as prompt and max_tokens
// together, from the first token on. NotFinite (finite.h), on every rank, that names the position for which
// the model says NaN or infinite values of tokens.
std::vector<std::int32_t> generate(const Rank& rank, const Plan& plan, const ParameterStore& parameters,
                                   const RouterBiases& biases, const std::vector<std::int32_t>& prompt,
                                   const GenerateOptions& options,
                                   const std::function<void(std::int32_t)>& on_token = {});

}  // namespace echelon
