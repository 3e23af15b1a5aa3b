// Layers with a state space, or the delta rule, in place of attention, and beside it (Falcon-H1).
#include <gtest/gtest.h>

#include <set>

#include "family_runs.h"
#include "refusals.h"

namespace echelon::families_state_space_test {
namespace {

using namespace checks;

// States and convolutions begin anew with each document. Four ranks share the one group, and two each
// key/value head.
TEST(StateSpaces, KeepDocumentsApart) {
  ModelSpec model = odd_llama();
  model.state_space = {4, 3, 1, 5, 3, false, 4, {1}};
  for (const int tp : {1, 4}) {
    Plan plan = odd_plan(model, 2, tp, tp > 1);
    plan.mask = AttentionMask::document;
    plan.document_end = 3;
    expect_verified_and_predicted(plan);
  }
}

// Heads are exchanged over the whole cp group, wherever attention has its tokens: with more and with fewer
// groups than ranks, and documents across ranks. Lengths are no multiple of a chunk.
TEST(StateSpaces, ExchangeHeadsUnderEveryLayoutOfTokens) {  // long
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  for (const std::int64_t groups : {1, 2, 4}) {
    model.state_space = {4, 3, groups, 5, 3, true, 7, {1}};
    expect_every_layout_of_tokens(model, 3);
  }
}

// What is sent: of [z | x | B | C | dt] and of what comes of it, forwards and backwards, all but what stays.
TEST(StateSpaces, SendWhatTheFormulaSays) {
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  for (const std::int64_t groups : {1, 4}) {
    model.num_layers = 1;
    model.state_space = {4, 3, groups, 5, 3, true, 7, {}};
    Plan plan = odd_plan(model, 1, 1, false);
    plan.mesh.set(Axis::cp, 2);
    plan.seq_len = 24;
    plan.global_batch = plan.micro_batch = 2;
    const std::int64_t tokens = 2 * 12, width = 4 * 3,
                       given = 2 * width + 2 * std::max<std::int64_t>(groups, 2) * 5 + 4;
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      const Traffic before = rank.traffic();
      trainer.compute_gradients(0, random_samples(plan));
      EXPECT_EQ((rank.traffic() - before).at(Axis::cp, Verb::all_to_all).bytes,
                8 * 2 * tokens * (given + width) / 2);
    });
  }
}

// Attention's heads decide nothing where no layer has any.
TEST(StateSpaces, WithoutAttentionAreCutByTheirOwnHeads) {
  ModelSpec model = odd_llama();
  model.state_space = {9, 3, 1, 5, 3, true, 4, {}};
  ASSERT_NE(model.num_heads % 3, 0);
  expect_verified_and_predicted(odd_plan(model, 1, 3, false));
}

// Beside experts, with documents: tp ranks that have values of a head of keys share it, and cp ranks.
TEST(StateSpaces, OfTheDeltaRuleHaveTheirAxes) {
  ModelSpec model = odd_llama();
  model.max_seq = 24;
  model.state_space = {4, 3, 2, 5, 3, false, 7, {1}, StateRule::gated_delta};
  model.attention_gate = model.qk_norm = true;
  model.experts = Experts::deepseek;
  model.num_experts = 4, model.experts_per_token = 2, model.expert_hidden = 6;
  model.num_shared_experts = 1, model.shared_gate = true;
  for (const auto& [tp, cp] : {std::pair{1, 1}, {4, 1}, {2, 2}, {1, 4}}) {
    if (!is_taken(2)) continue;
    Plan plan = odd_plan(model, 1, tp, tp > 1);
    plan.mesh.set(Axis::cp, cp);
    plan.seq_len = 24;
    plan.mask = AttentionMask::document;
    plan.document_end = 3;
    expect_verified_and_predicted(plan);
  }
  Plan plan = odd_plan(model, 1, 1, false);
  plan.recompute = Recompute({"gate", "gate_in", "delta_rule", "delta_in"});
  expect_verified_and_predicted(plan);
}

TEST(StateSpaces, OfTheDeltaRuleAreRefusedWhereSomethingIsLeftOut) {
  ModelSpec model = odd_llama();
  model.state_space = {4, 3, 2, 5, 3, false, 4, {0}, StateRule::gated_delta};
  validate(model);
  Plan plan = odd_plan(model, 1, 2, false);
  plan.numerics = Numerics::invariant;
  plan.seq_len = 16, plan.global_batch = 8;
  expect_refusal([&] { validate(plan); }, {"--tp 2", "share a norm", "legal: 1"});
  plan.mesh.set(Axis::tp, 1);
  plan.mesh.set(Axis::cp, 2);
  expect_refusal([&] { validate(plan); }, {"--cp 2", "share a norm", "legal: 1"});
  ModelSpec other = model;
  other.experts = Experts::deepseek;
  other.num_experts = 4, other.experts_per_token = 2, other.expert_hidden = 6;
  validate(other);
  other.num_dense_layers = 1;
  expect_refusal([&] { validate(other); }, {"num_dense_layers", "ssm_heads"});
  other = model;
  other.state_space.state = 1;
  expect_refusal([&] { validate(other); }, {"ssm_state = 1", "2 or more"});
  other = model;
  other.layer_pattern = "M-";
  other.state_space.attention_layers = {};
  expect_refusal([&] { validate(other); }, {"layer_pattern", "gated-delta"});
}

