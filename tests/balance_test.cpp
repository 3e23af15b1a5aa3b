#include "schedule/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>

#include "base/error.h"
#include "base/split.h"
#include "schedule/pipeline_layout.h"
#include "schedule/schedules.h"
#include "schedule/text.h"

namespace echelon::balance_test {
namespace {

using Counts = std::vector<std::int64_t>;

struct Costs {
  std::vector<double> layers;
  double first = 0, last = 0;
};

// Work of one microbatch on the rank with the most, counted instruction by instruction.
double slowest(const Schedule& schedule, const Costs& costs, const Counts& counts) {
  std::vector<double> stages;
  std::size_t layer = 0;
  for (std::size_t s = 0; s < counts.size(); ++s) {
    stages.push_back((s == 0 ? costs.first : 0) + (s + 1 == counts.size() ? costs.last : 0));
    for (std::int64_t k = 0; k < counts[s]; ++k) stages.back() += costs.layers[layer++];
  }
  double most = 0;
  for (const auto& list : schedule.ranks) {
    double work = 0;
    for (const Instruction& i : list)
      if (i.op == Op::F) work += stages[static_cast<std::size_t>(i.stage)];
    most = std::max(most, work / schedule.num_microbatches);
  }
  return most;
}

Counts even_split(const Schedule& schedule, std::size_t layers) {
  Counts counts;
  for (int s = 0; s < schedule.num_stages; ++s)
    counts.push_back(split_range(static_cast<std::int64_t>(layers), schedule.num_stages, s).size());
  return counts;
}

void each_split(std::size_t stages, std::int64_t layers, const std::function<void(const Counts&)>& visit) {
  Counts counts;
  const std::function<void(std::int64_t)> next = [&](std::int64_t left) {
    const auto behind = static_cast<std::int64_t>(stages - counts.size()) - 1;
    for (std::int64_t n = behind == 0 ? left : 1; n <= left - behind; ++n) {
      counts.push_back(n);
      behind == 0 ? visit(counts) : next(left - n);
      counts.pop_back();
    }
  };
  next(layers);
}

std::int64_t squares(const Counts& counts) {
  return std::inner_product(counts.begin(), counts.end(), counts.begin(), std::int64_t{0});
}

void check_against_brute_force(const Schedule& schedule, const Costs& costs, bool is_exact) {
  SCOPED_TRACE(testing::Message() << schedule.name << " on " << schedule.num_ranks() << " ranks, "
                                  << testing::PrintToString(costs.layers) << " " << costs.first << " "
                                  << costs.last);
  const Balance balance = balance_layers(schedule, costs.layers, costs.first, costs.last);
  const auto num_layers = static_cast<std::int64_t>(costs.layers.size());
  double least = 1e300;
  each_split(static_cast<std::size_t>(schedule.num_stages), num_layers,
             [&](const Counts& counts) { least = std::min(least, slowest(schedule, costs, counts)); });
  ASSERT_EQ(balance.layers.size(), static_cast<std::size_t>(schedule.num_stages));
  ASSERT_EQ(std::accumulate(balance.layers.begin(), balance.layers.end(), std::int64_t{0}), num_layers);
  ASSERT_GE(*std::min_element(balance.layers.begin(), balance.layers.end()), 1);
  EXPECT_NEAR(balance.slowest, slowest(schedule, costs, balance.layers), 1e-9);
  EXPECT_LE(balance.lower_bound, least + 1e-9);
  EXPECT_GE(balance.slowest, least - 1e-9);
  if (is_exact) {
    EXPECT_NEAR(balance.slowest, least, 1e-9);
    EXPECT_NEAR(balance.lower_bound, least, 1e-9);
  }
  // Towards the even split.
  if (slowest(schedule, costs, even_split(schedule, costs.layers.size())) <= least + 1e-9) {
    EXPECT_EQ(balance.layers, even_split(schedule, costs.layers.size()));
  }
  const bool is_alike = std::count(costs.layers.begin(), costs.layers.end(), costs.layers[0]) == num_layers;
  if (!is_exact || !is_alike) return;
  std::int64_t evenest = squares(balance.layers);
  each_split(static_cast<std::size_t>(schedule.num_stages), num_layers, [&](const Counts& counts) {
    if (slowest(schedule, costs, counts) <= least + 1e-9) evenest = std::min(evenest, squares(counts));
  });
  EXPECT_EQ(squares(balance.layers), evenest);
}

TEST(Balance, BruteForce) {
  std::mt19937 random(1);
  const auto number = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  const std::vector<std::pair<Schedule, bool>> schedules{
      {one_f_one_b(1, 2), true},
      {one_f_one_b(2, 2), true},
      {one_f_one_b(3, 2), true},
      {one_f_one_b(4, 2), true},
      {zb_v(2, 4), true},
      {dualpipe_v(3, 6), true},
      {dualpipe(4, 8), true},
      {dualpipe(2, 4), true},
      {interleaved(2, 4, 2), false},
      {interleaved(2, 4, 3), false},
      {interleaved(3, 3, 2), false},
      {from_text("0F0 0BW0 1F1 1BW1 1F2 1BW2\n1F0 1BW0 0F1 0BW1 0F2 0BW2\n", "unequal halves"), false}};
  for (int trial = 0; trial < 60; ++trial)
    for (const auto& [schedule, is_exact] : schedules) {
      Costs costs;
      const int kind = number(0, 3), layers = schedule.num_stages + number(0, 5);
      for (int k = 0; k < layers; ++k)
        costs.layers.push_back(kind == 0   ? 1
                               : kind == 1 ? 0.37
                               : kind == 2 ? number(0, 4)
                                           : (k < 2 ? 1 : 3.3));
      costs.first = 0.25 * number(0, 8);
      costs.last = 0.5 * number(0, 12);
      check_against_brute_force(schedule, costs, is_exact || (kind < 2 && schedule.name == "interleaved"));
    }
}

Counts of_alike(const Schedule& schedule, std::size_t layers, double cost, double first, double last) {
  return balance_layers(schedule, std::vector<double>(layers, cost), first, last).layers;
}

TEST(Balance, TheOutputLayerCostsLayers) {
  EXPECT_EQ(of_alike(one_f_one_b(4, 8), 32, 1, 0, 0), (Counts{8, 8, 8, 8}));
  EXPECT_EQ(of_alike(one_f_one_b(4, 8), 30, 1, 0, 0), (Counts{8, 8, 7, 7}));
  EXPECT_EQ(of_alike(one_f_one_b(4, 8), 32, 1, 0, 4), (Counts{9, 9, 9, 5}));
  // In a V the first rank has both ends: it gets fewer at either.
  EXPECT_EQ(of_alike(zb_v(2, 8), 16, 1, 0, 4), (Counts{3, 5, 5, 3}));
  EXPECT_EQ(of_alike(interleaved(2, 4, 2), 16, 1, 0, 2), (Counts{5, 4, 4, 3}));
  // An output layer as dear as all others still comes with a layer.
  EXPECT_EQ(of_alike(one_f_one_b(4, 8), 8, 1, 0, 100), (Counts{3, 2, 2, 1}));
  EXPECT_EQ(of_alike(one_f_one_b(4, 8), 4, 1, 0, 3), (Counts{1, 1, 1, 1}));
  EXPECT_EQ(of_alike(one_f_one_b(2, 2), 5, 0, 1, 0), (Counts{3, 2}));
}

TEST(Balance, RefusesFewerLayersThanStages) {
  EXPECT_THROW(of_alike(one_f_one_b(4, 8), 3, 1, 0, 0), RequestError);
  EXPECT_THROW(of_alike(one_f_one_b(4, 8), 0, 1, 0, 0), RequestError);
  EXPECT_THROW(of_alike(zb_v(4, 8), 7, 1, 0, 0), RequestError);
}

// 61 layers of which the first three are cheap, as in DeepSeek-V3, and 126 alike, as in Llama-3 405B.
TEST(Balance, LargeModels) {
  std::vector<double> mixed(61, 2.6);
  std::fill(mixed.begin(), mixed.begin() + 3, 1.0);
  for (const Schedule& schedule : {one_f_one_b(16, 16), zb_v(8, 16), dualpipe(16, 32), dualpipe_v(8, 16)}) {
    const Balance balance = balance_layers(schedule, mixed, 0.3, 4.1);
    EXPECT_EQ(balance.slowest, balance.lower_bound) << schedule.name;
  }
  for (const Schedule& schedule :
       {one_f_one_b(64, 64), zb_v(16, 32), interleaved(8, 8, 8), one_f_one_b(126, 126)}) {
    const Balance balance = balance_layers(schedule, std::vector<double>(126, 1.7), 0.3, 4.1);
    EXPECT_EQ(balance.slowest, balance.lower_bound) << schedule.name;
  }
  // Chunks of unlike layers: within one layer of what no split beats.
  for (const Schedule& schedule : {interleaved(8, 8, 4), interleaved(4, 8, 8)}) {
    const Balance balance = balance_layers(schedule, mixed, 0.3, 4.1);
    EXPECT_LE(balance.slowest, balance.lower_bound + 2.6) << schedule.name;
  }
  std::mt19937 random(2);
  std::vector<double> any;
  for (int k = 0; k < 160; ++k) any.push_back(std::uniform_real_distribution<double>(0.5, 1.5)(random));
  const Balance balance = balance_layers(zb_v(64, 128), any, 0.3, 4.1);
  EXPECT_EQ(balance.slowest, balance.lower_bound);
  // Several chunks of many: within a layer again.
  any.resize(126);
  const Balance chunks = balance_layers(interleaved(32, 64, 3), any, 0.3, 4.1);
  EXPECT_LE(chunks.slowest, chunks.lower_bound + 1.5);
}

// FLOPs of the rank with the most, of a plan whose layers are split so.
double busiest(Plan plan, const Counts& counts) {
  if (!counts.empty()) {
    plan.balance_layers = false;
    plan.layers_per_stage = counts;
  }
  const PipelineLayout layout(plan);
  std::vector<double> stages;
  for (const StageSlice& slice : layout.slices()) {
    const StageTimes flops = stage_flops(plan, slice);
    stages.push_back(flops.forward + flops.backward_input + flops.backward_weight);
  }
  double most = 0;
  for (int r = 0; r < plan.mesh.pp(); ++r) {
    double work = 0;
    for (int stage : layout.stages_of(r)) work += stages[static_cast<std::size_t>(stage)];
    most = std::max(most, work);
  }
  return most;
}

// Layers of a state space or of attention, frozen ones, and those that only the first stage need not go back
// through: whatever a plan has, no split of it is better than `auto`.
TEST(Balance, AutoIsTheBestOfAllSplitsOfAPlan) {
  const auto check = [](const char* model, const char* schedule, int pp,
                        const std::vector<std::string>& freeze = {}) {
    Plan plan;
    plan.model = load_model(model);
    plan.model.tuning.freeze = freeze;
    plan.mesh.set(Axis::pp, pp);
    plan.schedule = schedule;
    plan.global_batch = 2 * pp;
    plan.micro_batch = 1;
    plan.seq_len = 64;
    plan.balance_layers = true;
    SCOPED_TRACE(testing::Message() << model << " " << schedule << " " << pp << " "
                                    << testing::PrintToString(freeze));
    const auto stages = PipelineLayout(plan).slices().size();
    double least = 1e300;
    each_split(stages, plan.model.num_layers,
               [&](const Counts& counts) { least = std::min(least, busiest(plan, counts)); });
    EXPECT_LE(busiest(plan, {}), least * (1 + 1e-9));
  };
  for (const char* model : {"bamba-tiny", "qwen3-next-tiny", "deepseek-tiny", "lfm2-tiny"})
    for (int pp : {2, 3, 4})
      if (load_model(model).num_layers >= pp) check(model, "1f1b", pp);
  check("bamba-tiny", "zb-v", 2);
  for (int pp : {2, 4}) {
    check("llama-tiny", "1f1b", pp, {"model.embed_tokens*", "model.layers.[0-3].*"});
    check("llama-tiny", "1f1b", pp, {"model.layers.[4-7].*"});
  }
  check("llama-tiny", "zb-v", 2, {"model.embed_tokens*", "model.layers.[0-5].*"});
}

}  // namespace
}  // namespace echelon::balance_test
