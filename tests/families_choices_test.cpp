// Choices that a layer of a Llama's kind has: where they act beside the other ones, and where they are
// refused.
#include <gtest/gtest.h>

#include "family_runs.h"
#include "refusals.h"

namespace echelon::families_choices_test {
namespace {

using namespace checks;

// Whose gradients are sums over all columns, which tp cuts.
TEST(Xielu, UnderInvariantNumericsIsOnOneRank) {
  ModelSpec model = odd_llama();
  model.activation = Activation::xielu;
  Plan plan = odd_plan(model, 1, 2, false);
  plan.numerics = Numerics::invariant;
  plan.seq_len = 16, plan.global_batch = 8;
  expect_refusal([&] { validate(plan); }, {"--tp 2", "xielu", "legal: 1"});
  plan.mesh.set(Axis::tp, 1);
  plan.mesh.set(Axis::dp, 2);
  validate(plan);
  model.mlp_bias = true;
  expect_refusal([&] { validate(model); }, {"mlp_bias", "xielu"});
}

// Both lie side by side, and so do their gradients.
TEST(Xielu, BesideAdaptersAndFrozenParts) {
  Plan plan = odd_plan(odd_llama(), 2, 2, true);
  plan.model.activation = Activation::xielu;
  plan.model.tuning.freeze = {"*.alpha_p"};
  expect_refusal([&] { validate(plan); }, {"alpha_p", "alpha_n", "side by side"});
  plan.model.tuning.freeze = {"*.act_fn.*"};
  expect_verified_and_predicted(plan);
  plan.model.tuning.freeze = {};
  plan.model.tuning.lora = {2, 4, {}};
  expect_verified_and_predicted(plan);
}

// Heads that are exchanged have their scores capped where they are computed.
TEST(Gemma2, IsTheSameUnderUlyssesAndItsHybrid) {
  ModelSpec model = odd_llama();
  model.caps = {0.5, 0.75};
  for (ContextKind kind : {ContextKind::ulysses, ContextKind::hybrid}) {
    Plan plan = odd_plan(model, 1, 1, false);
    plan.mesh.set(Axis::cp, kind == ContextKind::hybrid ? 4 : 2);
    plan.context_kind = kind;
    if (kind == ContextKind::hybrid) plan.ulysses = 2;
    plan.seq_len = 16;
    expect_verified_and_predicted(plan);
  }
}

// What is not turned would not grow.
TEST(QueryGrowth, IsOfWholeQueriesOfAllLayers) {
  ModelSpec model = odd_llama();
  model.rope.scaling = RopeScaling::yarn;
  model.rope.factor = 4;
  model.rope.original_length = 3;
  model.rope.query_growth = 0.7;
  validate(model);
  const auto refused = [&](const auto& change) {
    ModelSpec other = model;
    change(other);
    expect_refusal([&] { validate(other); }, {"rope_query_growth = 0.7", "give 0"});
    other.rope.query_growth = 0;
    validate(other);
  };
  refused([](ModelSpec& m) { m.rotary_dim = 2; });
  refused([](ModelSpec& m) { m.rope.unturned_every = 2; });
  refused([](ModelSpec& m) { latent(m); });
}

TEST(FamilyChoices, OfALayerAreRefusedWhereTheyMeanNothing) {
  const auto refused = [](const char* preset, const std::string& lines, std::vector<std::string> parts) {
    expect_refusal([&] { model_from_toml(to_toml(load_model(preset)) + lines, "x"); }, parts);
  };
  refused("gpt2-tiny", "norm_kind = \"layer\"\n", {"norm_kind", "gpt2 family", "\"rms\""});
  refused("llama-tiny", "norm_kind = \"layer\"\nnorm_place = \"after\"\n",
          {"norm_kind", "norm_place", "\"before\""});
  refused("gpt2-tiny", "parallel_residual = true\n", {"parallel_residual", "gpt2"});
  refused("llama-tiny", "parallel_residual = true\nnorm_place = \"after\"\n",
          {"parallel_residual", "norm_place"});
  refused("gpt2-tiny", "interleaved_rope = true\n", {"interleaved_rope", "gpt2"});
  refused("deepseek-v3", "interleaved_rope = true\n", {"interleaved_rope", "latent attention"});
  refused("phi-4", "fused_mlp = true\n", {"fused_mlp", "fused_projections"});
  refused("relu2-tiny", "fused_mlp = true\n", {"fused_mlp", "gate"});
}

TEST(FamilyChoices, CapsAreRefusedWhereTheyMeanNothing) {
  const auto refused = [](const char* preset, const char* line, std::vector<std::string> parts) {
    expect_refusal([&] { model_from_toml(to_toml(load_model(preset)) + line, "x"); }, parts);
  };
  refused("gpt2-tiny", "attention_cap = 50.0\n", {"caps", "gpt2 family"});
  refused("deepseek-v3", "logits_cap = 30.0\n", {"caps", "latent attention"});
  refused("llama-tiny", "attention_cap = -1.0\n", {"attention_cap = -1", "above 0"});
  refused("llama-tiny", "logits_cap = 41.0\n", {"logits_cap = 41", "up to 40"});
}

TEST(FamilyChoices, AreRefusedWhereTheyMeanNothing) {
  const auto text = [](ModelSpec m, const char* key) { return to_toml(m) + key + " = true\n"; };
  for (const char* key : {"qkv_bias", "qk_norm"}) {
    expect_refusal([&] { model_from_toml(text(load_model("gpt2-tiny"), key), "x"); },
                   {key, "gpt2 family", "give false"});
    expect_refusal([&] { model_from_toml(text(load_model("deepseek-v3"), key), "x"); },
                   {key, "latent attention", "give false"});
  }
}

TEST(FamilyChoices, AnActivationIsRefusedWhereItMeansNothing) {
  const auto text = [](const char* preset) {
    return to_toml(load_model(preset)) + "activation = \"relu2\"\n";
  };
  expect_refusal([&] { model_from_toml(text("gpt2-tiny"), "x"); }, {"activation = \"relu2\"", "gpt2 family"});
  expect_refusal([&] { model_from_toml(text("mixtral-tiny"), "x"); }, {"activation = \"relu2\"", "experts"});
  expect_refusal(
      [] { model_from_toml(to_toml(load_model("llama-tiny")) + "activation = \"tanh\"\n", "x"); },
      {"activation = \"tanh\"", "\"swiglu\", \"geglu\", \"relu\", \"relu2\", \"gelu\" or \"xielu\""});
}

}  // namespace
}  // namespace echelon::families_choices_test
