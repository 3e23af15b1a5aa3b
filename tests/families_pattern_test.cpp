// Models whose layers are of one part each, by a pattern (Nemotron-H).
#include <gtest/gtest.h>

#include <set>

#include "family_runs.h"
#include "refusals.h"

namespace echelon::families_pattern_test {
namespace {

using namespace checks;

// Layers of one part each, of all kinds; tokens may be narrower on their way to the experts, beside two
// groups of state-space heads.
ModelSpec odd_nemotron_h(bool narrower) {
  ModelSpec m = odd_llama(false, 2, 5);
  m.name = "nemotron-h";
  m.layer_pattern = "ME*-E";
  m.rope.unturned_every = 1;
  m.activation = Activation::relu2;
  m.state_space = {4, 3, narrower ? 2 : 1, 5, 3, true, 4, {}};
  m.experts = Experts::deepseek;
  m.num_experts = 4;
  m.experts_per_token = 2;
  m.expert_hidden = 7;
  m.expert_latent = narrower ? 10 : 0;
  m.num_shared_experts = 1;
  m.shared_hidden = 11;
  m.router = {.scores = RouterScores::sigmoid, .scale = 2.5, .groups = 2, .most_groups = 1};
  return m;
}

TEST(NemotronH, GradientsAreTheDerivativesOfTheLoss) {
  for (const bool narrower : {false, true}) {
    ModelSpec model = odd_nemotron_h(narrower);
    model.experts_per_token = model.num_experts;
    model.router.groups = model.router.most_groups = 1;
    expect_derivatives(model);
  }
}

TEST(NemotronH, TomlSaysIt) {
  for (const bool narrower : {false, true}) {
    const ModelSpec model = odd_nemotron_h(narrower);
    expect_toml_says(model);
  }
}

TEST(NemotronH, IsTheSameOnEveryAxis) {
  for (const bool narrower : {false, true})
    for (const Plan& plan : plans_of(odd_nemotron_h(narrower)))
      if (is_taken(8)) expect_verified_and_predicted(plan);
}

// Weight gradients that are left for later, of products of a rank's own rows too.
TEST(NemotronH, IsTheSameWithExpertsElsewhere) {  // long
  const auto plan_of = [](bool narrower, int dp, int tp, int ep) {
    Plan plan = odd_plan(odd_nemotron_h(narrower), dp, tp, tp > 1);
    plan.mesh.ep = ep;
    return plan;
  };
  std::vector<Plan> plans;
  for (const bool narrower : {false, true}) {
    plans.push_back(plan_of(narrower, 2, 2, 2));
    plans.back().balancing = all_losses();
    plans.push_back(plan_of(narrower, 2, 1, 2));
    plans.back().zero = 3;
    plans.back().recompute = Recompute({"experts_in", "attention", "state_space"});
  }
  plans.push_back(plan_of(true, 4, 1, 4));
  plans.back().balancing.capacity = 0.9;
  plans.push_back(plan_of(true, 1, 2, 1));
  plans.back().mesh.set(Axis::pp, 2);
  plans.back().schedule = "zb-h1";
  for (const Plan& plan : plans) expect_verified_and_predicted(plan);
}

// Nor do attention's heads decide over cp where no layer of a pattern has any.
TEST(NemotronH, WithoutAttentionExchangesTheHeadsOfItsStates) {
  ModelSpec model = odd_nemotron_h(false);
  model.layer_pattern = "ME--E";
  model.state_space = {9, 3, 3, 5, 3, true, 4, {}};
  model.max_seq = 24;
  ASSERT_NE(model.num_heads % 3, 0);
  Plan plan = odd_plan(model, 1, 1, false);
  plan.mesh.set(Axis::cp, 3);
  plan.context_kind = ContextKind::ulysses;
  plan.seq_len = 24;
  expect_verified_and_predicted(plan);
}

// Without a gate too what tp cuts is summed in the same blocks, and what own rows are multiplied with is not
// cut.
TEST(NemotronH, HasTheSameBitsUnderInvariantNumerics) {
  for (const bool narrower : {false, true}) {
    ModelSpec model = odd_nemotron_h(narrower);
    model.layer_pattern = "E*-EM";
    model.state_space = {8, 4, 4, 4, 3, true, 4, {}};
    model.num_heads = model.num_kv_heads = 4;
    model.expert_hidden = model.shared_hidden = model.mlp_hidden = 16;
    const auto one = invariant_gradients(model, 1, 1, 4);
    EXPECT_EQ(one, invariant_gradients(model, 2, 1, 1));
    EXPECT_EQ(one, invariant_gradients(model, 1, 2, 2));
  }
}

// What travels to experts is as wide as what they read.
TEST(NemotronH, NarrowerTokensAreLessTraffic) {
  const auto sent = [](const ModelSpec& model) {
    Plan plan = odd_plan(model, 2, 1, false);
    plan.mesh.ep = 2;
    const MovedCopies moved{.forward_sent = 3, .forward_received = 5};
    Traffic traffic;
    add_copies(plan, plan.mesh.coordinates(0), moved, traffic);
    return traffic.at(Axis::ep, Verb::all_to_all).bytes;
  };
  EXPECT_EQ(sent(odd_nemotron_h(false)), 8 * 24 * 8);
  EXPECT_EQ(sent(odd_nemotron_h(true)), 8 * 10 * 8);
}

TEST(NemotronH, LayersHaveTheirOwnParts) {
  const ModelSpec model = odd_nemotron_h(true);
  const auto names_of = [&](std::int64_t layer) {
    std::set<std::string> names;
    for (const ParamSpec& p : block_parameters(model, layer))
      if (p.expert < 1) names.insert(p.name.substr(fmt::format("model.layers.{}.", layer).size()));
    return names;
  };
  EXPECT_EQ(names_of(1),
            (std::set<std::string>{"input_layernorm.weight", "mlp.gate.weight", "mlp.fc1_latent_proj.weight",
                                   "mlp.fc2_latent_proj.weight", "mlp.experts.0.up_proj.weight",
                                   "mlp.experts.0.down_proj.weight", "mlp.shared_experts.up_proj.weight",
                                   "mlp.shared_experts.down_proj.weight"}));
  EXPECT_EQ(names_of(2), (std::set<std::string>{"input_layernorm.weight", "self_attn.q_proj.weight",
                                                "self_attn.k_proj.weight", "self_attn.v_proj.weight",
                                                "self_attn.o_proj.weight"}));
  EXPECT_EQ(names_of(3),
            (std::set<std::string>{"input_layernorm.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}));
  EXPECT_EQ(model.routed_layers(), (std::vector<std::int64_t>{1, 4}));
  std::vector<std::pair<std::string, std::int64_t>> kinds;
  std::int64_t sum = num_parameters(model);
  for (const LayerKind& kind : layer_kinds(model)) kinds.emplace_back(kind.name, kind.count);
  for (const ParamSpec& p : all_parameters(model)) sum -= p.numel();
  EXPECT_EQ(sum, 0);
  EXPECT_EQ(kinds, (std::vector<std::pair<std::string, std::int64_t>>{{"layer with attention", 1},
                                                                      {"layer with an MLP", 1},
                                                                      {"layer with a state space", 1},
                                                                      {"layer with experts", 2}}));
}

TEST(NemotronH, IsRefusedWhereItMeansNothing) {
  const auto refused = [](void (*change)(ModelSpec & m), const std::vector<std::string>& words) {
    ModelSpec model = odd_nemotron_h(true);
    change(model);
    expect_refusal([&] { validate(model); }, words);
  };
  refused([](ModelSpec& m) { m.layer_pattern = "ME*-X"; },
          {"letter 5 of layer_pattern", "M (a state space)"});
  expect_refusal(
      [] {
        std::string text = to_toml(odd_nemotron_h(true));
        model_from_toml(text.replace(text.find("ME*-E"), 5, ""), "x");
      },
      {"layer_pattern = \"\"", "a letter for each layer"});
  refused([](ModelSpec& m) { m.layer_pattern = "ME*"; }, {"layer_pattern has 3 letters", "num_layers = 5"});
  refused([](ModelSpec& m) { m.layer_pattern = "-E*-E"; }, {"no layer with a state space", "ssm_heads = 4"});
  refused([](ModelSpec& m) { m.layer_pattern = "M-*-*"; }, {"no layer with experts", "deepseek"});
  refused([](ModelSpec& m) { m.state_space.attention_layers = {2}; }, {"attention_layers", "layer_pattern"});
  refused([](ModelSpec& m) { m.num_dense_layers = 1; }, {"num_dense_layers", "layer_pattern"});
  refused([](ModelSpec& m) { m.norm_place = NormPlace::both; }, {"norm_place"});
  refused([](ModelSpec& m) { m.num_mtp_layers = 1; }, {"num_mtp_layers", "layer_pattern"});
  refused([](ModelSpec& m) { m.activation = Activation::gelu; }, {"activation = \"gelu\"", "relu2"});
  refused([](ModelSpec& m) { m.shared_gate = true; }, {"shared_gate", "expert_latent = 10"});
  expect_refusal([] { model_from_toml(to_toml(load_model("mixtral-tiny")) + "expert_latent = 8\n", "x"); },
                 {"expert_latent = 8", "deepseek"});
  Plan plan = odd_plan(odd_nemotron_h(true), 1, 1, false);
  plan.model.layer_pattern = "*E*-E";
  plan.model.state_space = {};
  plan.model.tuning.freeze = {"*norm*"};
  expect_refusal([&] { validate(plan); }, {"freeze", "Nemotron-H"});
}

// Heads of attention are those of layers that have it.
TEST(NemotronH, ExchangesNoHeadsOfAttentionThatNoLayerHas) {
  Plan plan = odd_plan(odd_nemotron_h(true), 1, 1, false);
  plan.mesh.set(Axis::cp, 2);
  plan.context_kind = ContextKind::ulysses;
  plan.seq_len = 8;
  plan.model.num_heads = plan.model.num_kv_heads = 3;
  expect_refusal([&] { validate(plan); }, {"3 query and 3 key/value heads", "do not divide"});
  plan.model.layer_pattern = "ME--E";
  validate(plan);
}

}  // namespace
}  // namespace echelon::families_pattern_test
