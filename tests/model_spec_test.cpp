#include "spec/model_spec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "refusals.h"
#include "temporary_directory.h"

namespace echelon::model_spec_test {
namespace {

void expect_same(const ModelSpec& a, const ModelSpec& b) {
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.family, b.family);
  EXPECT_EQ(a.num_layers, b.num_layers);
  EXPECT_EQ(a.hidden, b.hidden);
  EXPECT_EQ(a.num_heads, b.num_heads);
  EXPECT_EQ(a.num_kv_heads, b.num_kv_heads);
  EXPECT_EQ(a.head_dim, b.head_dim);
  EXPECT_EQ(a.mlp_hidden, b.mlp_hidden);
  EXPECT_EQ(a.vocab, b.vocab);
  EXPECT_EQ(a.max_seq, b.max_seq);
  EXPECT_EQ(a.tied_embedding, b.tied_embedding);
  EXPECT_EQ(a.norm_eps, b.norm_eps);
  EXPECT_EQ(a.rope.theta, b.rope.theta);
  EXPECT_EQ(a.init_std, b.init_std);
  EXPECT_EQ(a.activation, b.activation);
  EXPECT_EQ(a.qkv_bias, b.qkv_bias);
  EXPECT_EQ(a.qk_norm, b.qk_norm);
  EXPECT_EQ(a.experts, b.experts);
  EXPECT_EQ(a.num_experts, b.num_experts);
  EXPECT_EQ(a.experts_per_token, b.experts_per_token);
  EXPECT_EQ(a.router, b.router);
  EXPECT_EQ(a.expert_hidden, b.expert_hidden);
  EXPECT_EQ(a.num_shared_experts, b.num_shared_experts);
  EXPECT_EQ(a.num_dense_layers, b.num_dense_layers);
  EXPECT_EQ(a.kv_rank, b.kv_rank);
  EXPECT_EQ(a.q_rank, b.q_rank);
  EXPECT_EQ(a.rotary_dim, b.rotary_dim);
  EXPECT_EQ(a.value_head_dim, b.value_head_dim);
}

using checks::expect_refusal;

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(ModelSpec, PublishedCountsAreExact) {
  const std::map<std::string, std::int64_t> published{{"gpt2-124m", 124439808},
                                                      {"gpt2-350m", 354823168},
                                                      {"gpt2-774m", 774030080},
                                                      {"gpt2-1.5b", 1557611200},
                                                      {"llama-2-7b", 6738415616},
                                                      {"llama-2-13b", 13015864320},
                                                      {"llama-2-70b", 68976648192},
                                                      {"llama-3-8b", 8030261248},
                                                      {"llama-3-70b", 70553706496},
                                                      {"llama-3-405b", 405853388800},
                                                      {"gpt3-175b", 174604259328},
                                                      {"gpt2-tiny", 578624},
                                                      {"llama-tiny", 402624},
                                                      {"llama-42m", 58073600},
                                                      {"mixtral-8x7b", 46702792704},
                                                      {"mixtral-8x22b", 140620634112},
                                                      {"deepseek-v3", 671026404352},
                                                      {"mixtral-tiny", 674496},
                                                      {"deepseek-tiny", 466112},
                                                      {"deepseek-v3-tiny", 474624},
                                                      {"qwen2-tiny", 403648},
                                                      {"qwen3-tiny", 402880},
                                                      {"relu2-tiny", 312512},
                                                      {"llama-3.1-8b", 8030261248},
                                                      {"llama-3.1-70b", 70553706496},
                                                      {"llama-3.2-1b", 1235814400},
                                                      {"llama-3.2-3b", 3212749824},
                                                      {"llama-3.1-405b", 405853388800},
                                                      {"mistral-7b", 7241732096},
                                                      {"qwen2.5-1.5b", 1543714304},
                                                      {"qwen2.5-7b", 7615616512},
                                                      {"qwen2.5-32b", 32763876352},
                                                      {"qwen2.5-72b", 72706203648},
                                                      {"qwen3-0.6b", 596049920},
                                                      {"qwen3-8b", 8190735360},
                                                      {"phi-4", 14659507200},
                                                      {"qwen3-30b-a3b", 30532122624},
                                                      {"smollm3-3b", 3075098624},
                                                      {"olmo2-7b", 7298617344},
                                                      {"gemma-3-1b", 999885952},
                                                      {"gemma-2-2b", 2614341888},
                                                      {"gemma-2-9b", 9241705984},
                                                      {"gemma-2-27b", 27227128320},
                                                      {"pythia-70m", 70426624},
                                                      {"pythia-160m", 162322944},
                                                      {"pythia-410m", 405334016},
                                                      {"pythia-1b", 1011781632},
                                                      {"pythia-1.4b", 1414647808},
                                                      {"pythia-2.8b", 2775208960},
                                                      {"pythia-6.9b", 6857302016},
                                                      {"pythia-12b", 11846072320},
                                                      {"deepseek-v2-lite", 15706484224},
                                                      {"deepseek-v2", 235741434880},
                                                      {"gpt-oss-20b", 20914757184},
                                                      {"gpt-oss-120b", 116829156672},
                                                      {"gpt-oss-tiny", 385520},
                                                      {"starcoder2-3b", 3030371328},
                                                      {"command-r7b", 8028033024},
                                                      {"glm-4-9b", 9400279040},
                                                      {"olmo-1b", 1176764416},
                                                      {"stablelm-2-1.6b", 1644515328},
                                                      {"qwen1.5-moe-a2.7b", 14315784192},
                                                      {"glm-4.5-air", 106852245504},
                                                      {"glm-4.7-flash", 29943390976},
                                                      {"kimi-k2", 1026408209408},
                                                      {"minimax-m2", 228689748992},
                                                      {"exaone-4-32b", 32003216384},
                                                      {"mistral-small-3.1-24b", 23572403200},
                                                      {"mistral-small-4", 118972826624},
                                                      {"nanochat-d32", 1879048192},
                                                      {"bamba-9b", 9780235392},
                                                      {"bamba-tiny", 448272},
                                                      {"nemotron-h-tiny", 322208},
                                                      {"nemotron-h-8b", 8100852736},
                                                      {"qwen3-next-tiny", 377920},
                                                      {"qwen3-next-80b-a3b", 79674391296},
                                                      {"lfm2-tiny", 201952},
                                                      {"lfm2-350m", 354483968},
                                                      {"lfm2-1.2b", 1170340608},
                                                      {"lfm2-8b-a1b", 8339929856},
                                                      {"falcon-h1-tiny", 242976},
                                                      {"gpt-neo-125m", 125198592},
                                                      {"opt-125m", 125239296},
                                                      {"mamba2-130m", 128989632},
                                                      {"phi-tiny", 432129},
                                                      {"phi-2", 2779683840},
                                                      {"gpt-j-tiny", 430081},
                                                      {"gpt-j-6b", 6050882784},
                                                      {"codegen-350m", 356712448},
                                                      {"falcon-tiny", 361664},
                                                      {"falcon-7b", 6921720704},
                                                      {"bloom-tiny", 416576},
                                                      {"bloom-560m", 559214592},
                                                      {"mpt-7b", 6649286656},
                                                      {"falcon-40b", 41303293952},
                                                      {"nemotron-3-nano-30b-a3b", 31577937344},
                                                      {"nemotron-3-super-120b-a12b", 120668687360}};
  std::set<std::string> names;
  for (const std::string& name : model_preset_names()) names.insert(name);
  for (const auto& [name, count] : published) {
    EXPECT_EQ(num_parameters(load_model(name)), count) << name;
    EXPECT_TRUE(names.contains(name)) << name;
  }
}

// "12.9B", "39B", "37B", "3.6B" and "12.7B" of the papers, which count the embedding as well.
TEST(ModelSpec, ATokenMeetsFewExperts) {
  const auto active = [](const char* name) {
    const ModelSpec m = load_model(name);
    return static_cast<double>(num_active_parameters(m) + m.vocab * m.hidden) / 1e9;
  };
  EXPECT_NEAR(active("mixtral-8x7b"), 12.9, 0.05);
  EXPECT_NEAR(active("mixtral-8x22b"), 39, 0.5);
  EXPECT_NEAR(active("deepseek-v3"), 37, 0.6);
  EXPECT_NEAR(active("nemotron-3-nano-30b-a3b"), 3.6, 0.05);
  EXPECT_NEAR(active("nemotron-3-super-120b-a12b"), 12.7, 0.1);
  const ModelSpec dense = load_model("llama-3-8b");
  EXPECT_EQ(num_active_parameters(dense), num_multiplying_parameters(dense));
}

// Of each token and channel a state is read twice and written once.
TEST(ModelSpec, TheDeltaRuleHasItsOperationsAndKinds) {
  const ModelSpec m = load_model("qwen3-next-80b-a3b");
  EXPECT_NEAR(static_cast<double>(num_active_parameters(m) + m.vocab * m.hidden) / 1e9, 3.9, 0.05);
  const double scans = 3.0 * 36 * (3 * 2 * 4096 * 128 + 2 * 8192 * 4), attention = 6.0 * 12 * 2 * 4096 * 2048;
  EXPECT_NEAR(model_flops_per_token(m, 4096), 6.0 * static_cast<double>(num_active_parameters(m)) + scans + attention,
              1);
  const std::vector<LayerKind> kinds = layer_kinds(m);
  ASSERT_EQ(kinds.size(), 2u);
  EXPECT_EQ(kinds[0].layer, 3);
  EXPECT_EQ(kinds[0].count, 12);
  EXPECT_EQ(kinds[1].layer, 0);
  EXPECT_EQ(kinds[1].count, 36);
}

// Its table and output matrix are the model's; the matrix multiplies once more.
TEST(ModelSpec, OneMoreTokenIsALayerAndWhatMakesItsInput) {
  const ModelSpec model = load_model("deepseek-v3");
  ModelSpec further = model;
  further.num_mtp_layers = 1;
  std::int64_t layer = 0, active = 0;
  for (const ParamSpec& p : block_parameters(model, model.num_layers - 1)) {
    layer += p.numel();
    if (p.multiplies && p.expert < model.experts_per_token) active += p.numel();
  }
  const std::int64_t C = model.hidden;
  EXPECT_EQ(num_parameters(further) - num_parameters(model), layer + 2 * C * C + 3 * C);
  EXPECT_EQ(num_active_parameters(further) - num_active_parameters(model),
            active + 2 * C * C + model.vocab * C);
  const double attention = model_flops_per_token(model, 4096) -
                           6.0 * static_cast<double>(num_active_parameters(model)),
               of_both = model_flops_per_token(further, 4096) -
                         6.0 * static_cast<double>(num_active_parameters(further));
  EXPECT_NEAR(of_both / attention, 62.0 / 61, 1e-12);
}

TEST(ModelSpec, ExpertsComeBack) {
  for (const char* name : {"mixtral-8x7b", "deepseek-v3"}) {
    const ModelSpec m = load_model(name);
    expect_same(model_from_toml(to_toml(m), "there.toml"), m);
    EXPECT_FALSE(m.num_dense_layers > 0 && m.has_experts(0));
    EXPECT_TRUE(m.has_experts(m.num_layers - 1));
  }
  const std::string mixtral = to_toml(load_model("mixtral-8x7b"));
  const auto refused = [&](const char* from, const char* to, const std::vector<std::string>& words) {
    expect_refusal([&] { model_from_toml(replaced(mixtral, from, to), "there.toml"); }, words);
  };
  refused("num_experts = 8", "num_experts = 0", {"there.toml", "num_experts = 0", "from 1 to 4096"});
  refused("experts_per_token = 2", "experts_per_token = 9", {"experts_per_token = 9", "from 1 to 8"});
  refused("router_groups = 1", "router_groups = 3", {"router_groups = 3", "num_experts = 8"});
  refused("router_groups = 1\nrouter_most_groups = 1", "router_groups = 8\nrouter_most_groups = 1",
          {"router_most_groups = 1", "from 2 to 8"});
  refused("router_scores = \"softmax\"", "router_scores = \"relu\"", {"router_scores = \"relu\"", "sigmoid"});
  refused("routed_scale = 1", "routed_scale = 0", {"routed_scale = 0", "above 0"});
  refused("num_dense_layers = 0", "num_dense_layers = 1", {"num_dense_layers = 1", "mixtral"});
  refused("experts = \"mixtral\"", "experts = \"many\"", {"experts = \"many\"", "deepseek"});
  refused("experts = \"mixtral\"", "", {"num_experts = 8", "experts is missing"});
}

TEST(ModelSpec, TinyModelsAreAsDocumented) {
  const ModelSpec gpt2 = load_model("gpt2-tiny"), llama = load_model("llama-tiny");
  EXPECT_EQ(gpt2.family, Family::gpt2);
  EXPECT_EQ(gpt2.vocab, 257);
  EXPECT_EQ(gpt2.num_layers, 6);
  EXPECT_EQ(gpt2.hidden, 64);
  EXPECT_EQ(gpt2.num_heads, 4);
  EXPECT_EQ(gpt2.max_seq, 4096);
  EXPECT_EQ(llama.family, Family::llama);
  EXPECT_EQ(llama.num_layers, 8);
  EXPECT_EQ(llama.num_kv_heads, 2);
  EXPECT_EQ(llama.head_dim, 16);
  EXPECT_EQ(llama.mlp_hidden, 176);
  EXPECT_FALSE(llama.tied_embedding);
}

TEST(ModelSpec, ParametersOfEveryPresetAreConsistent) {
  for (const std::string& preset : model_preset_names()) {
    const ModelSpec m = load_model(preset);
    EXPECT_EQ(m.name, preset);
    std::int64_t sum = 0, multiplying = 0;
    std::set<std::string> names;
    for (const ParamSpec& p : all_parameters(m)) {
      EXPECT_TRUE(names.insert(p.name).second) << p.name;
      sum += p.numel();
      if (p.multiplies) multiplying += p.numel();
      const bool vector = p.shape.size() == 1;
      EXPECT_EQ(p.decay, !vector) << p.name;
      // Sinks are scores, and taps of convolutions begin as torch's.
      const bool taps =
          p.name.find("conv1d") != std::string::npos || p.name.find("conv.conv.") != std::string::npos;
      EXPECT_EQ(p.init != Init::normal, (vector && !p.name.ends_with("sinks")) || taps) << p.name;
      EXPECT_TRUE(p.init != Init::ones || p.name.ends_with("weight") || p.name.ends_with(".D")) << p.name;
      EXPECT_FALSE(vector && p.multiplies) << p.name;
      if (p.shard_dim < 0) {
        EXPECT_TRUE(p.pieces.empty());
        EXPECT_NE(p.rows_are_sequence_sharded, p.tp_partial) << p.name;
        continue;
      }
      EXPECT_FALSE(p.rows_are_sequence_sharded) << p.name;
      std::int64_t length = 0;
      for (const Piece& piece : p.pieces) {
        length += piece.length;
        EXPECT_EQ(piece.length % piece.unit, 0) << p.name;
      }
      EXPECT_EQ(length, p.shape[static_cast<std::size_t>(p.shard_dim)]) << p.name;
    }
    EXPECT_EQ(sum, num_parameters(m));
    EXPECT_EQ(multiplying, num_multiplying_parameters(m));
  }
}

struct Expected {
  const char* name;
  std::vector<std::int64_t> shape;
  int shard_dim;
  std::vector<std::int64_t> units;
};

void expect_parameters(const std::vector<ParamSpec>& list, const std::vector<Expected>& expected) {
  ASSERT_EQ(list.size(), expected.size());
  for (std::size_t i = 0; i < list.size(); ++i) {
    EXPECT_EQ(list[i].name, expected[i].name);
    EXPECT_EQ(list[i].shape, expected[i].shape) << expected[i].name;
    EXPECT_EQ(list[i].shard_dim, expected[i].shard_dim) << expected[i].name;
    std::vector<std::int64_t> units;
    for (const Piece& piece : list[i].pieces) units.push_back(piece.unit);
    EXPECT_EQ(units, expected[i].units) << expected[i].name;
  }
}

TEST(ModelSpec, Gpt2NamesShapesAndCuts) {
  ModelSpec m = load_model("gpt2-tiny");
  expect_parameters(embedding_parameters(m), {{"transformer.wte.weight", {257, 64}, 0, {1}},
                                              {"transformer.wpe.weight", {4096, 64}, -1, {}}});
  expect_parameters(block_parameters(m, 5),
                    {{"transformer.h.5.ln_1.weight", {64}, -1, {}},
                     {"transformer.h.5.ln_1.bias", {64}, -1, {}},
                     {"transformer.h.5.attn.c_attn.weight", {64, 192}, 1, {16, 16, 16}},
                     {"transformer.h.5.attn.c_attn.bias", {192}, 0, {16, 16, 16}},
                     {"transformer.h.5.attn.c_proj.weight", {64, 64}, 0, {16}},
                     {"transformer.h.5.attn.c_proj.bias", {64}, -1, {}},
                     {"transformer.h.5.ln_2.weight", {64}, -1, {}},
                     {"transformer.h.5.ln_2.bias", {64}, -1, {}},
                     {"transformer.h.5.mlp.c_fc.weight", {64, 256}, 1, {1}},
                     {"transformer.h.5.mlp.c_fc.bias", {256}, 0, {1}},
                     {"transformer.h.5.mlp.c_proj.weight", {256, 64}, 0, {1}},
                     {"transformer.h.5.mlp.c_proj.bias", {64}, -1, {}}});
  expect_parameters(head_parameters(m),
                    {{"transformer.ln_f.weight", {64}, -1, {}}, {"transformer.ln_f.bias", {64}, -1, {}}});
  m.tied_embedding = false;
  EXPECT_EQ(head_parameters(m).back().name, "lm_head.weight");
  EXPECT_FALSE(embedding_parameters(m)[0].multiplies);
}

TEST(ModelSpec, LlamaNamesShapesAndCuts) {
  const ModelSpec m = load_model("llama-tiny");
  expect_parameters(embedding_parameters(m), {{"model.embed_tokens.weight", {257, 64}, 0, {1}}});
  expect_parameters(block_parameters(m, 0), {{"model.layers.0.input_layernorm.weight", {64}, -1, {}},
                                             {"model.layers.0.self_attn.q_proj.weight", {64, 64}, 0, {16}},
                                             {"model.layers.0.self_attn.k_proj.weight", {32, 64}, 0, {16}},
                                             {"model.layers.0.self_attn.v_proj.weight", {32, 64}, 0, {16}},
                                             {"model.layers.0.self_attn.o_proj.weight", {64, 64}, 1, {16}},
                                             {"model.layers.0.post_attention_layernorm.weight", {64}, -1, {}},
                                             {"model.layers.0.mlp.gate_proj.weight", {176, 64}, 0, {1}},
                                             {"model.layers.0.mlp.up_proj.weight", {176, 64}, 0, {1}},
                                             {"model.layers.0.mlp.down_proj.weight", {64, 176}, 1, {1}}});
  expect_parameters(head_parameters(m),
                    {{"model.norm.weight", {64}, -1, {}}, {"lm_head.weight", {257, 64}, 0, {1}}});
}

TEST(ModelSpec, ResidualOutputsStartSmaller) {
  for (const char* name : {"gpt2-tiny", "llama-tiny"}) {
    const ModelSpec m = load_model(name);
    const double small = m.init_std / std::sqrt(2.0 * static_cast<double>(m.num_layers));
    for (const ParamSpec& p : block_parameters(m, 1)) {
      if (p.init != Init::normal) continue;
      const bool residual = p.name.find("c_proj") != std::string::npos ||
                            p.name.find("o_proj") != std::string::npos ||
                            p.name.find("down_proj") != std::string::npos;
      EXPECT_DOUBLE_EQ(p.init_std, residual ? small : m.init_std) << p.name;
    }
  }
}

TEST(ModelSpec, FlopsCountTheOutputMatrixButNotTheLookup) {
  const ModelSpec m = load_model("gpt2-124m");
  const std::int64_t multiplying =
      12LL * 12 * 768 * 768 + 50257LL * 768;  // 12 C^2 a layer, and the tied output
  EXPECT_EQ(num_multiplying_parameters(m), multiplying);
  EXPECT_DOUBLE_EQ(model_flops_per_token(m, 1024),
                   6.0 * static_cast<double>(multiplying) + 12.0 * 12 * 768 * 1024 / 2);
  ModelSpec untied = m;
  untied.tied_embedding = false;
  EXPECT_EQ(num_multiplying_parameters(untied), multiplying);
  EXPECT_EQ(num_parameters(untied), num_parameters(m) + 50257LL * 768);
}

TEST(ModelToml, RoundTrip) {
  for (const std::string& name : model_preset_names()) {
    const ModelSpec m = load_model(name);
    expect_same(model_from_toml(to_toml(m), "elsewhere.toml"), m);
  }
  ModelSpec odd = load_model("llama-tiny");
  odd.name = "a \"quoted\" \\ name\n\x7f";
  odd.head_dim = 24;
  odd.norm_eps = 1.0 / 3.0e5;
  odd.rope.theta = 1e6 + 0.1;
  odd.tied_embedding = true;
  expect_same(model_from_toml(to_toml(odd), "x"), odd);
}

const char* small_llama = R"(
family = "llama"
num_layers = 2
hidden = 64
num_heads = 4
mlp_hidden = 128
vocab = 257
max_seq = 256
)";

