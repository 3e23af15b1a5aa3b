// What balancing does about a popular expert, over 200 steps of the small presets.
#include <gtest/gtest.h>

#include <numeric>

#include "mesh_runs.h"
#include "train/session.h"

namespace echelon::planted_expert_slow_test {
namespace {

using namespace checks;

constexpr std::int64_t steps = 200, counted = 25;

class PlantedExpertRuns : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!has_cpu_kernels()) GTEST_SKIP() << "200 steps take the reference kernels too long";
    // Words of some language: what comes next can be learned.
    std::string text;
    const Philox random(1, Stream::test, 0);
    for (std::uint64_t i = 0; i < 30000; ++i) {
      const std::uint64_t word = random.below(i, 40) * random.below(i + (1u << 20), 3);
      for (std::uint64_t k = 0; k <= 2 + word % 5; ++k)
        text += static_cast<char>('a' + (word * (k + 3)) % 26);
      text += ' ';
    }
    write_text(directory_ / "text", text);
    data_ = std::make_unique<TokenData>(std::vector{directory_ / "text"}, bytes_vocab);
  }

  // The last steps of a run whose expert 3 is popular when it begins.
  std::vector<StepRecord> last_steps(const Balancing& balancing) const {
    TrainRequest request;
    request.plan.model = load_model(GetParam());
    request.plan.balancing = balancing;
    request.plan.global_batch = request.plan.micro_batch = 8;
    request.plan.seq_len = 64;
    request.plan.precision = DType::f32;
    request.planted_expert = PlantedExpert{3, 4};
    request.optimizer.total_steps = steps;
    request.run.timeout = patience;
    std::vector<StepRecord> records;
    TrainObserver keep;
    keep.on_step = [&](const StepRecord& r) { records.push_back(r); };
    train(request, *data_, keep);
    EXPECT_EQ(std::ssize(records), steps);
    for (const StepRecord& r : records) EXPECT_TRUE(std::isfinite(r.loss)) << r.step;
    // For every token, at the beginning: k of the E choices that an even load would have.
    const ModelSpec& m = request.plan.model;
    EXPECT_NEAR(records.front().experts.front().imbalance,
                static_cast<double>(m.num_experts) / static_cast<double>(m.experts_per_token), 0.1);
    return {records.end() - counted, records.end()};
  }

  // In each layer, over all of them.
  static std::vector<double> imbalances(const std::vector<StepRecord>& records) {
    std::vector<double> result;
    for (std::size_t i = 0; i < records.front().experts.size(); ++i) {
      std::vector<double> tokens(records.front().experts[i].tokens.size());
      for (const StepRecord& r : records)
        for (std::size_t e = 0; e < tokens.size(); ++e) tokens[e] += r.experts[i].tokens[e];
      result.push_back(*std::max_element(tokens.begin(), tokens.end()) * static_cast<double>(tokens.size()) /
                       std::accumulate(tokens.begin(), tokens.end(), 0.0));
    }
    return result;
  }

  const TemporaryDirectory directory_;
  std::unique_ptr<TokenData> data_;
};

TEST_P(PlantedExpertRuns, StaysPopularWithoutBalancing) {
  const auto found = imbalances(last_steps({}));
  EXPECT_GT(*std::max_element(found.begin(), found.end()), 2);
}

TEST_P(PlantedExpertRuns, IsSpreadByTheLossAndByTheBias) {
  for (const Balancing& balancing : {Balancing{.expert_loss = 0.1}, Balancing{.bias_rate = 0.01}})
    for (double imbalance : imbalances(last_steps(balancing)))
      EXPECT_LT(imbalance, 1.3) << balancing.expert_loss << " " << balancing.bias_rate;
}

// Whatever the router wants: every expert of every layer takes no more than its capacity of each sequence.
TEST_P(PlantedExpertRuns, TakesNoMoreThanItsCapacity) {
  constexpr double factor = 1.25,
                   capacity_of_sequence = 20;  // 64 tokens to 2 of 8 experts: 16 each when even
  for (DropPolicy drop : {DropPolicy::probability, DropPolicy::position}) {
    const auto records = last_steps({.capacity = factor, .drop = drop});
    for (const StepRecord& r : records)
      for (const ExpertLoad& layer : r.experts) {
        double wanted = 0, dropped = 0;
        for (std::size_t e = 0; e < layer.tokens.size(); ++e) {
          EXPECT_LE(layer.tokens[e] - layer.dropped[e], 8 * capacity_of_sequence) << "layer " << layer.layer;
          EXPECT_GE(layer.dropped[e], 0);
          wanted += layer.tokens[e];
          dropped += layer.dropped[e];
        }
        EXPECT_EQ(wanted, 8 * 64 * 2);
        EXPECT_EQ(layer.drop_rate, dropped / wanted);
      }
  }
}

INSTANTIATE_TEST_SUITE_P(Presets, PlantedExpertRuns, testing::Values("mixtral-tiny", "deepseek-tiny"),
                         [](const auto& preset) { return std::string(preset.param).substr(0, 7); });

}  // namespace
}  // namespace echelon::planted_expert_slow_test
