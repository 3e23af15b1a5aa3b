#include "train/generate.h"

#include <gtest/gtest.h>

#include <set>

#include "checkpoint/finite.h"
#include "context_runs.h"
#include "expert_runs.h"

namespace echelon::generate_test {
namespace {

using namespace checks;

using Tokens = std::vector<std::int32_t>;

// Weights so large that the likeliest token changes from place to place.
ModelSpec lively(ModelSpec model) {
  model.init_std = 0.5;
  model.max_seq = 40;
  return model;
}

// Queries grow with their place.
void grow(RopeSpec& rope) {
  rope.scaling = RopeScaling::yarn;
  rope.factor = 4;
  rope.original_length = 3;
  rope.query_growth = 0.7;
}

// Keys wider than values, of compressed forms; what is not turned of a query grows, too.
ModelSpec latent_llama() {
  ModelSpec m = odd_llama(false, 2);
  m.name = "latent_llama";
  m.num_kv_heads = m.num_heads;
  m.kv_rank = 5;
  m.q_rank = 6;
  m.rotary_dim = 2;
  m.value_head_dim = m.head_dim - 1;
  grow(m.rope);
  return m;
}

// A state goes on from token to token, and queries grow.
ModelSpec delta_llama() {
  ModelSpec m = odd_llama();
  m.name = "delta_llama";
  m.state_space = {4, 3, 2, 5, 3, false, 4, {1}, StateRule::gated_delta};
  m.attention_gate = true;
  grow(m.rope);
  return m;
}

// A convolution sees the last tokens.
ModelSpec convolved_llama() {
  ModelSpec m = odd_llama();
  m.name = "convolved_llama";
  m.short_conv = {3, {1}};
  return m;
}

// Keys and values beside a state.
ModelSpec side_by_side() {
  ModelSpec m = odd_llama();
  m.name = "side_by_side";
  m.state_space = {4, 3, 1, 5, 3, true, 4, {}};
  m.state_space.norm = false;
  m.state_space.beside_attention = true;
  m.scales.state_space = {0.5, 0.75, 1.25, 0.875, 1.125};
  m.scales.mlp_gate = 0.75;
  return m;
}

std::vector<ModelSpec> models() {
  return {lively(odd_gpt2()),         lively(odd_llama()),    lively(odd_gpt2(false)),
          lively(odd_llama(true, 4)), lively(latent_llama()), lively(delta_llama()),
          lively(convolved_llama()),  lively(side_by_side())};
}

const Tokens prompt{3, 52, 0, 17, 8};

// What every rank of the mesh generates; all must agree.
Tokens generate_on(const Plan& plan, const Tokens& from, const GenerateOptions& options) {
  std::vector<Tokens> texts(static_cast<std::size_t>(plan.mesh.num_ranks()));
  on_mesh(plan, [&](const Rank& rank) {
    const Trainer trainer(rank, plan, {}, 1);
    Tokens streamed;
    Tokens& text = texts[static_cast<std::size_t>(rank.index())];
    text = generate(rank, plan, trainer.parameters(), {}, from, options,
                    [&](std::int32_t token) { streamed.push_back(token); });
    EXPECT_EQ(streamed, text);
  });
  for (const Tokens& text : texts) EXPECT_EQ(text, texts[0]) << describe(plan);
  return texts[0];
}

GenerateOptions greedy(std::int64_t max_tokens) {
  GenerateOptions options;
  options.max_tokens = max_tokens;
  options.temperature = 0;
  return options;
}

TEST(Generate, CachedGivesTheTokensOfRecomputingThePrefix) {
  for (const ModelSpec& model : models()) {
    const Plan plan = odd_plan(model, 1, 1, false);
    Tokens prefix = prompt;
    for (int i = 0; i < 20; ++i) prefix.push_back(generate_on(plan, prefix, greedy(1)).at(0));
    const Tokens expected(prefix.begin() + static_cast<std::ptrdiff_t>(prompt.size()), prefix.end());
    EXPECT_GE(std::set<std::int32_t>(expected.begin(), expected.end()).size(), 3u) << "too dull to tell";
    EXPECT_EQ(generate_on(plan, prompt, greedy(20)), expected) << describe(plan);
  }
}

// The likeliest next token is the one that the training forward pass finds likeliest: the loss of each
// candidate as the last target, everything else ignored.
TEST(Generate, AgreesWithTheTrainingForward) {
  for (const ModelSpec& model : models()) {
    Plan plan = odd_plan(model, 1, 1, false);
    plan.global_batch = plan.micro_batch = 1;
    plan.seq_len = static_cast<std::int64_t>(prompt.size());
    std::int32_t likeliest = -1;
    double least = std::numeric_limits<double>::infinity();
    on_mesh(plan, [&](const Rank& rank) {
      Trainer trainer(rank, plan, {}, 1);
      for (std::int32_t candidate = 0; candidate < model.vocab; ++candidate) {
        const double loss =
            trainer.evaluate(1, [&](std::int64_t, std::int64_t, std::int32_t* tokens, std::int32_t* targets) {
              std::copy(prompt.begin(), prompt.end(), tokens);
              std::fill_n(targets, prompt.size(), -1);
              targets[prompt.size() - 1] = candidate;
            });
        if (loss < least) {
          least = loss;
          likeliest = candidate;
        }
      }
    });
    EXPECT_EQ(generate_on(plan, prompt, greedy(1)), Tokens{likeliest}) << describe(plan);
  }
}

TEST(Generate, GivesTheSameTokensOnEveryMesh) {
  GenerateOptions sampled;
  sampled.max_tokens = 20;
  sampled.temperature = 2;
  sampled.top_k = 7;
  for (const ModelSpec& model : models())
    for (const GenerateOptions& options : {greedy(20), sampled}) {
      const Tokens expected = generate_on(odd_plan(model, 1, 1, false), prompt, options);
      EXPECT_EQ(expected.size(), 20u);
      for (auto [dp, tp, sp] :
           {std::tuple{1, 2, false}, {1, 4, false}, {1, 2, true}, {2, 4, true}, {2, 1, false}}) {
        if (!is_taken(3)) continue;
        const Plan plan = odd_plan(model, dp, tp, sp);
        EXPECT_EQ(generate_on(plan, prompt, options), expected) << describe(plan);
      }
    }
}

// Each rank of cp makes all of the text, whose length need not divide over them: 22 tokens, and two.
TEST(Generate, IsNotCutOverContextRanks) {  // long
  std::vector<ModelSpec> all = models();
  all.push_back(lively(even_mixtral(2)));
  // Twice as many positions than there were in the longest sequence, and factors of their own.
  ModelSpec turned = lively(odd_llama());
  turned.rope.scaling = RopeScaling::dynamic;
  turned.rope.factor = 2;
  turned.rope.original_length = 4;
  all.push_back(turned);
  for (const ModelSpec& model : all)
    for (const auto& [from, count] : {std::pair{prompt, 17}, {Tokens{3}, 1}}) {
      const Tokens expected = generate_on(odd_plan(model, 1, 1, false), from, greedy(count));
      for (const ContextCase& c : context_cases(4)) {
        if (!is_taken(4)) continue;
        Plan plan = odd_plan(model, 1, 1, false);
        plan.seq_len = 16;
        plan.mesh.set(Axis::cp, 4);
        plan.context_kind = c.kind;
        plan.context_balance = c.balance;
        plan.ulysses = c.ulysses;
        plan.mesh.ep = model.experts == Experts::none ? 1 : 2;
        try {
          validate(plan);
        } catch (const RequestError&) {
          continue;  // heads that do not divide
        }
        EXPECT_EQ(generate_on(plan, from, greedy(count)), expected) << describe_context(plan);
      }
    }
}

TEST(Generate, DependsOnTheSeedAndOnNothingElse) {
  const Plan plan = odd_plan(lively(odd_llama()), 1, 1, false);
  GenerateOptions options;
  options.max_tokens = 20;
  options.temperature = 2;
  options.top_k = 0;
  const Tokens first = generate_on(plan, prompt, options);
  EXPECT_EQ(generate_on(plan, prompt, options), first);
  options.seed = 2;
  EXPECT_NE(generate_on(plan, prompt, options), first);
  // Sampling from one candidate is choosing the likeliest.
  options.top_k = 1;
  EXPECT_EQ(generate_on(plan, prompt, options), generate_on(plan, prompt, greedy(20)));
}

TEST(Generate, StopsAtTheStopToken) {
  const Plan plan = odd_plan(lively(odd_llama()), 1, 2, true);
  const Tokens whole = generate_on(plan, prompt, greedy(20));
  GenerateOptions options = greedy(20);
  options.stop_tokens = {whole[4]};
  const auto stop = std::find(whole.begin(), whole.end(), whole[4]);
  EXPECT_EQ(generate_on(plan, prompt, options), Tokens(whole.begin(), stop));
}

// The model's last position can be used; one more is refused.
TEST(Generate, FillsThePositionsAndRefusesMore) {
  for (const ModelSpec& model : {lively(odd_gpt2()), lively(odd_llama())}) {
    const Plan plan = odd_plan(model, 1, 2, true);
    EXPECT_EQ(generate_on(plan, prompt, greedy(35)).size(), 35u);
    expect_contains(message_of<RequestError>([&] { generate_on(plan, prompt, greedy(36)); }),
                    {"--max-tokens 36", "5 tokens", "41", "40", model.name});
  }
}

// Numbers that have no order choose nothing, greedily or not, on whichever rank they come to be.
TEST(Generate, WhatIsNotANumberChoosesNoToken) {
  GenerateOptions sampled;
  sampled.max_tokens = 4;
  for (const GenerateOptions& options : {greedy(4), sampled})
    for (auto [tp, pp] : {std::pair{1, 1}, {2, 1}, {1, 2}}) {
      Plan plan = odd_plan(lively(odd_llama()), 1, tp, false);
      plan.mesh.set(Axis::pp, pp);
      std::vector<std::string> messages(static_cast<std::size_t>(plan.mesh.num_ranks()));
      on_mesh(plan, [&, &options = options](const Rank& rank) {
        const Trainer trainer(rank, plan, {}, 1);
        if (const Parameter* norm = trainer.parameters().find_here("model.norm.weight"))
          norm->value.host<double>()[3] = std::numeric_limits<double>::quiet_NaN();
        messages[static_cast<std::size_t>(rank.index())] =
            message_of<NotFinite>([&] { generate(rank, plan, trainer.parameters(), {}, prompt, options); });
      });
      for (const std::string& message : messages)
        expect_contains(message, {"position 5", "NaN or infinite", "odd-llama", "f64"});
    }
}

TEST(Generate, RefusesBadRequests) {
  const Plan plan = odd_plan(lively(odd_gpt2()), 1, 1, false);
  const auto refusal = [&](const Tokens& from, const GenerateOptions& options) {
    return message_of<RequestError>([&] { generate_on(plan, from, options); });
  };
  GenerateOptions options;
  options.max_tokens = 0;
  expect_contains(refusal(prompt, options), {"--max-tokens 0", "at least 1"});
  options = {};
  options.temperature = -0.5;
  expect_contains(refusal(prompt, options), {"--temperature -0.5", "at least 0"});
  options.temperature = std::numeric_limits<double>::quiet_NaN();
  expect_contains(refusal(prompt, options), {"--temperature nan"});
  options = {};
  options.top_k = -1;
  expect_contains(refusal(prompt, options), {"--top-k -1", "at least 0"});
  expect_contains(refusal({3, 53}, greedy(2)), {"token 53", "0 to 52"});
  expect_contains(refusal({-1}, greedy(2)), {"token -1"});
}

}  // namespace
}  // namespace echelon::generate_test