TEST(ModelToml, DefaultsAndFileName) {
  const ModelSpec m = model_from_toml(small_llama, "some/dir/my-model.toml");
  EXPECT_EQ(m.name, "my-model");
  EXPECT_EQ(m.num_kv_heads, 4);
  EXPECT_EQ(m.head_dim, 16);
  EXPECT_FALSE(m.tied_embedding);
  EXPECT_TRUE(model_from_toml(replaced(small_llama, "llama", "gpt2"), "m.toml").tied_embedding);
}

TEST(ModelToml, EveryMistakeIsNamed) {
  const auto refused = [](const std::string& from, const std::string& to, std::vector<std::string> words) {
    words.push_back("m.toml");
    expect_refusal([&] { model_from_toml(replaced(small_llama, from, to), "m.toml"); }, words);
  };
  refused("vocab", "vocabulary", {"unknown key vocabulary = 257; see docs/families.md"});
  refused("vocab = 257", "vocab_size = 257",
          {"vocab_size = 257 (did you mean vocab?); see docs/"});  // of transformers
  refused("num_layers = 2", "num_hidden_layers = 2", {"num_hidden_layers = 2 (did you mean num_layers?)"});
  refused("vocab = 257", "", {"vocab", "missing"});
  refused("\"llama\"", "\"bert\"", {"family", "bert", "gpt2", "llama"});
  refused("\"llama\"", "3", {"family", "3", "gpt2"});
  refused("num_layers = 2", "num_layers = 2.5", {"num_layers", "2.5", "whole number"});
  refused("num_layers = 2", "num_layers = \"two\"", {"num_layers", "two", "whole number"});
  refused("num_layers = 2", "num_layers = 0", {"num_layers", "0", "1 to"});
  refused("vocab = 257", "vocab = -5", {"vocab", "-5", "1 to"});
  refused("vocab = 257", "vocab = 99999999999", {"vocab", "99999999999", "2147483647"});
  refused("num_heads = 4", "num_heads = 5", {"num_heads", "5", "64"});
  refused("num_heads = 4", "num_heads = 0", {"num_heads", "0"});
  refused("num_heads = 4", "num_heads = 4\nnum_kv_heads = 3", {"num_kv_heads", "3", "num_heads", "4"});
  refused("num_heads = 4", "num_heads = 4\nnum_kv_heads = 8", {"num_kv_heads", "8"});
  refused("num_heads = 4", "num_heads = 4\nhead_dim = 15", {"head_dim", "15", "even"});
  refused("vocab = 257", "vocab = 257\nnorm_eps = -1.0", {"norm_eps", "-1"});
  refused("vocab = 257", "vocab = 257\nnorm_eps = nan", {"norm_eps", "nan"});
  refused("vocab = 257", "vocab = 257\nrope_theta = inf", {"rope_theta", "inf"});
  refused("vocab = 257", "vocab = 257\ninit_std = \"x\"", {"init_std", "x", "a number"});
  refused("vocab = 257", "vocab = 257\ntied_embedding = 1", {"tied_embedding", "1", "true or false"});
  refused("vocab = 257", "vocab = 257\nname = 7", {"name", "7"});
  refused("vocab = 257", "vocab = 257\nvocab = 258", {"line 8"});
  refused("vocab = 257", "vocab = = 257", {"line 7", "TOML"});
  refused("vocab = 257", "vocab = 257\n[more]\nx = [1, 2]", {"more"});
  refused("hidden = 64\nnum_heads = 4\nmlp_hidden = 128",
          "hidden = 2000000000\nnum_heads = 4\nmlp_hidden = 2000000000", {"parameters"});
  refused("hidden = 64\nnum_heads = 4\nmlp_hidden = 128",
          "hidden = 2000000000\nnum_heads = 4\nhead_dim = 2\nmlp_hidden = 2\nnum_mtp_layers = 1",
          {"parameters"});

  const std::string gpt2 = replaced(small_llama, "llama", "gpt2");
  const auto refused_gpt2 = [&](const std::string& extra, const std::vector<std::string>& words) {
    expect_refusal([&] { model_from_toml(gpt2 + extra, "m.toml"); }, words);
  };
  refused_gpt2("num_kv_heads = 2", {"num_kv_heads", "2", "gpt2", "give 4"});
  refused_gpt2("head_dim = 32", {"head_dim", "32", "hidden = 64"});
  refused_gpt2("rope_theta = 10000.0", {"rope_theta", "gpt2"});
}

