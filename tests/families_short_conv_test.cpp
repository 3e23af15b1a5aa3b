// Layers with a gated short convolution in place of attention (LFM2).
#include <gtest/gtest.h>

#include "family_runs.h"
#include "refusals.h"

namespace echelon::families_short_conv_test {
namespace {

using namespace checks;

// Of four kinds of layers: attention or a short convolution, an MLP or experts that are chosen by biases.
ModelSpec odd_lfm2_moe() {
  ModelSpec m = odd_llama(true, 2, 4);
  m.name = "lfm2-moe";
  m.qk_norm = true;
  m.short_conv = {4, {1, 2}};
  m.experts = Experts::deepseek;
  m.num_experts = 4;
  m.experts_per_token = 2;
  m.expert_hidden = 7;
  m.num_dense_layers = 2;
  m.router = {.scores = RouterScores::sigmoid, .epsilon = 0.25, .scale = 1.5};
  return m;
}

TEST(Lfm2, GradientsAreTheDerivativesOfTheLoss) {
  ModelSpec model = odd_lfm2_moe();
  model.experts_per_token = model.num_experts;
  expect_derivatives(model);
}

TEST(Lfm2, TomlSaysIt) {
  const ModelSpec model = odd_lfm2_moe();
  expect_toml_says(model);
  expect_contains(to_toml(model), {"short_conv = 4", "attention_layers = [1, 2]", "router_epsilon = 0.25"});
}

TEST(Lfm2, IsTheSameOnEveryAxis) {
  for (const Plan& plan : plans_of(odd_lfm2_moe()))
    if (is_taken(8)) expect_verified_and_predicted(plan);
}

TEST(Lfm2, IsTheSameWithExpertsElsewhere) {
  for (const bool again : {false, true}) {
    Plan plan = odd_plan(odd_lfm2_moe(), 2, 2, again);
    plan.mesh.ep = 2;
    plan.balancing = all_losses(false);
    if (again) plan.recompute = Recompute({"experts_in", "short_conv", "conv_in"});
    expect_verified_and_predicted(plan);
  }
}

// Convolutions begin anew with each document. 3 ranks have unequal numbers of channels.
TEST(Lfm2, KeepsDocumentsApart) {
  ModelSpec model = odd_llama();
  model.short_conv = {5, {1}};
  for (const int tp : {1, 4}) {
    Plan plan = odd_plan(model, 2, tp, tp > 1);
    plan.mask = AttentionMask::document;
    plan.document_end = 3;
    expect_verified_and_predicted(plan);
  }
}

// A channel is cut by itself: tp need not divide their number where no layer has attention.
TEST(Lfm2, ConvolutionsAreCutUnevenly) {
  ModelSpec model = odd_llama();
  model.short_conv = {3, {}};
  ASSERT_NE(model.hidden % 5, 0);
  for (const bool sp : {false, true}) expect_verified_and_predicted(odd_plan(model, 1, 5, sp));
}

// What is said to be made again is: the product before, and what cp exchanges, or the product behind alone.
TEST(Lfm2, MakesConvolutionsAgain) {
  ModelSpec model = odd_llama();
  model.short_conv = {3, {1}};
  for (const int cp : {1, 2})
    for (const std::vector<std::string>& ops : {std::vector<std::string>{"conv_in"},
                                                {"conv_out"},
                                                {"short_conv"},
                                                {"conv_out", "residual1"},
                                                {"conv_in", "conv_out", "residual1"}}) {
      if (!is_taken(3)) continue;
      Plan plan = odd_plan(model, 1, 2, true);
      plan.mesh.set(Axis::cp, cp);
      plan.seq_len = 12;
      plan.recompute = Recompute(ops);
      expect_verified_and_predicted(plan);
    }
}

// Channels are exchanged over the whole cp group, wherever attention has its tokens, documents across ranks.
TEST(Lfm2, ExchangesChannelsUnderEveryLayoutOfTokens) {  // long
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  model.short_conv = {4, {1}};
  expect_every_layout_of_tokens(model, 1);
}

// What is sent: of [B | C | x] and of what they become, forwards and backwards, all but what stays, and the
// latter once more where the backward pass makes it.
TEST(Lfm2, SendsWhatTheFormulaSays) {
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  model.num_layers = 1;
  model.short_conv = {3, {}};
  Plan plan = odd_plan(model, 1, 1, false);
  plan.mesh.set(Axis::cp, 2);
  plan.seq_len = 24;
  plan.global_batch = plan.micro_batch = 2;
  const std::int64_t tokens = 2 * 12, width = model.hidden;
  on_mesh(plan, [&](const Rank& rank) {
    Trainer trainer(rank, plan, {}, 1);
    const Traffic before = rank.traffic();
    trainer.compute_gradients(0, random_samples(plan));
    EXPECT_EQ((rank.traffic() - before).at(Axis::cp, Verb::all_to_all).bytes,
              8 * tokens * (2 * (3 + 1) + 1) * width / 2);
  });
}

TEST(Lfm2, HasTheSameBitsUnderInvariantNumerics) {
  ModelSpec model = odd_lfm2_moe();
  model.num_heads = model.num_kv_heads = 4;
  model.expert_hidden = model.mlp_hidden = 16;
  const auto one = invariant_gradients(model, 1, 1, 4);
  EXPECT_EQ(one, invariant_gradients(model, 2, 1, 1));
  EXPECT_EQ(one, invariant_gradients(model, 1, 2, 2));
  model.experts = Experts::none;
  model.num_dense_layers = 0;
  model.router = {};
  model.num_experts = model.experts_per_token = model.expert_hidden = 0;
  const auto gradients = [&](int cp) {
    Plan plan = odd_plan(model, 1, 1, false);
    plan.mesh.set(Axis::cp, cp);
    plan.numerics = Numerics::invariant;
    plan.global_batch = plan.seq_len = 4;
    plan.micro_batch = 2;
    return gradients_of(plan);
  };
  EXPECT_EQ(gradients(1), gradients(2));
}

TEST(Lfm2, LayersAreOfFourKinds) {
  const ModelSpec model = odd_lfm2_moe();
  std::vector<std::pair<std::string, std::int64_t>> kinds;
  for (const LayerKind& kind : layer_kinds(model)) kinds.emplace_back(kind.name, kind.layer);
  EXPECT_EQ(kinds,
            (std::vector<std::pair<std::string, std::int64_t>>{{"layer with attention and an MLP", 1},
                                                               {"layer with a convolution and an MLP", 0},
                                                               {"layer with attention and experts", 2},
                                                               {"layer with a convolution and experts", 3}}));
  std::int64_t sum = num_parameters(model);
  for (const ParamSpec& p : all_parameters(model)) sum -= p.numel();
  EXPECT_EQ(sum, 0);
  // 1.5 of 8.3 billion numbers meet a token, or are its norms and convolutions.
  const ModelSpec published = load_model("lfm2-8b-a1b");
  EXPECT_NEAR(static_cast<double>(num_active_parameters(published)), 1.56e9, 0.01e9);
}

TEST(Lfm2, IsRefusedWhereItMeansNothing) {
  const auto refused = [](void (*change)(ModelSpec & m), const std::vector<std::string>& words) {
    ModelSpec model = odd_lfm2_moe();
    change(model);
    expect_refusal([&] { validate(model); }, words);
  };
  refused([](ModelSpec& m) { m.short_conv.kernel = 1; }, {"short_conv = 1", "2 to 64"});
  refused([](ModelSpec& m) { m.short_conv.kernel = 0; }, {"attention_layers", "short_conv above 0"});
  refused([](ModelSpec& m) { m.short_conv.attention_layers = {0, 1, 2, 3}; }, {"all layers", "short_conv"});
  refused([](ModelSpec& m) { m.short_conv.attention_layers = {2, 1}; }, {"attention_layers", "rising"});
  refused([](ModelSpec& m) { m.state_space = {4, 3, 1, 5, 3, true, 4, {1}}; }, {"ssm_heads", "short_conv"});
  refused([](ModelSpec& m) { m.window.size = 4; }, {"a window", "short_conv"});
  refused([](ModelSpec& m) { m.num_mtp_layers = 1; }, {"num_mtp_layers", "short_conv"});
  refused([](ModelSpec& m) { m.router.normalise = false; }, {"router_epsilon", "normalise_weights"});
  expect_refusal([] { model_from_toml(to_toml(load_model("gpt2-tiny")) + "short_conv = 3\n", "x"); },
                 {"short_conv = 3", "family = \"llama\""});
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  model.short_conv = {3, {1}};
  const auto refused_plan = [&](void (*change)(Plan & plan), const std::vector<std::string>& words) {
    Plan plan = odd_plan(model, 1, 1, false);
    change(plan);
    expect_refusal([&] { validate(plan); }, words);
  };
  refused_plan(
      [](Plan& p) {
        p.mesh.set(Axis::cp, 5);
        p.seq_len = 20;
      },
      {"--cp 5", "24 over --tp 1", "legal: 1, 2"});
  refused_plan(
      [](Plan& p) {
        p.model.short_conv.attention_layers = {};
        p.model.tuning.lora = {2, 2, {}};
      },
      {"--lora rank=2", "no attention", "out_proj"});
}

}  // namespace
}  // namespace echelon::families_short_conv_test
