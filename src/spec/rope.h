// Rotary positions as data (RoPE; Su et al. 2021, https://arxiv.org/abs/2104.09864), and the published ways
// to extend a model's context beyond its training length. Names and formulas follow transformers.
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
  // Dynamic NTK: theta grows with the length of a sequence beyond the original one, so that the slowest pair
  // makes as many turns as before (Peng et al. 2023, https://arxiv.org/abs/2309.00071, appendix B.2).
  dynamic,
  llama3,  // slows only the slow pairs, with a ramp between (Llama 3.1)
  yarn,    // per pair with a ramp, and sharper attention (Peng et al. 2023, https://arxiv.org/abs/2309.00071)
  longrope,  // a factor per pair (Ding et al. 2024, https://arxiv.org/abs/2402.13753)
};
template <>
inline constexpr std::array choice_names<RopeScaling>{"none",   "linear", "dynamic",
                                                      "llama3", "yarn",   "longrope"};

struct RopeSpec {
  double theta = 10000.0;
  // Theta of layers with a window, which are not scaled (Gemma 3); 0: the same as the others.
  double local_theta = 0;
  std::int64_t unturned_every = 0;  // every n-th layer has no positions (SmolLM3); 0: all layers have
  RopeScaling scaling = RopeScaling::none;
  double factor = 1;
  std::int64_t original_length = 0;  // training length before scaling
  double attention_factor = 1;       // yarn, longrope: multiplies queries and keys alike
  // llama3: the ends of the ramp, in turns of a pair over the original length.
  double low_frequency = 1,
         high_frequency = 4;             // llama3: where the ramp ends, in turns of the original length
  double beta_fast = 32, beta_slow = 1;  // yarn: the ends of the ramp
  bool whole_pairs = true;               // yarn: rounds the ends of the ramp outwards
  // yarn: multiplies queries by 1 + query_growth log(1 + floor(position / original_length)), so that scores
  // stay sharp over more keys (Llama 4, Ministral 3). What is not turned of a query grows alike.
  double query_growth = 0;
  // longrope: factors by pair, for sequences up to the original length and for longer ones.
  std::vector<double> short_factors, long_factors;
  bool operator==(const RopeSpec&) const = default;
};

// What a rope kernel needs: the angle of each pair in radians per position, and a factor of cosines and
// sines.
struct RopeTurns {
  std::vector<double> frequencies;
  double factor = 1;
  double growth = 0;  // RopeSpec::query_growth
  std::int64_t growth_length = 1;
  // Rotates the whole head, in pairs (i, i + head_dim / 2).
  static RopeTurns plain(double theta, std::int64_t head_dim);
};

// The factor at a position, from the members of RopeTurns.
ECHELON_HOST_DEVICE inline double grown_factor(double factor, double growth, std::int64_t length,
                                               std::int64_t position) {
  if (growth == 0) return factor;
  return factor * (1 + growth * std::log(1 + static_cast<double>(position / length)));
}

// For heads whose first `rotary_dim` elements are rotated, in sequences of `seq_len`, in a layer with or
// without a window.
RopeTurns rope_turns(const RopeSpec& rope, std::int64_t rotary_dim, std::int64_t seq_len, bool windowed);
// The same for queries, with their growth; without it, keys use these too.
RopeTurns query_turns(const RopeSpec& rope, RopeTurns turns);

// The attention factor that transformers uses if a configuration has none.
double default_attention_factor(const RopeSpec& rope, double mscale = 0, double mscale_all_dim = 0);

}  // namespace echelon
