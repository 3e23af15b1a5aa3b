// What narrow products make of a whole training.
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "base/philox.h"
#include "mesh_runs.h"

namespace echelon::precision_slow_test {
namespace {

using namespace checks;

// After each token one of four, which it alone decides, with chances of 1/2, 1/4, 1/8 and 1/8: 1.21 nats
// that nothing can learn, and a table of 257 rows that can.
SampleSource drawn_text(const Plan& plan) {
  return [length = plan.seq_len, vocab = plan.model.vocab](std::int64_t step, std::int64_t k,
                                                           std::int32_t* tokens, std::int32_t* targets) {
    std::vector<std::uint32_t> drawn(static_cast<std::size_t>(length + 1));
    Philox(static_cast<std::uint64_t>(step), Stream::test, static_cast<std::uint64_t>(k))
        .fill_words(0, drawn.size(), drawn.data());
    auto token = static_cast<std::int32_t>(drawn[0] % static_cast<std::uint64_t>(vocab));
    for (std::int64_t i = 0; i < length; ++i) {
      tokens[i] = token;
      const std::uint32_t eighth = drawn[static_cast<std::size_t>(i + 1)] >> 29;
      const int choice = eighth < 4 ? 0 : eighth < 6 ? 1 : eighth < 7 ? 2 : 3;
      token = static_cast<std::int32_t>((token * 31 + choice * 67 + 5) % vocab);
      targets[i] = token;
    }
  };
}

// The mean of the last fifty losses, of one rank and of two, which have scales of their own.
TEST(PrecisionSlow, Fp8FollowsTheLossOfF32) {
  const auto ends_at = [](const char* precision, int dp) {
    Plan plan = odd_plan(load_model("llama-tiny"), dp, 1, false);
    plan.precision = recipe(precision);
    plan.global_batch = 8;
    plan.seq_len = 64;
    OptimizerOptions options;
    options.lr = 3e-3;
    options.min_lr = 3e-4;
    options.warmup_steps = 20;
    options.total_steps = 400;
    const std::vector<double> losses = run_steps(plan, options, 400, drawn_text(plan))[0].losses;
    EXPECT_GT(losses.front(), 5) << precision;
    return std::accumulate(losses.end() - 50, losses.end(), 0.0) / 50;
  };
  const double f32 = ends_at("f32", 1);
  EXPECT_LT(f32, 2) << "it learns";
  for (const int dp : {1, 2}) EXPECT_NEAR(ends_at("fp8", dp), f32, 0.03 * f32) << dp;
}

}  // namespace
}  // namespace echelon::precision_slow_test