class ModelFiles : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::string& text) {
    checks::write_text(directory_ / name, text);
    return directory_ / name;
  }
  const checks::TemporaryDirectory directory_;
};

const char* llama_json =
    R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
  "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192,
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
  "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 500000.0, "tie_word_embeddings": false,
  "attention_bias": false, "attention_dropout": 0.0, "torch_dtype": "bfloat16", "vocab_size": 128256})";

const char* gpt2_json = R"({"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
  "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "initializer_range": 0.02,
  "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
  "n_positions": 1024, "resid_pdrop": 0.1, "task_specific_params": {"text-generation": {"do_sample": true}},
  "vocab_size": 50257})";

const char* mistral_json = R"({"model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
  "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
  "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
  "tie_word_embeddings": false, "vocab_size": 32768})";

TEST_F(ModelFiles, LoadsWhatModelNames) {
  const ModelSpec toml = load_model(write("mine.toml", small_llama));
  EXPECT_EQ(toml.name, "mine");
  write("config.json", gpt2_json);
  ModelSpec from_directory = load_model(directory_.path().string());
  EXPECT_EQ(from_directory.name, directory_.path().filename().string());
  from_directory.name = "gpt2-124m";
  expect_same(from_directory, load_model("gpt2-124m"));
  EXPECT_EQ(num_parameters(load_model(directory_ / "config.json")), 124439808);
}

