// Choices that a layer of a Llama's kind has: where they act beside the other ones, and where they are
// refused.
#include <gtest/gtest.h>

#include <functional>
#include <mutex>

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

// Distances are those of positions, whichever of them a rank has; and of heads that are cut twice.
TEST(FamilyAlibi, CountsPositionsInEveryLayoutOfTokens) {
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  model.alibi = true;
  model.window = {5, 2};
  expect_every_layout_of_tokens(model, 3);
}

ModelSpec with_output_bias(ModelSpec model) {
  model.output_bias = true;
  return model;
}

// It is cut as the output matrix is: over tp, and over the pipeline's ranks.
void expect_cut_output_layer_passes(
    const char* schedule, int pp, int dp, int tp, const std::function<void(Plan&)>& change = [](Plan&) {}) {
  Plan plan = odd_plan(with_output_bias(odd_llama(false, 2, 8)), dp, tp, tp > 1);
  plan.mesh.set(Axis::pp, pp);
  plan.schedule = schedule;
  plan.vocabulary_parallel = true;
  plan.micro_batch = 1;
  change(plan);
  expect_verified_and_predicted(plan);
}

TEST(OutputBias, PassesWhereTheOutputLayerIsCut) {
  expect_cut_output_layer_passes("1f1b", 4, 1, 2);
  expect_cut_output_layer_passes("zb-v", 2, 1, 1);
  expect_cut_output_layer_passes("1f1b", 2, 2, 1,
                                 [](Plan& p) { p.zero = 2, p.model.tuning.freeze = {"lm_head.bias"}; });
}

TEST(OutputBias, PassesWhereTheOutputLayerIsCutBesideOtherAxes) {  // long
  expect_cut_output_layer_passes("zb-v", 2, 2, 2, [](Plan& p) { p.zero = 3; });
  expect_cut_output_layer_passes("1f1b", 2, 1, 1, [](Plan& p) { p.mesh.set(Axis::cp, 2), p.seq_len = 12; });
  expect_cut_output_layer_passes("1f1b", 2, 1, 2, [](Plan& p) { p.offload = Offload::both; });
}

// On a rank with both ends it lies beside the table of the embedding, which it is used with.
TEST(OutputBias, PassesBesideATiedMatrix) {  // long
  for (int zero : {0, 1, 2, 3})
    for (int pp : {1, 2}) {
      if (!checks::is_taken(2)) continue;
      Plan plan = odd_plan(with_output_bias(odd_llama(true, 2, 4)), 2, 2, true);
      plan.mesh.set(Axis::pp, pp);
      plan.zero = zero;
      expect_verified_and_predicted(plan);
      plan.schedule = "zb-v";
      if (pp == 2) expect_verified_and_predicted(plan);
    }
  for (const Recompute& recompute : {Recompute::selective, Recompute::full}) {
    Plan plan = odd_plan(with_output_bias(odd_gpt2(true)), 2, 1, false);
    plan.zero = 3;
    plan.recompute = recompute;
    expect_verified_and_predicted(plan);
  }
}

TEST(OutputBias, BesideAdaptersAndFrozenParts) {  // long
  for (const bool tied : {false, true}) {
    const auto passes = [tied](const auto& change) {
      Plan plan = odd_plan(with_output_bias(odd_llama(tied)), 2, 2, true);
      change(plan.model.tuning);
      for (int zero : {0, 3}) {
        plan.zero = zero;
        if (checks::is_taken(2)) expect_verified_and_predicted(plan);
      }
    };
    passes([](FineTuning& t) { t.lora = {2, 4, {}}; });
    passes([](FineTuning& t) { t.freeze = {"lm_head.bias"}; });
    passes([tied](FineTuning& t) { t.freeze = {tied ? "*embed_tokens*" : "lm_head.weight"}; });
    passes([](FineTuning& t) { t.freeze = {"*.weight"}; });
  }
}

TEST(OutputBias, HasTheSameBitsOnEveryMeshUnderInvariantNumerics) {
  const auto gradient = [](bool tied, DType dtype, const auto& change) {
    Plan plan = odd_plan(with_output_bias(odd_llama(tied, 2, 4)), 1, 1, false, dtype);
    plan.model.vocab = 64;
    plan.model.mlp_hidden = 40;
    plan.numerics = Numerics::invariant;
    plan.global_batch = 4;
    plan.micro_batch = 1;
    plan.seq_len = 12;
    change(plan);
    std::vector<double> all(64);
    std::mutex mutex;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      trainer.compute_gradients(0, random_samples(plan));
      const Parameter* const bias = trainer.parameters().find_here("lm_head.bias");
      if (bias == nullptr) return;
      const std::vector<double> here = as_doubles(bias->gradient);
      const std::lock_guard lock(mutex);
      for_each_run(bias->spec, rank.size(Axis::tp), rank.coordinate(Axis::tp),
                   [&](std::int64_t logical, std::int64_t local, std::int64_t n) {
                     std::copy_n(here.begin() + local, n, all.begin() + logical);
                   });
    });
    return all;
  };
  for (const DType dtype : {DType::f64, DType::f32}) {
    if (dtype == DType::f32 && !has_cpu_kernels()) continue;
    for (const bool tied : {false, true}) {
      const auto expected = gradient(tied, dtype, [](Plan&) {});
      EXPECT_NE(expected, std::vector<double>(64));
      const auto same = [&](const auto& change) { EXPECT_EQ(gradient(tied, dtype, change), expected); };
      same([](Plan& p) { p.mesh.set(Axis::tp, 2); });
      same([](Plan& p) { p.mesh.set(Axis::tp, 2), p.sequence_parallel = true, p.mesh.set(Axis::dp, 2); });
      same([](Plan& p) { p.mesh.set(Axis::cp, 2), p.micro_batch = 4; });
      same([](Plan& p) { p.mesh.set(Axis::pp, 2), p.schedule = "zb-h1"; });
      if (tied) continue;
      same([](Plan& p) { p.mesh.set(Axis::pp, 2), p.vocabulary_parallel = true; });
      same([](Plan& p) {
        p.mesh.set(Axis::pp, 2), p.mesh.set(Axis::tp, 2), p.vocabulary_parallel = true;
        p.schedule = "zb-v", p.mesh.set(Axis::dp, 2);
      });
    }
  }
}