// Two ranks hold each key/value head, and four each group: neighbours of both numbers add up.
TEST(StateSpaces, AndKeysMayBeOnDifferentNumbersOfRanks) {  // long
  ModelSpec model = odd_llama();
  model.hidden = 64, model.head_dim = 8, model.num_heads = 8, model.num_kv_heads = 4;
  model.state_space = {8, 3, 2, 5, 3, true, 4, {1}};
  for (const bool sp : {false, true}) expect_verified_and_predicted(odd_plan(model, 1, 8, sp));
}

// What is said to be legal passes, and what is not said does not.
TEST(StateSpaces, NameEveryLegalDegreeOfTensorParallelism) {
  ModelSpec model = odd_llama();
  model.hidden = 64, model.head_dim = 8, model.num_heads = 8, model.num_kv_heads = 4;
  model.mlp_hidden = 32;
  for (const auto& [heads, groups] : {std::pair{4, 1}, {8, 1}, {12, 1}, {12, 4}, {8, 8}, {24, 3}}) {
    model.state_space = {heads, 3, groups, 5, 3, true, 4, {0}};
    std::vector<std::string> legal, said;
    for (int tp = 1; tp <= 16; ++tp) {
      Plan plan = odd_plan(model, 1, tp, false);
      try {
        validate(plan);
        legal.push_back(std::to_string(tp));
      } catch (const PlanRefusal& refusal) {
        ASSERT_EQ(refusal.field(), "tp");
        said.clear();
        for (const Remedy& one : refusal.remedies()) said.push_back(one.value);
      }
    }
    EXPECT_EQ(said, legal) << heads << " heads of " << groups << " groups";
  }
}

// As torch's Conv1d: weights and bias up to 1 / sqrt(kernel).
TEST(StateSpaces, BeginAsTheirConvolutionsDo) {
  ModelSpec model = odd_llama();
  model.state_space = {4, 3, 1, 5, 3, true, 4, {0}};
  int seen = 0;
  for (const ParamSpec& p : block_parameters(model, 1))
    if (p.name.find("conv1d") != std::string::npos) {
      ++seen;
      EXPECT_EQ(p.init, Init::uniform) << p.name;
      EXPECT_DOUBLE_EQ(p.init_std, 1.0 / 3) << p.name;
    }
  EXPECT_EQ(seen, 6);
}

TEST(StateSpaces, AreRefusedWhereSomethingIsLeftOut) {
  ModelSpec model = odd_llama();
  model.state_space = {4, 3, 1, 5, 3, true, 4, {0}};
  const auto refused_plan = [&](void (*change)(Plan & plan), const std::vector<std::string>& words) {
    Plan plan = odd_plan(model, 1, 2, false);
    change(plan);
    expect_refusal([&] { validate(plan); }, words);
  };
  refused_plan(
      [](Plan& p) {
        p.mesh.set(Axis::cp, 4);
        p.seq_len = 16;
      },
      {"--cp 4", "has 2 heads of 1 group", "legal: 1, 2"});
  refused_plan(
      [](Plan& p) {
        p.mesh.set(Axis::tp, 1);
        p.mesh.set(Axis::cp, 2);
        p.seq_len = 16;
        p.global_batch = 8;
        p.numerics = Numerics::invariant;
      },
      {"--cp 2", "--numerics invariant", "1 group", "legal: 1, or"});
  refused_plan([](Plan& p) { p.numerics = Numerics::invariant; },
               {"--tp 2", "--numerics invariant", "1 block"});
  refused_plan([](Plan& p) { p.model.state_space.heads = 3; }, {"--tp 2", "3 state-space heads", "legal: 1"});
  refused_plan([](Plan& p) { p.precision = recipe("tf32"); }, {"tf32", "state space", "legal: f32"});
  refused_plan([](Plan& p) { p.model.tuning.freeze = {"*norm*"}; }, {"freeze", "state space"});
  model.state_space.attention_layers = {0, 1};
  expect_refusal([&] { validate(model); }, {"attention_layers", "ssm_heads"});
  model.state_space.attention_layers = {1, 0};
  expect_refusal([&] { validate(model); }, {"attention_layers", "rising"});
  model.state_space = {4, 3, 3, 5, 3, true, 4, {0}};
  expect_refusal([&] { validate(model); }, {"ssm_groups = 3", "ssm_heads = 4", "divisor"});
  model.state_space = {4, 3, 1, 5, 3, true, 4, {0}};
  model.window.size = 4;
  expect_refusal([&] { validate(model); }, {"window", "ssm_heads"});
}