TEST_F(ModelFiles, RefusesWhatItCannotLoad) {
  expect_refusal([] { load_model("no-such-model"); }, {"no-such-model", "help models"});
  expect_refusal([] { load_model("gpt2"); }, {"gpt2-124m", "gpt2-tiny", "did you mean"});
  expect_refusal([] { load_model(""); }, {"preset"});
  // Names on the Hugging Face hub: of what a preset was made of, or nearly so.
  for (const auto& [name, preset] :
       {std::pair{"meta-llama/Llama-3.1-8B", "llama-3.1-8b"},
        {"openai-community/gpt2-xl", "gpt2-1.5b"},
        {"mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"},
        {"meta-llama/Llama-3.1-405B", "llama-3.1-405b"},  // of which two are made
        {"somebody/qwen3_8b", "qwen3-8b"},
        // variants
        {"meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"},
        {"Meta-Llama-3-70B-Instruct", "llama-3-70b"},
        {"mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"},
        {"Qwen/Qwen3-8B-Base", "qwen3-8b"}})
    expect_refusal([&name = name] { load_model(name); },
                   {std::string("--model ") + name, std::string("(did you mean ") + preset + "?)"});
  expect_refusal([this] { load_model(directory_.path().string()); }, {"config.json"});
}

TEST(ModelHuggingFace, Llama) {
  ModelSpec m = model_from_hugging_face(llama_json, "/models/Meta-Llama-3-8B/config.json");
  EXPECT_EQ(m.name, "Meta-Llama-3-8B");
  m.name = "llama-3-8b";
  expect_same(m, load_model("llama-3-8b"));
  EXPECT_EQ(model_from_hugging_face(llama_json, "config.json").name, "llama");
  // What transformers assumes of an older config.
  const std::string older = R"({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_hidden_layers": 32, "max_position_embeddings": 2048, "vocab_size": 32000})";
  m = model_from_hugging_face(older, "a/config.json");
  EXPECT_EQ(num_parameters(m), 6738415616);
  EXPECT_EQ(m.rope.theta, 10000.0);
  EXPECT_EQ(m.norm_eps, 1e-6);
  EXPECT_EQ(m.num_kv_heads, 32);
  EXPECT_EQ(m.init_std, 0.02);
  // transformers 5
  m = model_from_hugging_face(
      replaced(llama_json, "\"rope_theta\": 500000.0",
               R"("rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"})"),
      "a/config.json");
  EXPECT_EQ(m.rope.theta, 500000.0);
  // heads x head_dim need not be the hidden size (Mistral Nemo).
  m = model_from_hugging_face(
      replaced(llama_json, "\"hidden_size\": 4096", "\"hidden_size\": 5120, \"head_dim\": 128"),
      "a/config.json");
  EXPECT_EQ(m.attention_width(), 4096);
  EXPECT_EQ(m.hidden, 5120);
}