TEST(OutputBias, PassesInEveryPrecision) {
  if (!has_cpu_kernels()) GTEST_SKIP() << "this build has no CPU kernels";
  for (const char* precision : {"f32", "bf16", "bf16-lean", "fp8"})
    for (const bool tied : {false, true}) {
      if (!checks::is_taken(2)) continue;
      Plan plan = odd_plan(with_output_bias(odd_llama(tied)), 2, 2, true);
      plan.precision = recipe(precision);
      SCOPED_TRACE(precision);
      VerifyRequest request;
      request.plan = plan;
      request.optimizer.warmup_steps = 0;
      request.optimizer.total_steps = 10;
      request.optimizer.eps = 1e-5;
      request.run.timeout = patience;
      request.steps = 2;
      EXPECT_TRUE(verify(request).pass);
    }
}

TEST(OutputBias, IsAddedBeforeLogitsAreCapped) {
  ModelSpec model = with_output_bias(odd_llama());
  model.caps.logits = 0.75;
  expect_derivatives(model);
}

TEST(OutputBias, IsRefusedBesideOneMoreToken) {
  expect_refusal(
      [] {
        model_from_toml(to_toml(load_model("llama-tiny")) + "num_mtp_layers = 1\noutput_bias = true\n", "x");
      },
      {"num_mtp_layers = 1", "output_bias", "give 0, or false"});
}

// Queries that are not turned would not grow.
TEST(QueryGrowth, IsOfAllLayers) {
  ModelSpec model = odd_llama();
  model.rope.scaling = RopeScaling::yarn;
  model.rope.factor = 4;
  model.rope.original_length = 3;
  model.rope.query_growth = 0.7;
  validate(model);
  model.rope.unturned_every = 2;
  expect_refusal([&] { validate(model); }, {"rope_query_growth = 0.7", "unturned_every = 2", "give 0"});
  model.rope.query_growth = 0;
  validate(model);
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
  refused("gpt2-tiny", "parallel_norms = true\n", {"parallel_norms", "parallel_residual"});
  refused("llama-tiny", "parallel_norms = true\n", {"parallel_norms", "parallel_residual"});
  refused("mixtral-tiny", "parallel_residual = true\nparallel_norms = true\n", {"parallel_norms", "experts"});
  refused("gpt2-tiny", "interleaved_rope = true\n", {"interleaved_rope", "gpt2"});
  refused("llama-tiny", "window = 4\nwindow_full_layers = [1, 1]\n", {"window_full_layers", "rising order"});
  refused("llama-tiny", "window_full_layers = [1]\n", {"window_full_layers", "without a window"});
  refused("llama-tiny", "window = 4\nwindow_full_every = 2\nwindow_full_layers = [1]\n",
          {"window_full_layers", "window_full_every = 2"});
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

TEST(FamilyChoices, AlibiIsRefusedBesideOtherPositions) {
  const auto refused = [](const char* preset, const char* line, const char* part) {
    expect_refusal([&] { model_from_toml(to_toml(load_model(preset)) + "alibi = true\n" + line, "x"); },
                   {"alibi = true", part, "give false"});
  };
  refused("gpt2-tiny", "", "gpt2 family");
  refused("deepseek-v3", "", "latent attention");
  for (const char* line : {"learned_positions = true\n", "rotary_dim = 4\n", "interleaved_rope = true\n",
                           "attention_cap = 5.0\n", "unturned_every = 2\n", "rope_local_theta = 100.0\n"})
    refused("llama-tiny", line, "positions of another kind");
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
  expect_refusal([] { model_from_toml(to_toml(load_model("llama-tiny")) + "activation = \"tanh\"\n", "x"); },
                 {"activation = \"tanh\"",
                  "\"swiglu\", \"geglu\", \"relu\", \"relu2\", \"gelu\", \"gelu_erf\" or \"xielu\""});
}

}  // namespace
}  // namespace echelon::families_choices_test
