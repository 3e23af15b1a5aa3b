// Rotary positions as data (Su et al. 2021, https://arxiv.org/abs/2104.09864), and the published ways to let
// a model see further than it was trained on. Names and formulas are those of transformers.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "base/host_device.h"
#include "spec/choices.h"

namespace echelon {

enum class RopeScaling {
  none,
  linear,  // positions divided by `factor` (Chen et al. 2023, https://arxiv.org/abs/2306.15595)
  // theta grows with the sequence's length beyond the original one, so that the slowest pair makes as many
  // turns as it did (dynamic NTK: Peng et al. 2023, https://arxiv.org/abs/2309.00071, appendix B.2).
  dynamic,
  llama3,  // slow pairs alone, with a ramp between (Llama 3.1)
  yarn,    // by pair, with a ramp, and attention sharper (Peng et al. 2023, https://arxiv.org/abs/2309.00071)
  longrope,  // a factor for each pair (Ding et al. 2024, https://arxiv.org/abs/2402.13753)
};
template <>
inline constexpr std::array choice_names<RopeScaling>{"none",   "linear", "dynamic",
                                                      "llama3", "yarn",   "longrope"};

struct RopeSpec {
  double theta = 10000.0;
  // Layers with a window turn by this one, unscaled (Gemma 3); 0: as the others.
  double local_theta = 0;
  std::int64_t unturned_every = 0;  // each so-many-th layer has no positions (SmolLM3); 0: every layer has
  RopeScaling scaling = RopeScaling::none;
  double factor = 1;
  std::int64_t original_length = 0;  // that the model was trained on before it was scaled
  double attention_factor = 1;       // of what is turned, queries and keys alike: yarn, longrope
  double low_frequency = 1,
         high_frequency = 4;             // llama3: where the ramp ends, in turns of the original length
  double beta_fast = 32, beta_slow = 1;  // yarn: the same
  bool whole_pairs = true;               // yarn: the ramp's ends are rounded outwards
  // yarn: queries are multiplied by 1 + this times log(1 + floor(position / original_length)), so that scores
  // stay sharp over more keys (Llama 4, Ministral 3).
  double query_growth = 0;
  // longrope, by pair: in sequences up to the original length, and beyond.
  std::vector<double> short_factors, long_factors;
  bool operator==(const RopeSpec&) const = default;
};

// What a rope kernel needs: radians a position of each pair, and what cosines and sines are multiplied by.
struct RopeTurns {
  std::vector<double> frequencies;
  double factor = 1;
  double growth = 0;  // of the factor: RopeSpec::query_growth
  std::int64_t growth_length = 1;
  // All elements of a head in pairs (i, i + head_dim / 2).
  static RopeTurns plain(double theta, std::int64_t head_dim);
};

// The factor at a position, of RopeTurns' numbers.
ECHELON_HOST_DEVICE inline double grown_factor(double factor, double growth, std::int64_t length,
                                               std::int64_t position) {
  if (growth == 0) return factor;
  return factor * (1 + growth * std::log(1 + static_cast<double>(position / length)));
}

// Of heads whose first `rotary_dim` elements are turned, in sequences of `seq_len`; of a layer with a window,
// or without.
RopeTurns rope_turns(const RopeSpec& rope, std::int64_t rotary_dim, std::int64_t seq_len, bool windowed);
// The same of queries, where they grow; otherwise of keys too.
RopeTurns query_turns(const RopeSpec& rope, RopeTurns turns);

// What transformers takes where a configuration names no attention factor.
double default_attention_factor(const RopeSpec& rope, double mscale = 0, double mscale_all_dim = 0);

}  // namespace echelon