TEST(ModelHuggingFace, Mistral) {
  const ModelSpec m = model_from_hugging_face(mistral_json, "x/config.json");
  EXPECT_EQ(num_parameters(m), 7248023552);  // Mistral-7B-v0.3
  EXPECT_EQ(m.rope.theta, 1e6);
  EXPECT_EQ(
      num_parameters(model_from_hugging_face(
          replaced(mistral_json, "\"sliding_window\": null", "\"sliding_window\": 32768"), "x/config.json")),
      7248023552);
}

// Layers with a window are all, all but each n-th, or all but those of a list.
TEST(ModelHuggingFace, Windows) {
  const auto window_of = [](const std::string& layers) {
    const std::string four = replaced(mistral_json, "\"num_hidden_layers\": 32", "\"num_hidden_layers\": 4"),
                      ministral = replaced(four, "\"mistral\"", "\"ministral\"");
    return model_from_hugging_face(
               replaced(ministral, "\"sliding_window\": null", "\"sliding_window\": 4096" + layers),
               "x/config.json")
        .window;
  };
  const auto types = [](const std::vector<bool>& in) {
    std::string list;
    for (const bool windowed : in)
      list +=
          std::string(list.empty() ? "" : ", ") + (windowed ? "\"sliding_attention\"" : "\"full_attention\"");
    return ", \"layer_types\": [" + list + "]";
  };
  EXPECT_EQ(window_of(""), (WindowSpec{4096, 0}));
  EXPECT_EQ(window_of(types({true, false, true, false})), (WindowSpec{4096, 2}));
  EXPECT_EQ(window_of(types({true, true, true, false})), (WindowSpec{4096, 4}));
  EXPECT_EQ(window_of(types({false, false, false, false})), WindowSpec{});
  EXPECT_EQ(window_of(types({false, true, true, true})), (WindowSpec{4096, 4, true}));
  EXPECT_EQ(window_of(types({false, true, false, true})), (WindowSpec{4096, 2, true}));
  EXPECT_EQ(window_of(types({true, false, false, true})), (WindowSpec{4096, 0, false, {1, 2}}));
  EXPECT_EQ(window_of(types({false, false, true, true})), (WindowSpec{4096, 0, false, {0, 1}}));
  for (const std::vector<bool>& other :
       {std::vector<bool>{false, true, true, false, false}, {true, false, true}})
    expect_refusal([&] { window_of(types(other)); }, {"layer_types", "a list of one for each layer"});
}

