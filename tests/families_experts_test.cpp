// Families whose experts have what Mixtral's and DeepSeek's have not: GPT-OSS, and Qwen's gated shared
// expert.
#include <gtest/gtest.h>

#include "family_runs.h"
#include "refusals.h"

namespace echelon::families_experts_test {
namespace {

using namespace checks;

// Windows and limits so small that they show.
ModelSpec odd_gpt_oss() {
  ModelSpec m = odd_llama();
  m.name = "gpt-oss";
  m.qkv_bias = m.attention_out_bias = m.attention_sinks = true;
  m.window = {4, 2};
  m.rope.scaling = RopeScaling::yarn;
  m.rope.factor = 4;
  m.rope.original_length = 8;
  m.rope.whole_pairs = false;
  m.experts = Experts::gpt_oss;
  m.num_experts = 4;
  m.experts_per_token = 2;
  m.expert_hidden = m.mlp_hidden = 7;
  m.clamp = {1.5, 0.1};
  return m;
}

// A shared expert of a width of its own, weighed by each token, behind a dense layer.
ModelSpec odd_qwen2_moe() {
  ModelSpec m = odd_llama();
  m.name = "qwen2-moe";
  m.qkv_bias = true;
  m.experts = Experts::deepseek;
  m.num_experts = 4;
  m.experts_per_token = 2;
  m.expert_hidden = 7;
  m.num_shared_experts = 1;
  m.shared_hidden = 11;
  m.shared_gate = true;
  m.num_dense_layers = 1;
  m.router.normalise = false;
  return m;
}

// All experts are chosen: where a choice changes, the loss has no derivative.
TEST(GptOss, GradientsAreTheDerivativesOfTheLoss) {
  ModelSpec model = odd_gpt_oss();
  model.experts_per_token = model.num_experts;
  expect_derivatives(model);
}

TEST(GptOss, TomlSaysIt) {
  const ModelSpec model = odd_gpt_oss();
  expect_toml_says(model);
}

TEST(GptOss, IsTheSameOnEveryAxis) {
  for (const Plan& plan : plans_of(odd_gpt_oss()))
    if (is_taken(8)) expect_verified_and_predicted(plan);
}

// What its attention and its experts have that a Llama's plans do not: exchanged heads, documents, groups of
// experts, losses and capacities of routers, biases that are made again.
TEST(GptOss, IsTheSameWithHeadsAndExpertsElsewhere) {  // long
  const auto plan_of = [](int dp, int cp, int tp, int ep) {
    Plan plan = odd_plan(odd_gpt_oss(), dp, tp, tp > 1);
    plan.mesh.set(Axis::cp, cp);
    plan.mesh.ep = ep;
    plan.seq_len = cp > 1 ? 16 : 11;
    return plan;
  };
  std::vector<Plan> plans;
  for (ContextKind kind : {ContextKind::ulysses, ContextKind::hybrid}) {
    plans.push_back(plan_of(1, kind == ContextKind::hybrid ? 4 : 2, 1, 1));
    plans.back().context_kind = kind;
    if (kind == ContextKind::hybrid) plans.back().ulysses = 2;
    plans.back().mask = AttentionMask::document;
    plans.back().document_end = 5;
  }
  plans.push_back(plan_of(1, 2, 1, 1));
  plans.back().context_balance = ContextBalance::stripe;
  plans.push_back(plan_of(2, 1, 2, 2));
  plans.back().balancing = all_losses(false);
  plans.push_back(plan_of(2, 2, 1, 4));
  plans.back().balancing.capacity = 0.9;
  plans.push_back(plan_of(2, 1, 1, 2));
  plans.back().zero = 3;
  plans.back().recompute = Recompute({"experts_in", "attention"});
  for (const Plan& plan : plans) expect_verified_and_predicted(plan);
}

// Sums by sequence, of biases and sinks too.
TEST(GptOss, HasTheSameBitsUnderInvariantNumerics) {
  const auto one = invariant_gradients(odd_gpt_oss(), 1, 1, 4);
  EXPECT_EQ(one, invariant_gradients(odd_gpt_oss(), 2, 1, 1));
  EXPECT_EQ(one, invariant_gradients(odd_gpt_oss(), 4, 1, 1));
}

TEST(Qwen2Moe, GradientsAreTheDerivativesOfTheLoss) {
  ModelSpec model = odd_qwen2_moe();
  model.experts_per_token = model.num_experts;
  expect_derivatives(model);
}

TEST(Qwen2Moe, TomlSaysIt) {
  const ModelSpec model = odd_qwen2_moe();
  expect_toml_says(model);
}

TEST(Qwen2Moe, IsTheSameOnEveryAxis) {
  for (const Plan& plan : plans_of(odd_qwen2_moe()))
    if (is_taken(8)) expect_verified_and_predicted(plan);
}

// What weighs the shared expert meets what travels, what is made again, and what routers are balanced by.
TEST(Qwen2Moe, IsTheSameWithExpertsElsewhere) {
  for (const bool again : {false, true}) {
    Plan plan = odd_plan(odd_qwen2_moe(), 2, 2, again);
    plan.mesh.ep = 2;
    plan.balancing = all_losses(false);
    if (again) plan.recompute = Recompute({"experts_in", "attention"});
    expect_verified_and_predicted(plan);
  }
}

// The gradient of what weighs it is a sum over hidden units, which tp cuts.
TEST(Qwen2Moe, HasTheSameBitsUnderInvariantNumerics) {
  ModelSpec model = odd_qwen2_moe();
  model.num_heads = model.num_kv_heads = 4;
  model.expert_hidden = model.shared_hidden = model.mlp_hidden = 16;
  const auto one = invariant_gradients(model, 1, 1, 4);
  EXPECT_EQ(one, invariant_gradients(model, 2, 1, 1));
  EXPECT_EQ(one, invariant_gradients(model, 1, 2, 2));
}

TEST(Qwen2Moe, IsRefusedWithoutASharedExpert) {
  ModelSpec model = odd_qwen2_moe();
  model.num_shared_experts = 0;
  expect_refusal([&] { validate(model); }, {"shared_gate = true", "num_shared_experts = 1"});
  model.shared_gate = false;
  expect_refusal([&] { validate(model); }, {"shared_hidden = 11", "num_shared_experts = 1"});
  expect_refusal([&] { model_from_toml(to_toml(load_model("llama-tiny")) + "shared_gate = true\n", "x"); },
                 {"shared_gate", "experts is missing"});
}

TEST(GptOss, IsRefusedWhereItMeansNothing) {
  const auto refused = [](const char* preset, const char* line, std::vector<std::string> parts) {
    expect_refusal([&] { model_from_toml(to_toml(load_model(preset)) + line, "x"); }, parts);
  };
  refused("gpt2-tiny", "attention_sinks = true\n", {"attention_sinks", "gpt2 family", "give false"});
  refused("deepseek-v3", "attention_out_bias = true\n", {"attention_out_bias", "latent attention"});
  refused("mixtral-tiny", "swiglu_limit = 5.0\n", {"swiglu_limit = 5", "mixtral", "gpt-oss"});
  refused("llama-tiny", "swiglu_limit = 5.0\n", {"swiglu_limit", "experts is missing"});
  ModelSpec model = odd_gpt_oss();
  model.num_shared_experts = 1;
  expect_refusal([&] { validate(model); }, {"num_shared_experts = 1", "gpt-oss", "deepseek"});
  model = odd_gpt_oss();
  model.norm_place = NormPlace::after;
  model.experts = Experts::none;
  model.clamp = {};
  expect_refusal([&] { validate(model); }, {"attention_out_bias", "norm_place"});
  model = odd_gpt_oss();
  model.tuning.freeze = {"*.gate_proj.bias"};
  expect_refusal([&] { validate(odd_plan(model, 1, 1, false)); }, {"gate_proj.bias", "up_proj.bias"});
}

}  // namespace
}  // namespace echelon::families_experts_test