// Attention and a state space of one normed value, with a factor of everything that has one.
ModelSpec odd_falcon_h1(bool norm) {
  ModelSpec m = odd_llama();
  m.name = "falcon-h1";
  m.state_space = {4, 3, norm ? 2 : 1, 5, 3, true, 4, {}};
  m.state_space.norm = norm;
  m.state_space.beside_attention = true;
  m.scales.embedding = 3;
  m.scales.logits_divisor = 0.5;
  m.scales.attention = 0.3;
  m.scales.attention_out = 0.75;
  m.scales.state_space_out = 1.25;
  m.scales.mlp_out = 0.8;
  m.scales.mlp_gate = 1.5;
  m.scales.state_space = {0.5, 0.75, 1.25, norm ? 1.0 : 0.875, 1.125};
  return m;
}

TEST(FalconH1, GradientsAreTheDerivativesOfTheLoss) {
  for (const bool norm : {false, true}) expect_derivatives(odd_falcon_h1(norm));
}

TEST(FalconH1, TomlSaysIt) {
  for (const bool norm : {false, true}) {
    const ModelSpec model = odd_falcon_h1(norm);
    expect_toml_says(model);
  }
  expect_contains(to_toml(odd_falcon_h1(false)), {"ssm_beside_attention = true", "ssm_norm = false",
                                                  "ssm_scales = [0.5, 0.75, 1.25, 0.875, 1.125]"});
}

TEST(FalconH1, HasBothPartsInEveryLayer) {
  const ModelSpec model = odd_falcon_h1(false);
  EXPECT_EQ(model.num_attention_layers(), 2);
  EXPECT_EQ(model.num_state_space_layers(), 2);
  ASSERT_EQ(layer_kinds(model).size(), 1u);
  EXPECT_EQ(layer_kinds(model).front().count, 2);
  std::set<std::string> names;
  for (const ParamSpec& p : block_parameters(model, 1)) names.insert(p.name);
  EXPECT_TRUE(names.contains("model.layers.1.self_attn.q_proj.weight"));
  EXPECT_TRUE(names.contains("model.layers.1.mamba.in_proj.dt.weight"));
  EXPECT_FALSE(names.contains("model.layers.1.mamba.norm.weight"));
}

TEST(FalconH1, IsTheSameOnEveryAxis) {
  for (const bool norm : {false, true})
    for (const Plan& plan : plans_of(odd_falcon_h1(norm)))
      if (is_taken(16)) expect_verified_and_predicted(plan);
}

TEST(FalconH1, IsTheSameWithPartsMadeAgain) {
  for (const std::vector<std::string>& ops :
       {std::vector<std::string>{"state_in"}, {"scale", "mlp_in"}, {"attention_in", "state_space"}}) {
    Plan plan = odd_plan(odd_falcon_h1(false), 1, 2, true);
    plan.recompute = Recompute(ops);
    plan.mask = AttentionMask::document;
    plan.document_end = 3;
    expect_verified_and_predicted(plan);
  }
}

TEST(FalconH1, HasTheSameBitsUnderInvariantNumerics) {
  ModelSpec model = odd_falcon_h1(false);
  model.num_heads = model.num_kv_heads = 4;
  model.mlp_hidden = 16;
  model.state_space = {8, 4, 4, 4, 3, true, 4, {}};
  model.state_space.norm = false;
  model.state_space.beside_attention = true;
  const auto one = invariant_gradients(model, 1, 1, 4);
  EXPECT_EQ(one, invariant_gradients(model, 2, 1, 1));
  EXPECT_EQ(one, invariant_gradients(model, 1, 2, 2));
}

TEST(FalconH1, IsRefusedWhereItMeansNothing) {
  const auto refused = [](void (*change)(ModelSpec & m), const std::vector<std::string>& words) {
    ModelSpec model = odd_falcon_h1(false);
    change(model);
    expect_refusal([&] { validate(model); }, words);
  };
  refused([](ModelSpec& m) { m.state_space.attention_layers = {1}; },
          {"ssm_beside_attention", "attention_layers"});
  refused([](ModelSpec& m) { m.mlp_bias = true; }, {"mlp_bias", "ssm_beside_attention"});
  refused([](ModelSpec& m) { m.state_space.beside_attention = false; },
          {"ssm_scales", "ssm_beside_attention"});
  refused([](ModelSpec& m) { m.scales.state_space[2] = 0; }, {"ssm_scales = 0"});
  refused([](ModelSpec& m) { m.state_space.heads = 0; }, {"ssm_heads"});
  expect_refusal([] { model_from_toml(to_toml(load_model("falcon-h1-tiny")) + "ssm_scales = [1.0]\n", "x"); },
                 {"ssm_scales"});
  ModelSpec model = odd_llama();
  model.state_space = {4, 3, 2, 5, 3, false, 4, {0}, StateRule::gated_delta};
  model.state_space.norm = false;
  expect_refusal([&] { validate(model); }, {"ssm_norm", "gated-delta"});
}

}  // namespace
}  // namespace echelon::families_state_space_test