TEST(ModelHuggingFace, Mixtral) {
  const std::string json = R"({"model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
    "sliding_window": null, "tie_word_embeddings": false, "vocab_size": 32000})";
  ModelSpec m = model_from_hugging_face(json, "mixtral-8x7b/config.json");
  expect_same(m, load_model("mixtral-8x7b"));
  expect_refusal(
      [&] {
        model_from_hugging_face(replaced(json, "\"num_experts_per_tok\": 2", "\"num_experts_per_tok\": 9"),
                                "x/config.json");
      },
      {"experts_per_token = 9", "from 1 to 8"});
}

// Qwen/Qwen2-0.5B; its count is the one published.
TEST(ModelHuggingFace, Qwen2) {
  const char* json =
      R"({"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 131072, "max_window_layers": 24,
    "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936})";
  const ModelSpec m = model_from_hugging_face(json, "qwen/config.json");
  EXPECT_TRUE(m.qkv_bias);
  EXPECT_EQ(num_parameters(m), 494032768);
  const auto refused = [&](const char* from, const char* to, const std::vector<std::string>& words) {
    expect_refusal([&] { model_from_hugging_face(replaced(json, from, to), "qwen/config.json"); }, words);
  };
  const auto windowed = [&](const char* layers) {
    return replaced(replaced(json, "\"use_sliding_window\": false", "\"use_sliding_window\": true"),
                    "\"sliding_window\": 131072, ", "\"sliding_window\": 4096, " + std::string(layers));
  };
  EXPECT_EQ(model_from_hugging_face(windowed(""), "qwen/config.json").window, WindowSpec{});  // of no layer
  EXPECT_EQ(model_from_hugging_face(
                replaced(windowed(""), "\"max_window_layers\": 24", "\"max_window_layers\": 21"),
                "qwen/config.json")
                .window,
            (WindowSpec{
                4096, 0, false, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}}));
  refused("\"num_key_value_heads\": 2", "\"x\": 2", {"num_kv_heads = 32", "num_heads = 14"});  // its default
}

