#include "verify/routing_decisions.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tensor/kernels.h"
#include "tensor_checks.h"

namespace echelon::routing_decisions_test {
namespace {

using namespace checks;

// Four tokens, each to one of two experts, which takes two of them at most.
struct RoutingDecisionsTest : testing::Test {
  RoutingDecisionsTest() {
    plan.model.experts = Experts::mixtral;
    plan.model.num_layers = 1;
    plan.model.num_experts = 2;
    plan.model.experts_per_token = 1;
    plan.global_batch = 1;
    plan.seq_len = 4;
    tokens = {1, 5, 0, integers(arena, {0, 1, 2, 3})};
  }
  // `kept` as one rank leaves it where the mesh has made these decisions: 2 is expert 0's dropped token.
  std::vector<std::int32_t> follow(const std::vector<std::int32_t>& codes,
                                   const std::vector<double>& weight) {
    RoutingDecisions decisions(plan);
    decisions.codes() = codes;
    judge.impose(5, {decisions, {}});
    return visit(weight);
  }
  std::vector<std::int32_t> visit(const std::vector<double>& weight) {
    const Tensor ids = integers(arena, {0, 0, 0, 1}).reshape({4, 1}), weights = constant(arena, {4, 1}, 0);
    std::copy(weight.begin(), weight.end(), weights.host<double>());
    const auto keep = [&](const Tensor& by) {
      const Tensor kept = integers(arena, {0, 0, 0, 0}).reshape({4, 1});
      kernels->drop_over_capacity(ids, by, {1, 2, 2, DropPolicy::probability}, kept);
      return kept;
    };
    const Tensor kept = keep(weights);
    judge.on_kept(0, tokens, ids, weights, kept, keep);
    return {kept.host<std::int32_t>(), kept.host<std::int32_t>() + 4};
  }
  RoutingDifference only_difference() const {
    const auto all = judge.differences(5, 8);
    EXPECT_EQ(all.size(), 1u);
    return all.at(0);
  }
  Arena arena;
  std::unique_ptr<Kernels> kernels = make_reference_kernels();
  Plan plan;
  RoutedTokens tokens;
  RoutingJudge judge;
};

TEST_F(RoutingDecisionsTest, TheSameDropsAreNoDifference) {
  EXPECT_EQ(follow({0, 0, 2, 1}, {0.9, 0.8, 0.7, 0.6}), (std::vector<std::int32_t>{0, 0, -1, 1}));
  EXPECT_FALSE(judge.has_differences(0, 9));
}

TEST_F(RoutingDecisionsTest, DropsOfEqualWeightsAreFollowedAndTie) {
  const double apart = 1e-9;  // on both sides of a weight at which priorities change
  const double edge = (std::floor(0.8 * 0x1p26) + 0.5) * 0x1p-26;
  const std::vector<double> weights{0.9, edge + apart, edge - apart, 0.6};
  EXPECT_EQ(follow({0, 2, 0, 1}, weights), (std::vector<std::int32_t>{0, -1, 0, 1}));
  EXPECT_TRUE(judge.has_differences(5, 5));
  EXPECT_FALSE(judge.has_differences(6, 9));
  EXPECT_FALSE(only_difference().ties());  // without a trial nothing is known of rounding
  judge.begin_trial();
  visit({0.9, edge + apart - 2e-8, edge - apart, 0.6});
  judge.end_trial();
  const RoutingDifference d = only_difference();
  EXPECT_TRUE(d.ties());
  EXPECT_EQ(d.kind, "drop");
  EXPECT_EQ(d.tokens, 2);
  EXPECT_LT(d.shift, 2e-8);
}

// Verify's rank in f32 beside one in bf16: it follows the mesh, and rounding elsewhere is its own affair.
TEST_F(RoutingDecisionsTest, WhatARankOfAnotherPrecisionWouldDecideIsNoDifference) {
  const std::vector<double> weights{0.9, 0.8, 0.7, 0.6};
  const Tensor logits = constant(arena, {4, 2}, 0), ids = integers(arena, {1, 0, 0, 1}).reshape({4, 1});
  logits.host<double>()[1] = 1e-3;  // the first token would go to the second expert
  const auto decide = [&] {
    EXPECT_EQ(follow({0, 2, 0, 1}, weights), (std::vector<std::int32_t>{0, -1, 0, 1}));
    judge.on_choice(0, tokens, TokenRouter({}, 2, 1), logits, {}, ids);
    EXPECT_EQ(std::vector<std::int32_t>(ids.host<std::int32_t>(), ids.host<std::int32_t>() + 4),
              (std::vector<std::int32_t>{0, 0, 0, 1}));
  };
  judge.begin_wide();
  decide();
  judge.end_wide();
  EXPECT_FALSE(judge.has_differences(0, 9));
  ids.host<std::int32_t>()[0] = 1;
  decide();
  EXPECT_EQ(judge.differences(5, 8).size(), 2u);  // the choice, and the drops
}

TEST_F(RoutingDecisionsTest, DropsOfUnequalWeightsDoNotTie) {
  follow({0, 2, 0, 1}, {0.9, 0.8, 0.7, 0.6});
  judge.begin_trial();
  visit({0.9, 0.8 + 1e-9, 0.7, 0.6});
  judge.end_trial();
  EXPECT_FALSE(only_difference().ties());
  EXPECT_NEAR(only_difference().shift, 0.05, 1e-4);
}

TEST_F(RoutingDecisionsTest, DropsThatNoWeightsExplainAreNotFollowed) {
  EXPECT_EQ(follow({2, 2, 2, 1}, {0.9, 0.8, 0.7, 0.6}), (std::vector<std::int32_t>{0, 0, -1, 1}));
  EXPECT_TRUE(std::isinf(only_difference().shift));
}

}  // namespace
}  // namespace echelon::routing_decisions_test
