#include "spec/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace echelon {
namespace {

constexpr double turn = 2 * std::numbers::pi;

double dynamic_theta(const RopeSpec& rope, std::int64_t width, std::int64_t seq_len) {
  const double lengths = static_cast<double>(std::max(seq_len, rope.original_length)) /
                         static_cast<double>(rope.original_length);
  const double pairs = static_cast<double>(width);
  return rope.theta * std::pow(rope.factor * lengths - (rope.factor - 1), pairs / (pairs - 2));
}

double llama3_frequency(const RopeSpec& rope, double frequency) {
  const double turns = static_cast<double>(rope.original_length) * frequency / turn;
  if (turns > rope.high_frequency) return frequency;
  if (turns < rope.low_frequency) return frequency / rope.factor;
  const double part = (turns - rope.low_frequency) / (rope.high_frequency - rope.low_frequency);
  return (1 - part) * frequency / rope.factor + part * frequency;
}

// The pair, as a real number, that makes so many turns in the original length.
double yarn_pair(const RopeSpec& rope, double turns, double width) {
  return width * std::log(static_cast<double>(rope.original_length) / (turns * turn)) /
         (2 * std::log(rope.theta));
}

void scale_yarn(const RopeSpec& rope, std::vector<double>& frequencies) {
  const double width = 2.0 * static_cast<double>(frequencies.size());
  double low = yarn_pair(rope, rope.beta_fast, width), high = yarn_pair(rope, rope.beta_slow, width);
  if (rope.whole_pairs) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0), high = std::min(high, width - 1);
  if (high == low) high += 0.001;  // as transformers has it, where they may be the other way round
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double slow = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    frequencies[i] = frequencies[i] / rope.factor * slow + frequencies[i] * (1 - slow);
  }
}

}  // namespace

RopeTurns RopeTurns::plain(double theta, std::int64_t head_dim) {
  RopeTurns turns;
  for (std::int64_t pair = 0; pair < head_dim / 2; ++pair)
    turns.frequencies.push_back(
        std::pow(theta, -2.0 * static_cast<double>(pair) / static_cast<double>(head_dim)));
  return turns;
}

RopeTurns rope_turns(const RopeSpec& rope, std::int64_t rotary_dim, std::int64_t seq_len, bool windowed) {
  if (windowed && rope.local_theta > 0) return RopeTurns::plain(rope.local_theta, rotary_dim);
  RopeTurns turns = RopeTurns::plain(rope.theta, rotary_dim);
  std::vector<double>& frequencies = turns.frequencies;
  switch (rope.scaling) {
    case RopeScaling::none:
      break;
    case RopeScaling::linear:
      for (double& f : frequencies) f /= rope.factor;
      break;
    case RopeScaling::dynamic:
      return RopeTurns::plain(dynamic_theta(rope, rotary_dim, seq_len), rotary_dim);
    case RopeScaling::llama3:
      for (double& f : frequencies) f = llama3_frequency(rope, f);
      break;
    case RopeScaling::yarn:
      scale_yarn(rope, frequencies);
      turns.factor = rope.attention_factor;
      break;
    case RopeScaling::longrope: {
      const auto& factors = seq_len > rope.original_length ? rope.long_factors : rope.short_factors;
      for (std::size_t i = 0; i < frequencies.size(); ++i) frequencies[i] /= factors[i];
      turns.factor = rope.attention_factor;
      break;
    }
  }
  return turns;
}

RopeTurns query_turns(const RopeSpec& rope, RopeTurns turns) {
  turns.growth = rope.query_growth;
  if (rope.query_growth != 0) turns.growth_length = rope.original_length;
  return turns;
}

double default_attention_factor(const RopeSpec& rope, double mscale, double mscale_all_dim) {
  if (rope.factor <= 1) return 1;
  if (rope.scaling == RopeScaling::longrope)
    return std::sqrt(1 + std::log(rope.factor) / std::log(static_cast<double>(rope.original_length)));
  const auto sharper = [&](double by) { return 0.1 * by * std::log(rope.factor) + 1; };
  if (mscale > 0 && mscale_all_dim > 0) return sharper(mscale) / sharper(mscale_all_dim);
  return sharper(1);
}

}  // namespace echelon