// Qwen/Qwen3-0.6B; its count is the one published.
TEST(ModelHuggingFace, Qwen3) {
  const char* json =
      R"({"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
    "tie_word_embeddings": true, "use_sliding_window": false, "vocab_size": 151936})";
  const ModelSpec m = model_from_hugging_face(json, "qwen/config.json");
  EXPECT_TRUE(m.qk_norm);
  EXPECT_FALSE(m.qkv_bias);
  EXPECT_EQ(num_parameters(m), 596049920);
  const auto changed = [&](const char* from, const char* to) {
    return model_from_hugging_face(replaced(json, from, to), "qwen/config.json");
  };
  const ModelSpec biased = changed("\"attention_bias\": false", "\"attention_bias\": true");
  EXPECT_TRUE(biased.qkv_bias && biased.attention_out_bias);
  EXPECT_EQ(to_toml(changed("\"head_dim\": 128", "\"x\": 128")), to_toml(m));
}

// Qwen2-MoE: a shared width that is whole experts is told as so many.
TEST(ModelHuggingFace, Qwen2MoeSharedExpert) {
  const auto text = [](const std::string& more) {
    return R"({"model_type": "qwen2_moe", "hidden_size": 8, "intermediate_size": 12,
    "max_position_embeddings": 64, "moe_intermediate_size": 6, "num_attention_heads": 2, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 32)" +
           more + "}";
  };
  const auto read = [&](const std::string& more) {
    return model_from_hugging_face(text(more), "x/config.json");
  };
  const ModelSpec whole = read(R"(, "shared_expert_intermediate_size": 24)"),
                  own = read(R"(, "shared_expert_intermediate_size": 20, "qkv_bias": false)");
  EXPECT_TRUE(whole.shared_gate && whole.qkv_bias && !whole.qk_norm && !whole.router.normalise);
  EXPECT_EQ(whole.num_shared_experts, 4);
  EXPECT_EQ(whole.shared_hidden, 0);
  EXPECT_EQ(own.num_shared_experts, 1);
  EXPECT_EQ(own.shared_hidden, 20);
  EXPECT_FALSE(own.qkv_bias);
  EXPECT_EQ(whole.shared_width(), 24);
  EXPECT_EQ(own.shared_width(), 20);
  expect_refusal([&] { read(""); }, {"shared_expert_intermediate_size", "missing"});
  expect_refusal([&] { read(R"(, "use_sliding_window": true)"); }, {"use_sliding_window", "false"});
}

TEST(ModelHuggingFace, SaysWhatATypeHasThatIsNotHere) {
  for (const auto& [type, has] : {std::pair{"t5", "an encoder"},
                                  {"dbrx", "clipped"},
                                  {"mllama", "images in some layers"},
                                  {"persimmon", "LayerNorm of each head"},
                                  {"recurrent_gemma", "linear recurrences"},
                                  {"gemma4", "share keys and values"},
                                  {"laguna", "gates of whole heads"}})
    expect_refusal([t = type] { model_from_hugging_face(fmt::format(R"({{"model_type": "{}"}})", t), "x"); },
                   {type, has, "qwen2_moe"});
}

// Which layers have experts, of four, is said in two ways; where none has, the model has none.
TEST(ModelHuggingFace, Qwen3MoeDenseLayers) {
  const auto read = [](const std::string& layers) {
    return model_from_hugging_face(
        R"({"model_type": "qwen3_moe", "head_dim": 4, "hidden_size": 8, "intermediate_size": 12,
    "max_position_embeddings": 64, "moe_intermediate_size": 6, "num_attention_heads": 2, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 32)" +
            layers + "}",
        "x/config.json");
  };
  for (const auto& [layers, dense] : {std::pair{"", 0},
                                      {R"(, "mlp_only_layers": [1, 0, 0, 7])", 2},
                                      {R"(, "decoder_sparse_step": 4)", 3},
                                      {R"(, "decoder_sparse_step": 2, "mlp_only_layers": [1])", 3},
                                      {R"(, "decoder_sparse_step": 2)", -1},
                                      {R"(, "decoder_sparse_step": 5)", 4},
                                      {R"(, "mlp_only_layers": [3, 2, 1, 0])", 4}}) {
    SCOPED_TRACE(layers);
    if (dense < 0) {
      expect_refusal([&, config = layers] { read(config); }, {"decoder_sparse_step = 2", "first layers"});
      continue;
    }
    const ModelSpec m = read(layers);
    EXPECT_EQ(m.experts, dense == 4 ? Experts::none : Experts::deepseek);
    EXPECT_EQ(m.num_expert_layers(), 4 - dense);
  }
  for (const char* list : {"[1]", "[0,2]", "3", "[\"a\"]"})
    expect_refusal([&] { read(fmt::format(", \"mlp_only_layers\": {}", list)); }, {"mlp_only_layers", list});
}

TEST(ModelHuggingFace, RefusesWhatWouldComputeSomethingElse) {
  const auto refused = [](const std::string& base, const std::string& from, const std::string& to,
                          std::vector<std::string> words) {
    words.push_back("x/config.json");
    expect_refusal([&] { model_from_hugging_face(replaced(base, from, to), "x/config.json"); }, words);
  };
  const std::string llama = llama_json, gpt2 = gpt2_json, mistral = mistral_json;
  refused(llama, "\"rope_scaling\": null", R"("rope_scaling": {"rope_type": "llama3", "factor": 8.0})",
          {"rope_scaling", "low_freq_factor", "missing"});
  refused(llama, "\"rope_scaling\": null", R"("rope_scaling": {"rope_type": "axial", "factor": 8.0})",
          {"rope_type", "axial", "dynamic", "longrope"});
  refused(llama, "\"rope_scaling\": null", R"("rope_scaling": {"rope_type": "dynamic", "factor": 0.5})",
          {"rope_factor", "0.5", "at least 1"});
  refused(llama, "\"rope_theta\": 500000.0", R"("rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"})",
          {"rope_parameters", "factor", "missing"});
  refused(llama, "\"rope_theta\": 500000.0", R"("rope_parameters": 3)", {"rope_parameters", "3"});
  refused(llama, "\"rope_theta\": 500000.0", R"("partial_rotary_factor": 0.5)",
          {"partial_rotary_factor", "0.5"});
  refused(llama, "\"attention_bias\": false", "\"attention_bias\": 1", {"attention_bias", "true or false"});
  refused(llama, "\"model_type\": \"llama\"", "\"model_type\": \"phi3\", \"mlp_bias\": true",
          {"mlp_bias", "true", "false"});
  refused(llama, "\"attention_dropout\": 0.0", "\"attention_dropout\": 0.1", {"attention_dropout", "0.1"});
  refused(llama, "silu", "gelu", {"hidden_act", "gelu", "silu"});
  refused(llama, "\"pretraining_tp\": 1", R"("layer_types": ["full_attention", "sliding_attention"])",
          {"layer_types"});
  refused(gpt2, "gelu_new", "tanh", {"activation_function", "tanh", "gelu_new", "gelu_pytorch_tanh", "relu"});
  refused(gpt2, "\"n_ctx\": 1024", "\"scale_attn_by_inverse_layer_idx\": true",
          {"scale_attn_by_inverse_layer_idx"});
  refused(gpt2, "\"n_ctx\": 1024", "\"scale_attn_weights\": false", {"scale_attn_weights", "only true"});
  refused(gpt2, "\"n_ctx\": 1024", "\"add_cross_attention\": true", {"add_cross_attention"});
  for (const char* type : {"kimi_linear", "bert"}) {
    refused(llama, "\"model_type\": \"llama\"", fmt::format("\"model_type\": \"{}\"", type),
            {"model_type", type});
  }
  refused(llama, "\"model_type\": \"llama\"", "\"model_type\": \"deepseek_v3\"",
          {"kv_lora_rank", "missing"});
  refused(llama, "\"model_type\": \"llama\"", "\"model_type\": \"mixtral\"",
          {"num_local_experts", "missing"});
  refused(llama, "\"model_type\": \"llama\",", "", {"model_type", "missing"});
  refused(llama, "\"hidden_size\": 4096,", "", {"hidden_size", "missing"});
  refused(llama, "\"hidden_size\": 4096", "\"hidden_size\": \"big\"", {"hidden_size", "big", "whole number"});
  refused(llama, "\"hidden_size\": 4096", "\"hidden_size\": 4096.5", {"hidden_size", "4096.5"});
  refused(llama, "\"hidden_size\": 4096", "\"hidden_size\": 18446744073709551615",
          {"hidden_size", "whole number"});
  refused(llama, "\"hidden_size\": 4096", "\"hidden_size\": -4096", {"hidden_size", "-4096"});
  refused(llama, "\"hidden_size\": 4096", "\"hidden_size\": 4095", {"hidden_size", "4095", "32"});
  refused(llama, "\"num_key_value_heads\": 8", "\"num_key_value_heads\": 7", {"num_kv_heads", "7", "32"});
  refused(llama, "1e-05", "\"tiny\"", {"rms_norm_eps", "tiny"});
  refused(llama, "\"tie_word_embeddings\": false", "\"tie_word_embeddings\": 0",
          {"tie_word_embeddings", "true or false"});
  refused(llama, "{\"arch", "\"arch", {"not JSON"});
  expect_refusal([] { model_from_hugging_face("[1, 2]", "x/config.json"); },
                 {"x/config.json", "not a JSON object"});
  expect_refusal([] { model_from_hugging_face("", "x/config.json"); }, {"not JSON"});
}

}  // namespace
}  // namespace echelon::model_spec_test
