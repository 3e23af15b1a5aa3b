// Configurations of transformers: what a config.json is read as, and what is written in one.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/atomic_file.h"
#include "base/open_file.h"
#include "checkpoint/hugging_face.h"
#include "mesh_runs.h"
#include "refusals.h"
#include "spec/model_spec.h"

namespace echelon::hugging_face_config_test {
namespace {

using namespace checks;
namespace fs = std::filesystem;
using nlohmann::json;

const fs::path fixtures = fs::path(ECHELON_SOURCE_DIR) / "tests/fixtures/hugging_face";

// Some keys have two names, of which either will do.
TEST(HuggingFaceConfig, KeysHaveBothTheirNames) {
  for (const auto& [fixture, name, other] : {std::tuple{"gpt2", "n_head", "num_attention_heads"},
                                             {"gpt-neo", "num_layers", "num_hidden_layers"},
                                             {"codegen", "n_embd", "hidden_size"},
                                             {"mixtral", "num_local_experts", "num_experts"},
                                             {"deepseek-v3", "n_routed_experts", "num_local_experts"},
                                             {"glm4-moe-lite", "qk_rope_head_dim", "head_dim"},
                                             {"granite-hybrid", "layer_types", "layers_block_type"},
                                             {"internlm3", "attention_bias", "qkv_bias"},
                                             {"hunyuan-moe", "moe_topk", "num_experts_per_tok"}}) {
    json config = json::parse(read_text((fixtures / fixture / "config.json").string()));
    const std::string usual = to_toml(model_from_hugging_face(config.dump(), "x/config.json"));
    const json value = config.at(name);
    config[other] = value;
    EXPECT_EQ(to_toml(model_from_hugging_face(config.dump(), "x/config.json")), usual) << fixture;
    config.erase(name);
    EXPECT_EQ(to_toml(model_from_hugging_face(config.dump(), "x/config.json")), usual) << fixture;
    config[name] = 1;
    config[other] = 2;
    expect_refusal([&] { model_from_hugging_face(config.dump(), "x/config.json"); },
                   {"x/config.json", other, name});
  }
}

// Not by a key of the type's, which nobody wrote.
TEST(HuggingFaceConfig, AWindowThatATypeHasNoPlaceForIsRefusedByItsName) {
  ModelSpec model = load_model("qwen1.5-moe-a2.7b");
  (void)hugging_face_config(model, DType::f32);
  model.window.size = 8;
  expect_refusal([&] { (void)hugging_face_config(model, DType::f32); },
                 {"window = 8 cannot be said in a qwen2_moe configuration", "legal: a model without it"});
}

// A key that is nearly one which is missing would leave the model what its type is without it.
TEST(HuggingFaceConfig, AMisspeltKeyIsRefused) {
  for (const auto& [fixture, name, written] :
       {std::tuple{"llama", "num_key_value_heads", "num_key_value_head"},
        {"llama", "rms_norm_eps", "rms_norm_esp"},
        {"llama-tied", "tie_word_embeddings", "tied_word_embedding"},
        {"mistral", "sliding_window", "slidingwindow"},
        {"gpt-neox", "use_parallel_residual", "use_parallel_residuals"},
        {"cohere2-moe", "logit_scale", "logits_scale"},
        {"qwen3-5-moe", "shared_expert_intermediate_size", "shared_experts_intermediate_size"}}) {
    json config = json::parse(read_text((fixtures / fixture / "config.json").string()));
    const json value = config.at(name);
    config[written] = value;
    EXPECT_NO_THROW(model_from_hugging_face(config.dump(), "x/config.json")) << fixture;  // beside the other
    config.erase(name);
    expect_refusal([&] { model_from_hugging_face(config.dump(), "x/config.json"); }, {"x/config.json", name});
  }
  json config = json::parse(read_text((fixtures / "qwen2-yarn/config.json").string()));
  json& rope = config.at(config.contains("rope_parameters") ? "rope_parameters" : "rope_scaling");
  rope["original_max_position_embedding"] = rope.at("original_max_position_embeddings");
  rope.erase("original_max_position_embeddings");
  expect_refusal([&] { model_from_hugging_face(config.dump(), "x/config.json"); },
                 {"x/config.json, rope_", "did you mean original_max_position_embeddings?"});
  // What no type reads is left alone, and so is what transformers keeps for itself.
  config = json::parse(read_text((fixtures / "gemma3/config.json").string()));
  config["head_dims_of_images"] = 3;
  config["_sliding_window_pattern"] = 6;
  EXPECT_NO_THROW(model_from_hugging_face(config.dump(), "x/config.json"));
}

// So are those of other programs, where transformers' own is missing.
TEST(HuggingFaceConfig, KeysOfOtherProgramsAreRefused) {
  const json llama = json::parse(read_text((fixtures / "llama" / "config.json").string()));
  for (const auto& [name, written] : {std::pair{"num_key_value_heads", "num_kv_heads"},
                                      {"num_key_value_heads", "n_kv_heads"},
                                      {"num_attention_heads", "n_heads"},
                                      {"num_hidden_layers", "n_layers"},
                                      {"hidden_size", "dim"},
                                      {"intermediate_size", "hidden_dim"},
                                      {"rms_norm_eps", "norm_eps"}}) {
    json config = llama;
    config[written] = 7;  // beside its own it is left alone, as in transformers
    EXPECT_EQ(to_toml(model_from_hugging_face(config.dump(), "x/config.json")),
              to_toml(model_from_hugging_face(llama.dump(), "x/config.json")));
    config[written] = config.at(name);
    config.erase(name);
    expect_refusal([&] { model_from_hugging_face(config.dump(), "x/config.json"); },
                   {"x/config.json", std::string(written) + " = ",
                    std::string("is not read (did you mean ") + name + "?)"});
  }
}

// An empty rope_scaling says nothing: what is beside it does.
TEST(HuggingFaceConfig, AnEmptyScalingLeavesPositionsToTheOtherKey) {
  json config = json::parse(read_text((fixtures / "hunyuan/config.json").string()));
  const ModelSpec larger = model_from_hugging_face(config.dump(), "x/config.json");
  EXPECT_GT(larger.rope.theta, 1e6);
  config["rope_scaling"] = json::object();
  EXPECT_EQ(to_toml(model_from_hugging_face(config.dump(), "x/config.json")), to_toml(larger));
  // Where that says nothing either positions are as the type has them.
  config = json::parse(read_text((fixtures / "gpt-oss/config.json").string()));
  config.erase("rope_parameters");
  config["rope_scaling"] = json::object();
  EXPECT_EQ(model_from_hugging_face(config.dump(), "x/config.json").rope.factor, 32);
  for (const auto& [fixture, factor] : {std::pair{"cwm", 16}, {"apertus", 8}}) {
    config = json::parse(read_text((fixtures / fixture / "config.json").string()));
    config["rope_parameters"] = nullptr;
    config["rope_scaling"] = json::object();
    EXPECT_EQ(model_from_hugging_face(config.dump(), "x/config.json").rope.factor, factor);
  }
}

// What new weights are drawn by.
TEST(HuggingFaceConfig, OfAnOptTheSpreadOfWeightsHasANameOfItsOwn) {
  json config = json::parse(read_text((fixtures / "opt/config.json").string()));
  const ModelSpec model = model_from_hugging_face(config.dump(), "x/config.json");
  EXPECT_EQ(model.init_std, 0.1);
  const json written = json::parse(hugging_face_config(model, DType::f32));
  EXPECT_EQ(written["init_std"], 0.1);
  EXPECT_FALSE(written.contains("initializer_range"));
}

// Of transformers 5.24. Sizes so large that a window shows, and that heads divide them.
TEST(HuggingFaceConfig, KeysThatAreMissingAreAsTheTypeHasThem) {
  const auto heads = [](int kv, int width) { return json{{"num_key_value_heads", kv}, {"head_dim", width}}; };
  const auto kv_heads = [](int kv) { return json{{"num_key_value_heads", kv}}; };
  const json window{{"sliding_window", 4096}};
  json gemma = heads(4, 256), llama3{{"rope_type", "llama3"},   {"rope_theta", 1e6},
                                     {"factor", 16.0},          {"low_freq_factor", 1.0},
                                     {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 8192}};
  gemma.update({{"sliding_window", 4096}, {"query_pre_attn_scalar", 256}});
  json apertus = llama3;
  apertus.update({{"rope_theta", 12e6}, {"factor", 8.0}});
  const json ministral3{{"rope_type", "yarn"},
                        {"rope_theta", 1e6},
                        {"factor", 16.0},
                        {"beta_fast", 32.0},
                        {"beta_slow", 1.0},
                        {"mscale", 1.0},
                        {"mscale_all_dim", 1.0},
                        {"original_max_position_embeddings", 16384},
                        {"llama_4_scaling_beta", 0.1}},
      mistral4{{"rope_type", "yarn"},
               {"rope_theta", 1e4},
               {"factor", 128.0},
               {"beta_fast", 32.0},
               {"beta_slow", 1.0},
               {"mscale", 1.0},
               {"mscale_all_dim", 1.0},
               {"original_max_position_embeddings", 8192},
               {"llama_4_scaling_beta", 0.1}},
      gpt_oss{{"rope_type", "yarn"},
              {"rope_theta", 150000.0},
              {"factor", 32.0},
              {"beta_fast", 32.0},
              {"beta_slow", 1.0},
              {"truncate", false},
              {"original_max_position_embeddings", 4096}};
  for (const auto& [fixture, defaults] : std::vector<std::pair<const char*, json>>{
           {"afmoe", {{"head_dim", 128}, {"sliding_window", 1024}}},
           {"apertus", {{"rope_parameters", apertus}}},
           {"bamba", kv_heads(8)},
           {"bamba", {{"mamba_d_state", 256}}},
           {"cohere2", window},
           {"cohere2-moe", {{"head_dim", 128}, {"sliding_window", 4096}}},
           {"cwm", heads(8, 128)},
           {"cwm", {{"sliding_window", 8192}, {"rope_parameters", llama3}}},
           {"dots1", kv_heads(32)},
           {"ernie4-5", heads(2, 128)},
           {"ernie4-5-moe", kv_heads(4)},
           {"exaone", kv_heads(8)},
           {"exaone4", kv_heads(32)},
           {"exaone4", window},
           {"exaone-moe", kv_heads(32)},
           {"exaone-moe", window},
           {"falcon-h1", kv_heads(8)},
           {"falcon-h1", {{"mamba_d_state", 256}}},
           {"gemma", heads(16, 256)},
           {"gemma2", gemma},
           {"gemma3", gemma},
           {"glm", heads(2, 128)},
           {"glm4", heads(2, 128)},
           {"glm4-moe", kv_heads(8)},
           {"gpt-oss", heads(8, 64)},
           {"gpt-oss", {{"sliding_window", 128}, {"rope_parameters", gpt_oss}}},
           {"granite-swa", kv_heads(4)},
           {"granite-swa", {{"sliding_window", 128}}},
           {"granite-hybrid", {{"mamba_d_state", 256}}},
           {"hy-v3", heads(8, 128)},
           {"hy-v3", {{"initializer_range", 0.006}}},
           {"internlm3", heads(2, 128)},
           {"lfm2", kv_heads(8)},
           {"lfm2-moe", kv_heads(8)},
           {"mamba2", {{"initializer_range", 0.1}}},
           {"mellum", heads(4, 128)},
           {"mellum", {{"sliding_window", 1024}}},
           {"minimax-m2", heads(8, 128)},
           {"ministral", kv_heads(8)},
           {"ministral", window},
           {"ministral3", heads(8, 128)},
           {"ministral3", {{"rope_parameters", ministral3}}},
           {"mistral4", {{"rope_parameters", mistral4}}},
           {"mistral", kv_heads(8)},
           {"mistral", window},
           {"mixtral", kv_heads(8)},
           {"nemotron", {{"initializer_range", 0.0134}}},
           {"nemotron-h", {{"ssm_state_size", 128}}},
           {"nemotron-h", {{"head_dim", 128}}},
           {"olmo3", window},
           {"qwen2-yarn", kv_heads(32)},
           {"qwen2-window", window},
           {"qwen2-window", {{"max_window_layers", 28}, {"layer_types", nullptr}}},
           {"qwen2-moe", kv_heads(16)},
           {"qwen3", heads(32, 128)},
           {"qwen3-moe", kv_heads(4)},
           {"qwen3-next", heads(2, 256)},
           {"qwen3-5", heads(4, 256)},
           {"qwen3-5-moe", heads(2, 256)},
           {"sarvam-moe", heads(4, 64)},
           {"sarvam-moe",
            {{"initializer_range", 0.006}, {"routed_scaling_factor", 2.5}, {"use_qk_norm", true}}},
           {"sarvam-moe", {{"rope_parameters", {{"rope_theta", 8e6}}}, {"rms_norm_eps", 1e-6}}},
           {"seed-oss", heads(8, 128)},
           {"smollm3", kv_heads(4)},
           {"solar-open", heads(8, 128)},
           {"stablelm", kv_heads(32)},
           {"starcoder2", kv_heads(2)},
           {"starcoder2", {{"initializer_range", 0.018042}}},
           {"vaultgemma", gemma},
           {"youtu", {{"initializer_range", 2 / std::sqrt(5 * 24.0)}}},
       }) {
    SCOPED_TRACE(std::string(fixture) + " " + defaults.dump());
    json config = json::parse(read_text((fixtures / fixture / "config.json").string()));
    const json as_it_was = config;
    config["max_position_embeddings"] = 100000;
    if (defaults.contains("num_key_value_heads")) {
      config["num_attention_heads"] = 160;
      config["hidden_size"] = 160 * 20;
      if (config["model_type"] == "bamba") config.update({{"mamba_n_heads", 800}, {"mamba_d_head", 8}});
    }
    config.update(defaults);
    const std::string said = to_toml(model_from_hugging_face(config.dump(), "x/config.json"));
    for (const auto& [key, value] : defaults.items()) {
      EXPECT_TRUE(as_it_was.contains(key) || key == "use_qk_norm") << key;
      config.erase(key);
    }
    EXPECT_EQ(to_toml(model_from_hugging_face(config.dump(), "x/config.json")), said);
  }
}

// Heads are as wide as the sizes say: transformers would turn a part of another width.
TEST(HuggingFaceConfig, NeoxHasNoOtherWidthOfHeads) {
  json config = json::parse(read_text((fixtures / "gpt-neox/config.json").string()));
  const std::string usual = to_toml(model_from_hugging_face(config.dump(), "x/config.json"));
  const int width = config["hidden_size"].get<int>() / config["num_attention_heads"].get<int>();
  config["head_dim"] = width;
  EXPECT_EQ(to_toml(model_from_hugging_face(config.dump(), "x/config.json")), usual);
  config["head_dim"] = 2 * width;
  expect_refusal([&] { model_from_hugging_face(config.dump(), "x/config.json"); },
                 {"head_dim", std::to_string(width)});
}

// What else a type can be asked for than its fixture is: it is written as that type again.
TEST(HuggingFaceConfig, IsOfTheTypeThatSaysTheModel) {
  const auto changed = [](const char* fixture, const json& changes) {
    json config = json::parse(read_text((fixtures / fixture / "config.json").string()));
    for (const auto& [key, value] : changes.items())
      if (value == "left out")
        config.erase(key);
      else
        config[key] = value;
    return config;
  };
  const auto written = [&](const char* fixture, const json& changes) {
    const ModelSpec model = model_from_hugging_face(changed(fixture, changes).dump(), "x/config.json");
    const std::string config = hugging_face_config(model, DType::f32);
    EXPECT_EQ(to_toml(model_from_hugging_face(config, "x/config.json")), to_toml(model)) << fixture;
    return json::parse(config)["model_type"].get<std::string>();
  };
  const json full{"full_attention", "full_attention"}, sliding{"sliding_attention", "sliding_attention"},
      mixed{"sliding_attention", "full_attention"};
  EXPECT_EQ(written("olmo3", {{"layer_types", full}}), "olmo3");
  EXPECT_EQ(written("gemma3", {{"layer_types", "left out"}}),
            "gemma3_text");  // of two layers, with a window each
  EXPECT_EQ(written("seed-oss", {{"hidden_size", 22}, {"attention_out_bias", true}}), "seed_oss");
  EXPECT_EQ(written("ministral", {{"layer_types", sliding}}), "mistral");
  for (const char* fixture : {"ministral", "qwen2-window", "qwen3", "gemma2", "gemma3", "olmo3"})
    written(fixture,
            {{"num_hidden_layers", 4},
             {"use_sliding_window", true},
             {"sliding_window", 5},
             {"layer_types", {"full_attention", "sliding_attention", "full_attention", "full_attention"}}});
  EXPECT_EQ(written("qwen2-window",
                    {{"layer_types", "left out"}, {"num_hidden_layers", 4}, {"max_window_layers", 2}}),
            "qwen2");
  EXPECT_EQ(written("exaone4", {{"sliding_window", nullptr}, {"layer_types", full}}), "exaone4");
  EXPECT_EQ(written("exaone4", {{"sliding_window", 1000}}), "exaone4");
  EXPECT_EQ(written("exaone4", {{"layer_types", "left out"}, {"sliding_window_pattern", 2}}), "exaone4");
  EXPECT_EQ(written("exaone-moe", {{"mlp_layer_types", {"sparse", "sparse"}}, {"first_k_dense_replace", 0}}),
            "exaone_moe");
  EXPECT_EQ(written("exaone-moe", {{"mlp_layer_types", "left out"}, {"first_k_dense_replace", 0}}),
            "exaone_moe");
  EXPECT_EQ(written("exaone-moe", {{"layer_types", sliding}}), "exaone_moe");
  EXPECT_EQ(written("exaone-moe", {{"layer_types", "left out"}, {"sliding_window_pattern", 4}}),
            "exaone_moe");
  EXPECT_EQ(written("hunyuan-moe", {{"moe_topk", {2, 2}}}), "hunyuan_v1_moe");
  EXPECT_EQ(
      written("internlm3",
              {{"qkv_bias", true}, {"bias", true}, {"attention_bias", "left out"}, {"mlp_bias", "left out"}}),
      "llama");
  for (const char* kind : {"linear", "dynamic", "yarn"})
    EXPECT_EQ(written("gpt-neox",
                      {{"rope_parameters", {{"rope_type", kind}, {"factor", 4.0}}}, {"rotary_pct", 1.0}}),
              "gpt_neox");
  EXPECT_EQ(written("apertus", {{"attention_bias", true}}), "apertus");
  EXPECT_EQ(written("gemma", {{"attention_bias", true}}), "gemma");
  EXPECT_EQ(written("qwen3-5", {{"attention_bias", true}}), "qwen3_5_text");
  EXPECT_EQ(written("qwen3-next", {{"attention_bias", true}}), "qwen3_next");
  EXPECT_EQ(written("hy-v3", {{"attention_bias", true}}), "hy_v3");
  EXPECT_EQ(written("hy-v3", {{"attention_bias", false}}), "glm4_moe");
  EXPECT_EQ(written("granite-moe", {{"attention_dropout", 0.1}}), "granitemoe");
  EXPECT_EQ(written("granite-moe-hybrid", {{"attention_dropout", 0.1}}), "granitemoehybrid");
  EXPECT_EQ(written("minimax-m2", {{"rope_parameters", "left out"}, {"rotary_dim", 2}}), "minimax_m2");
  EXPECT_EQ(written("deepseek-v3", {{"model_type", "kimi_k2"}}), "deepseek_v3");
  EXPECT_EQ(written("nemotron-h", {{"layers_block_type", {"linear_attention", "linear_attention"}}}),
            "nemotron_h");
  EXPECT_EQ(written("glm4-moe-lite", {{"hidden_size", 26}}), "deepseek_v3");
  EXPECT_EQ(written("granite-hybrid", {{"layer_types", {"attention", "attention", "attention"}}}),
            "granitemoehybrid");
  EXPECT_EQ(written("glm4-moe-lite", {{"mlp_layer_types", {"sparse", "sparse"}}}), "deepseek_v3");
  EXPECT_EQ(written("phi", {{"num_key_value_heads", nullptr}, {"resid_pdrop", 0.1}}), "phi");
  EXPECT_EQ(written("gpt-j", {{"rotary_dim", 6}, {"n_inner", nullptr}}), "gptj");
  EXPECT_EQ(written("falcon", {{"num_kv_heads", 4}, {"max_position_embeddings", "left out"}}), "falcon");
  EXPECT_EQ(written("falcon", {{"parallel_attn", false}}), "falcon");
  EXPECT_EQ(written("falcon-grouped", {{"num_ln_in_parallel_attn", 1}}), "falcon");
  EXPECT_EQ(written("falcon-grouped", {{"num_kv_heads", 1}, {"num_ln_in_parallel_attn", 1}}), "falcon");
  EXPECT_EQ(written("falcon-grouped", {{"num_kv_heads", 4}}), "falcon");
  for (const char* fixture : {"bloom", "bloom-untied"})
    EXPECT_EQ(written(fixture, {{"n_embed", 24}, {"hidden_size", "left out"}, {"seq_length", 7}}), "bloom");
  EXPECT_EQ(written("mpt", {{"attn_config", nullptr}}), "mpt");
  EXPECT_EQ(written("mpt", {{"attn_config", {{"softmax_scale", nullptr}}}, {"n_heads", 5}, {"d_model", 30}}),
            "mpt");
  // Which layers have a window by default is said layer by layer: of few layers another rule says it too.
  for (const char* fixture : {"cwm", "gemma2", "gemma3", "vaultgemma", "olmo3", "gpt-oss", "granite-swa"})
    for (const int layers : {1, 2, 3, 6})
      for (const int window : {5, 1000})
        written(fixture, {{"layer_types", "left out"},
                          {"layer_rope_theta", "left out"},
                          {"num_hidden_layers", layers},
                          {"sliding_window", window}});
  ModelSpec one_layer = load_model("gpt-oss-tiny");
  one_layer.num_layers = 1;
  EXPECT_EQ(json::parse(hugging_face_config(one_layer, DType::f32))["layer_types"],
            json{"sliding_attention"});
  // transformers heeds the types of layers of some models alone.
  const auto refused = [&](const char* fixture, const json& changes, const std::vector<std::string>& words) {
    expect_refusal([&] { model_from_hugging_face(changed(fixture, changes).dump(), "x/config.json"); },
                   words);
  };
  refused("mistral", {{"layer_types", mixed}}, {"layer_types", "only sliding_attention is"});
  refused("llama", {{"layer_types", mixed}, {"sliding_window", 4}},
          {"layer_types", "only full_attention is"});
  refused("glm4-moe-lite", {{"mlp_layer_types", {"sparse", "dense"}}}, {"mlp_layer_types"});
  refused("glm4-moe-lite", {{"first_k_dense_replace", 2}}, {"first_k_dense_replace", "only 1"});
  refused("dots1", {{"layer_types", mixed}, {"sliding_window", 4}}, {"layer_types", "full_attention"});
  refused("hunyuan-moe", {{"moe_topk", {2, 1}}}, {"moe_topk", "the same one"});
  refused("nemotron-h", {{"tie_word_embeddings", true}}, {"tie_word_embeddings = true", "only false is"});
  refused("exaone-moe", {{"mlp_layer_types", {"sparse", "dense"}}}, {"mlp_layer_types"});
  refused("exaone-moe", {{"layer_types", sliding}, {"sliding_window", 1000}},
          {"sliding_window = 1000", "less than max_position_embeddings"});
  refused("ernie4-5-moe", {{"moe_norm_min", 0.5}}, {"moe_norm_min = 0.5", "only 1e-12 is"});
  refused("qwen3-next", {{"mlp_only_layers", {0, 1, 2, 3}}}, {"mlp_only_layers", "experts in some layer"});
  refused("qwen3-next", {{"decoder_sparse_step", 100}}, {"decoder_sparse_step", "experts in some layer"});
  refused("smollm3", {{"layer_types", "left out"}, {"use_sliding_window", true}, {"sliding_window", 4}},
          {"use_sliding_window", "only false is"});
  refused("olmo3", {{"rope_parameters", "left out"}, {"rope_theta", 5000.0}}, {"rope_theta", "500000"});
  refused("olmo3", {{"rope_parameters", "left out"}, {"rope_scaling", {{"type", "yarn"}, {"factor", 4.0}}}},
          {"rope_scaling", "rope_type is missing"});
  refused("gemma3",
          {{"rope_parameters", "left out"}, {"rope_scaling", {{"type", "linear"}, {"factor", 4.0}}}},
          {"rope_scaling", "rope_type is missing"});
  refused("solar-open", {{"partial_rotary_factor", 0.5}}, {"partial_rotary_factor", "only 1"});
  refused(
      "phi3",
      {{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e4}, {"partial_rotary_factor", 0.1}}}},
      {"partial_rotary_factor = 0.1", "turns 0 of", "even number"});
  refused("phi", {{"qk_layernorm", true}}, {"qk_layernorm = true", "only false is"});
  for (const json& other : {json(), json(3), json(8)})
    refused("gpt-j", {{"rotary_dim", other}}, {"rotary_dim = " + other.dump()});
  refused("codegen", {{"n_embd", 18}, {"n_head", 3}}, {"n_embd = 18", "a multiple of 4"});
  refused("falcon", {{"alibi", true}}, {"alibi = true", "only false is"});
  refused("falcon", {{"num_ln_in_parallel_attn", 2}}, {"num_ln_in_parallel_attn = 2", "only 1 is"});
  refused("falcon-grouped", {{"parallel_attn", false}}, {"parallel_attn = false", "only true is"});
  refused("falcon-serial", {{"num_kv_heads", 2}}, {"num_kv_heads = 2", "only 4"});
  refused("bloom", {{"apply_residual_connection_post_layernorm", true}},
          {"apply_residual_connection_post_layernorm = true", "only false is"});
  refused("mpt", {{"attn_config", {{"clip_qkv", 6}}}}, {"clip_qkv = 6", "null"});
  refused("mpt", {{"attn_config", {{"alibi", false}}}}, {"alibi = false", "only true is"});
  refused("mpt", {{"attn_config", 3}}, {"attn_config = 3", "an object"});
  refused("mpt", {{"expansion_ratio", 2}}, {"expansion_ratio = 2", "only 4 is"});
  refused("gpt-neo", {{"attention_layers", {"global", "global"}}}, {"attention_layers", "attention_types"});
  refused("deepseek-v3", {{"head_dim", 2}}, {"head_dim = 2", "qk_rope_head_dim = 4"});
  refused("youtu", {{"head_dim", 2}}, {"head_dim = 2", "qk_rope_head_dim = 4"});
  refused("mistral4", {{"head_dim", 4}}, {"head_dim = 4", "qk_nope_head_dim + qk_rope_head_dim = 10"});
  refused("mistral4",
          {{"partial_rotary_factor", 0.8},
           {"rope_parameters", "left out"},
           {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 4.0}, {"llama_4_scaling_beta", 0.6}}}},
          {"partial_rotary_factor = 0.8", "qk_rope_head_dim = 4"});
  refused("gemma3", {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 4.0}}}}, {"rope_scaling", "null"});
  refused("granite", {{"attention_multiplier", 0.0}}, {"attention_multiplier = 0.0", "other than 0"});
  refused("gemma2", {{"attn_logit_softcapping", 0.0}}, {"attn_logit_softcapping = 0.0", "null"});
  refused("falcon-h1", {{"key_multiplier", 0.0}}, {"key_multiplier = 0.0", "other than 0"});
  // It heeds the key on top alone, and has one way of scaling.
  const char* const original = "original_max_position_embeddings";
  refused("phi3-longrope", {{original, "left out"}}, {original, "is missing"});
  refused("phi3", {{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}},
          {"type = \"linear\"", "only longrope is"});
  ModelSpec narrow =
      model_from_hugging_face(changed("phi3-longrope", json::object()).dump(), "x/config.json");
  narrow.hidden *= 2;
  expect_refusal([&] { hugging_face_config(narrow, DType::f32); },
                 {"transformers has no phi3", "hidden = 24"});
  // It heeds none of these, or computes something else.
  for (const char* fixture : {"olmo3", "gemma3"})
    refused(fixture, {{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 777.0}}}},
            {"rope_parameters", "full_attention and sliding_attention"});
  refused("cohere2-moe", {{"rope_scaling", {{"rope_type", "linear"}, {"factor", 3.0}}}},
          {"rope_scaling", "only null is"});
  json yarn{{"rope_type", "yarn"}, {"rope_theta", 1e4}, {"factor", 2.0}, {"truncate", false}};
  refused(
      "olmo3",
      {{"rope_parameters",
        {{"full_attention", yarn}, {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}}}},
      {"truncate = false", "only true is"});
  const json part{{"rope_type", "default"}, {"rope_theta", 1e4}, {"partial_rotary_factor", 0.5}};
  refused(
      "mellum",
      {{"rope_parameters",
        {{"full_attention", part}, {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}}}},
      {"partial_rotary_factor = 0.5", "only 1 is"});
  for (const char* fixture : {"llama", "gpt2", "gpt-neox", "mixtral"})
    refused(fixture, {{"is_causal", false}}, {"is_causal = false", "only true is"});
  // What a file leaves out is as transformers has it, and rope_scaling alone counts where both are there.
  const ModelSpec mixtral = model_from_hugging_face(
      changed("mixtral", {{"rope_parameters", "left out"}, {"rms_norm_eps", "left out"}}).dump(), "x");
  EXPECT_EQ(mixtral.rope.theta, 1e6);
  EXPECT_EQ(mixtral.norm_eps, 1e-5);
  const ModelSpec both = model_from_hugging_face(
      changed("llama", {{"rope_theta", 5e3},
                        {"rope_scaling", {{"type", "linear"}, {"factor", 4.0}}},
                        {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 3e3}}}})
          .dump(),
      "x");
  EXPECT_EQ(both.rope.theta, 5e3);
  EXPECT_EQ(both.rope.scaling, RopeScaling::linear);
  // null is false.
  const auto read = [&](const char* fixture, const json& changes) {
    return model_from_hugging_face(changed(fixture, changes).dump(), "x");
  };
  EXPECT_EQ(read("qwen3-moe", {{"head_dim", "left out"}}).head_dim, 6);  // of 24 for 4
  const json windowed{{"use_sliding_window", true}, {"sliding_window", 5}, {"max_window_layers", 28}};
  EXPECT_EQ(read("qwen3-moe", windowed).window, WindowSpec{5});
  EXPECT_EQ(read("gpt-oss", {{"rope_parameters", "left out"}, {"original_max_position_embeddings", 16}})
                .rope.original_length,
            16);
  EXPECT_EQ(read("afmoe", {{"num_local_experts", 2}}).num_experts, 8);
  const json scaling{{"type", "default"}, {"partial_rotary_factor", 0.34}};
  EXPECT_EQ(read("gpt-neox", {{"rope_scaling", scaling}}).rotary_dim, 2);
  const ModelSpec scaled = read("gpt-neox", {{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}},
                                             {"rotary_pct", 0.34},
                                             {"rotary_emb_base", 5e3}});
  EXPECT_EQ(scaled.rope.scaling, RopeScaling::linear);
  EXPECT_EQ(scaled.rope.theta, 5e3);
  EXPECT_EQ(scaled.rotary_dim, 2);
  yarn["truncate"] = nullptr;
  EXPECT_FALSE(read("llama", {{"rope_parameters", yarn}}).rope.whole_pairs);
  yarn.erase("truncate");
  EXPECT_TRUE(read("llama", {{"rope_parameters", yarn}}).rope.whole_pairs);
  refused("deepseek-v3", {{"rope_interleave", nullptr}}, {"rope_interleave = null", "only true is"});
  // What published files have beside it counts for less.
  EXPECT_EQ(read("minimax-m2", {{"rotary_dim", 2},
                                {"rope_parameters", {{"rope_theta", 1e4}, {"partial_rotary_factor", 0.5}}}})
                .rotary_dim,
            4);
}

// MiniCPM's factors are Granite's in other words.
TEST(HuggingFaceConfig, OfAMiniCpmIsAGranite) {
  const json sizes{{"hidden_size", 24},        {"intermediate_size", 36},  {"num_hidden_layers", 4},
                   {"num_attention_heads", 4}, {"num_key_value_heads", 2}, {"max_position_embeddings", 64},
                   {"vocab_size", 61},         {"initializer_range", 0.1}, {"rms_norm_eps", 1e-5}};
  json minicpm = sizes, granite = sizes;
  minicpm.update(
      {{"model_type", "minicpm"}, {"scale_emb", 12}, {"scale_depth", 1.4}, {"dim_model_base", 16}});
  granite.update({{"model_type", "granite"},
                  {"embedding_multiplier", 12},
                  {"residual_multiplier", 0.7},
                  {"logits_scaling", 1.5},
                  {"attention_multiplier", 1 / std::sqrt(6.0)},
                  {"tie_word_embeddings", true}});
  const auto read = [](const json& config) {
    return model_from_hugging_face(config.dump(), "x/config.json");
  };
  EXPECT_EQ(to_toml(read(minicpm)), to_toml(read(granite)));
  const auto refused = [&](const char* key, const json& value, const std::vector<std::string>& words) {
    json other = minicpm;
    other[key] = value;
    expect_refusal([&] { read(other); }, words);
  };
  refused("scale_depth", nullptr, {"scale_depth is missing"});
  refused("num_experts", 8, {"num_experts = 8", "only 0 is"});
  refused("sparse_config", {{"topk", 64}}, {"sparse_config", "only null is"});
}

// ChatGLM's files have keys of their own.
TEST(HuggingFaceConfig, OfAChatGlmIsAGlm) {
  json config = json::parse(read_text((fixtures / "chatglm/config.json").string()));
  const auto read = [](const json& one) { return model_from_hugging_face(one.dump(), "x/config.json"); };
  EXPECT_EQ(read(config).rope.theta, 2e4);
  EXPECT_EQ(read(config).rotary_dim, 4);
  config.erase("rope_ratio");
  EXPECT_EQ(read(config).rope.theta, 1e4);
  for (const auto& [key, value] : {std::pair{"num_hidden_layers", 2}, {"vocab_size", 61}})
    config[key] = value;
  EXPECT_TRUE(read(config).qkv_bias);  // as the first files of GLM-4 have both names
  config["add_bias_linear"] = true;
  expect_refusal([&] { read(config); }, {"add_bias_linear = true", "only false is"});
}

// Nemotron-H's layers are words or letters; transformers holds other names than its files have.
TEST(HuggingFaceConfig, OfANemotronHIsReadAsPublished) {
  const std::string text = read_text((fixtures / "nemotron-h/config.json").string());
  const auto read = [&](const json& changes) {
    json config = json::parse(text);
    for (const auto& [key, value] : changes.items())
      if (value == "left out")
        config.erase(key);
      else
        config[key] = value;
    return model_from_hugging_face(config.dump(), "x/config.json");
  };
  const ModelSpec model = read({});
  EXPECT_EQ(model.layer_pattern, "MEM*-ME");
  EXPECT_EQ(model.expert_latent, 10);
  EXPECT_EQ(model.shared_width(), 20);
  EXPECT_EQ(to_toml(read({{"layers_block_type", "left out"},
                          {"hybrid_override_pattern", "MEM*-ME"},
                          {"num_hidden_layers", 7}})),
            to_toml(model));
  EXPECT_EQ(
      to_toml(read({{"layers_block_type", {"mamba", "moe", "mamba", "attention", "mlp", "mamba", "moe"}}})),
      to_toml(model));
  EXPECT_EQ(to_toml(read({{"num_nextn_predict_layers", 1}})), to_toml(model));
  EXPECT_EQ(read({{"moe_latent_size", nullptr}}).expert_latent, 0);
  EXPECT_EQ(to_toml(read({{"head_dim", "left out"}, {"attention_head_dim", 8}})), to_toml(model));
  const ModelSpec dense = read({{"layers_block_type", {"mamba", "mlp", "attention"}}, {"mlp_bias", true}});
  EXPECT_EQ(dense.experts, Experts::none);
  EXPECT_TRUE(dense.mlp_bias);
  EXPECT_EQ(to_toml(model_from_hugging_face(hugging_face_config(dense, DType::f32), "x/config.json")),
            to_toml(dense));
  const auto refused = [&](const json& changes, const std::vector<std::string>& words) {
    expect_refusal([&] { read(changes); }, words);
  };
  refused({{"layers_block_type", {"mamba", "conv"}}}, {"layers_block_type", "moe"});
  refused({{"layers_block_type", {{"mamba", "moe"}}}}, {"layers_block_type", "moe"});
  refused({{"layers_block_type", "left out"}}, {"hybrid_override_pattern is missing"});
  refused({{"layers_block_type", "left out"}, {"hybrid_override_pattern", "M|E"}},
          {"hybrid_override_pattern", "M, *, - and E"});
  refused({{"num_hidden_layers", 6}}, {"num_hidden_layers = 6", "only 7"});
  refused({{"n_shared_experts", 2}}, {"n_shared_experts = 2", "only 1 is"});
  refused({{"mlp_bias", true}}, {"mlp_bias"});
  refused({{"use_bias", true}}, {"use_bias"});
  refused({{"mlp_hidden_act", "silu"}}, {"mlp_hidden_act", "relu2"});
  refused({{"time_step_limit", {0.0, 0.5}}}, {"time_step_limit = [0.0,0.5]"});
  refused({{"mamba_dt_limit", {0.0, 0.5}}}, {"mamba_dt_limit = [0.0,0.5]"});
}

// Bamba's layers may be named in any order, and Python's word for no limit stands bare in older files.
TEST(HuggingFaceConfig, OfABambaIsReadAsTransformersReadsIt) {
  const std::string text = read_text((fixtures / "bamba/config.json").string());
  const auto with = [&](const char* key, const json& value) {
    json config = json::parse(text);
    config[key] = value;
    return config.dump();
  };
  const auto read = [](const std::string& config) {
    return model_from_hugging_face(config, "x/config.json");
  };
  const auto refused = [&](const char* key, const json& value, const std::string& legal) {
    expect_refusal([&] { read(with(key, value)); }, {key, legal});
  };
  EXPECT_EQ(read(with("attn_layer_indices", {2, 0, 2})).state_space.attention_layers,
            (std::vector<std::int64_t>{0, 2}));
  refused("attn_layer_indices", {1, 3}, "from 0 to 2");
  refused("attn_layer_indices", {-1}, "from 0 to 2");
  refused("attn_layer_indices", {0, 1, 2}, "lacks at least one");
  refused("z_loss_coefficient", 0.5, "only 0 is");
  refused("mamba_n_groups", 4, "a divisor of mamba_n_heads = 6");
  // transformers overwrites what stands beside rope_parameters.
  const ModelSpec model = read(text);
  EXPECT_EQ(model.rotary_dim, 2);
  EXPECT_EQ(read(with("partial_rotary_factor", 1.0)).rotary_dim, 2);
  const ModelSpec whole =
      read(with("rope_parameters", {{"rope_type", "default"}, {"partial_rotary_factor", 1.0}}));
  EXPECT_EQ(whole.rotary_dim, 0);
  const json written = json::parse(hugging_face_config(whole, DType::f32));
  EXPECT_EQ(written["rope_parameters"]["partial_rotary_factor"], 1.0);
  EXPECT_FALSE(written.contains("partial_rotary_factor"));
  const auto limited = [&](const std::string& most) {
    std::string config = with("time_step_limit", {0.0, "most"});
    return config.replace(config.find("\"most\""), 6, most);
  };
  EXPECT_EQ(to_toml(read(limited("Infinity"))), to_toml(model));
  expect_refusal([&] { read(limited("-Infinity")); }, {"not JSON"});
  expect_refusal([&] { read(limited("\"a, Infinity\"")); }, {"time_step_limit = [0.0,\"a, Infinity\"]"});
  expect_refusal([&] { read(limited("1.0")); }, {"time_step_limit"});
}

// Factors of attention's input, keys and output are one of scores and one of what attention adds.
TEST(HuggingFaceConfig, OfAFalconH1HasFactors) {
  const json config = json::parse(read_text((fixtures / "falcon-h1/config.json").string()));
  const auto read = [&](const json& changes) {
    json all = config;
    for (const auto& [key, value] : changes.items())
      if (value == "left out")
        all.erase(key);
      else
        all[key] = value;
    return model_from_hugging_face(all.dump(), "x/config.json");
  };
  const ModelSpec model = read({});
  EXPECT_DOUBLE_EQ(model.scales.attention, 1.25 * 1.25 * 0.75 / std::sqrt(6.0));
  EXPECT_EQ(model.scales.attention_out, 1.25 * 0.625);
  EXPECT_EQ(model.scales.state_space, (std::array{0.75, 1.125, 1.875, 1.3125, 1.6875}));
  EXPECT_EQ(model.scales.logits_divisor, 2);
  EXPECT_FALSE(model.state_space.norm);
  const json written = json::parse(hugging_face_config(model, DType::f32));
  EXPECT_EQ(written["model_type"], "falcon_h1");
  EXPECT_DOUBLE_EQ(written["key_multiplier"].get<double>(), 1.25 * 1.25 * 0.75);
  for (const char* key : {"ssm_multipliers", "mlp_multipliers"})
    EXPECT_NO_THROW(read({{key, nullptr}})) << key;
  EXPECT_EQ(read({{"mamba_d_ssm", nullptr}, {"mamba_d_head", "auto"}}).state_space.head_dim, 8);
  const auto refused = [&](const json& changes, const std::vector<std::string>& words) {
    expect_refusal([&] { read(changes); }, words);
  };
  refused({{"ssm_multipliers", {1.0, 2.0}}}, {"ssm_multipliers", "5 numbers"});
  refused({{"mlp_multipliers", {1.0, -2.0}}}, {"mlp_out_scale = -2"});
  refused({{"mamba_rms_norm", true}, {"mamba_norm_before_gate", true}}, {"mamba_norm_before_gate = true"});
  refused({{"mamba_rms_norm", true}, {"mamba_norm_before_gate", "left out"}}, {"mamba_norm_before_gate"});
  EXPECT_EQ(
      read({{"mamba_d_ssm", "left out"}, {"mamba_n_heads", 8}, {"mamba_d_head", 128}}).state_space.head_dim,
      128);  // of 1024 channels
  refused({{"mamba_d_head", 4}}, {"mamba_d_head = 4", "only 5"});
  refused({{"attention_bias", true}}, {"attention_bias = true"});
  refused({{"projectors_bias", true}}, {"projectors_bias = true"});
}

// LFM2's published files say the width of MLPs before it is brought down, and name layers with attention.
TEST(HuggingFaceConfig, OfAnLfm2IsReadAsTransformersReadsIt) {
  const std::string text = read_text((fixtures / "lfm2/config.json").string()),
                    experts = read_text((fixtures / "lfm2-moe/config.json").string());
  const auto changed = [](const std::string& config, const json& changes) {
    json all = json::parse(config);
    for (const auto& [key, value] : changes.items())
      if (value == "left out")
        all.erase(key);
      else
        all[key] = value;
    return model_from_hugging_face(all.dump(), "x/config.json");
  };
  const auto read = [&](const json& changes) { return changed(text, changes); };
  EXPECT_EQ(read({}).mlp_hidden, 48);  // 46, up to 16
  EXPECT_EQ(read({{"intermediate_size", 6656}, {"block_multiple_of", 256}}).mlp_hidden, 4608);
  EXPECT_EQ(read({{"block_ff_dim", 12288}}).mlp_hidden, 8192);
  EXPECT_EQ(read({{"block_ffn_dim_multiplier", 1.5}}).mlp_hidden, 80);  // 69
  EXPECT_EQ(read({{"block_ffn_dim_multiplier", nullptr}}).mlp_hidden, 46);
  EXPECT_EQ(read({{"block_auto_adjust_ff_dim", false}}).mlp_hidden, 70);
  EXPECT_TRUE(read({{"tie_word_embeddings", "left out"}}).tied_embedding);
  EXPECT_FALSE(read({{"tie_embedding", false}}).tied_embedding);
  EXPECT_EQ(read({{"layer_types", "left out"}, {"full_attn_idxs", {2, 0}}}).short_conv.attention_layers,
            (std::vector<std::int64_t>{0, 2}));
  EXPECT_DOUBLE_EQ(read({{"rope_parameters", "left out"}}).rope.theta, 1e6);
  EXPECT_EQ(changed(experts, {{"num_dense_layers", 0}}).num_dense_layers, 0);
  EXPECT_EQ(changed(experts, {{"norm_topk_prob", false}}).router.epsilon, 0);
  const auto refused = [&](const std::string& config, const json& changes,
                           const std::vector<std::string>& words) {
    expect_refusal([&] { changed(config, changes); }, words);
  };
  refused(text, {{"conv_bias", true}}, {"conv_bias = true", "only false"});
  refused(text, {{"layer_types", "left out"}}, {"layer_types is missing"});
  refused(text, {{"layer_types", {"conv", "conv", "linear_attention", "conv"}}}, {"layer_types", "conv"});
  refused(text, {{"layer_types", {"conv"}}}, {"layer_types", "one for each layer"});
  refused(text, {{"layer_types", std::vector<std::string>(4, "full_attention")}}, {"conv at least once"});
  refused(text, {{"layer_types", nullptr}, {"full_attn_idxs", {4}}}, {"full_attn_idxs", "from 0 to 3"});
  refused(text, {{"layer_types", nullptr}, {"full_attn_idxs", {0, 1, 2, 3}}}, {"without at least one"});
  refused(text, {{"conv_L_cache", 1}}, {"short_conv = 1", "2 to 64"});
  refused(text, {{"num_key_value_heads", "left out"}}, {"num_kv_heads = 8", "num_heads = 4"});  // its default
  refused(experts, {{"use_expert_bias", false}}, {"use_expert_bias", "only true"});
  refused(experts, {{"num_experts_per_tok", "left out"}}, {"num_experts_per_tok is missing"});
  ModelSpec other = read({});
  other.qk_norm = false;
  expect_refusal([&] { hugging_face_config(other, DType::f32); }, {"qk_norm", "lfm2"});
  other = changed(experts, {});
  other.router.epsilon = 0;
  expect_refusal([&] { hugging_face_config(other, DType::f32); }, {"router_epsilon", "lfm2_moe"});
}

// Programs stop generating at the token that the tokenizer says, not at the last of a vocabulary that may
// have more ids than tokens; and what a model comes with for generating goes along.
TEST(HuggingFaceConfig, ATextBeginsAndEndsWithItsTokenizersTokens) {
  const TemporaryDirectory directory;
  const std::string copy = directory / "copy", out = directory / "out";
  fs::copy(fixtures / "llama", copy);
  write_file_atomically(
      copy + "/tokenizer.json",
      R"({"added_tokens": [{"id": 0, "content": "<b>", "special": true}, {"id": 2, "content": "<e>", "special": true}],
          "model": {"type": "BPE", "vocab": {"<b>": 0, "a": 1, "<e>": 2}, "merges": []}})");
  write_file_atomically(copy + "/tokenizer_config.json",
                        R"({"bos_token": {"content": "<b>"}, "eos_token": "<e>"})");
  write_file_atomically(copy + "/generation_config.json", R"({"eos_token_id": [2, 1]})");
  export_hugging_face(import_hugging_face(copy, directory / "ck", DType::f32, 1).checkpoint, out,
                      std::int64_t{1} << 30);
  const json config = json::parse(read_bytes(out + "/config.json"));
  EXPECT_EQ(config["bos_token_id"], 0);
  EXPECT_EQ(config["eos_token_id"], (json{2, 1}));
  EXPECT_EQ(read_bytes(out + "/generation_config.json"), R"({"eos_token_id": [2, 1]})");
  // Without a tokenizer the model's own configuration says it, which loading it asks first there.
  export_hugging_face(
      import_hugging_face((fixtures / "llama").string(), directory / "said", DType::f32, 1).checkpoint,
      directory / "out of said", std::int64_t{1} << 30);
  const json said = json::parse(read_bytes(directory / "out of said/config.json"));
  for (const char* key : {"bos_token_id", "eos_token_id"}) EXPECT_EQ(said[key], 0) << key;
  // Where nothing is known nothing is said.
  fs::copy(fixtures / "llama", directory / "unsaid");
  json unsaid = json::parse(read_bytes(directory / "unsaid/config.json"));
  for (const char* key : {"bos_token_id", "eos_token_id"}) unsaid.erase(key);
  write_file_atomically(directory / "unsaid/config.json", unsaid.dump());
  export_hugging_face(import_hugging_face(directory / "unsaid", directory / "bare", DType::f32, 1).checkpoint,
                      directory / "out of bare", std::int64_t{1} << 30);
  const json bare = json::parse(read_bytes(directory / "out of bare/config.json"));
  for (const char* key : {"bos_token_id", "eos_token_id"}) {
    EXPECT_TRUE(bare.contains(key));
    EXPECT_TRUE(bare[key].is_null());
  }
  const ModelSpec cwm = load_model((fixtures / "cwm").string());
  EXPECT_FALSE(
      json::parse(hugging_face_config(cwm, DType::f32)).contains("bos_token_id"));  // null is refused
}

TEST(HuggingFaceConfig, WhatEndsGenerationIsATokenOrSeveral) {
  const auto ends = [](const char* text) { return ends_of_generation({{"generation_config.json", text}}); };
  EXPECT_EQ(ends_of_generation({}), std::vector<std::int32_t>());
  EXPECT_EQ(ends("{}"), std::vector<std::int32_t>());
  EXPECT_EQ(ends(R"({"eos_token_id": null})"), std::vector<std::int32_t>());
  // As in config.json: transformers warns, and generates up to the last token.
  EXPECT_EQ(ends(R"({"eos_token_id": -1})"), std::vector<std::int32_t>());
  EXPECT_EQ(begin_of_generation({{"generation_config.json", R"({"bos_token_id": -1})"}}), std::nullopt);
  EXPECT_EQ(ends(R"({"eos_token_id": 7})"), (std::vector<std::int32_t>{7}));
  EXPECT_EQ(ends(R"({"eos_token_id": [7, 0]})"), (std::vector<std::int32_t>{7, 0}));
  for (const char* text : {R"({"eos_token_id": "a"})", R"({"eos_token_id": [-1]})",
                           R"({"eos_token_id": 1.5})", R"({"eos_token_id": [4294967296]})"})
    expect_refusal([&] { ends(text); }, {"generation_config.json", "eos_token_id", "must be a token"});
}

// One field of the model at a time: its configuration is read back as that model, or refused by the field.
TEST(HuggingFaceConfig, SaysTheWholeModelOrRefusesTheFieldByName) {
  const std::vector<std::pair<const char*, std::function<void(ModelSpec&)>>> changes{
      {"num_layers", [](ModelSpec& m) { m.num_layers += 1; }},
      {"num_kv_heads", [](ModelSpec& m) { m.num_kv_heads = m.num_heads; }},
      {"head_dim", [](ModelSpec& m) { m.head_dim *= 2; }},
      {"mlp_hidden", [](ModelSpec& m) { m.mlp_hidden += 3; }},
      {"vocab", [](ModelSpec& m) { m.vocab += 1; }},
      {"max_seq", [](ModelSpec& m) { m.max_seq -= 1; }},
      {"tied_embedding", [](ModelSpec& m) { m.tied_embedding = !m.tied_embedding; }},
      {"norm_eps", [](ModelSpec& m) { m.norm_eps = 0.1 + 0.2; }},
      {"rope_theta", [](ModelSpec& m) { m.rope.theta = 12345.678; }},
      {"init_std", [](ModelSpec& m) { m.init_std = 1.0 / 3; }},
      {"num_experts", [](ModelSpec& m) { m.num_experts *= 2; }},
      {"experts_per_token", [](ModelSpec& m) { m.experts_per_token = 1; }},
      {"expert_hidden", [](ModelSpec& m) { m.expert_hidden += 5; }},
      {"router_scores", [](ModelSpec& m) { m.router.scores = RouterScores::sigmoid; }},
      {"normalise_weights", [](ModelSpec& m) { m.router.normalise = false; }},
      {"routed_scale", [](ModelSpec& m) { m.router.scale = 2.5; }},
      {"router_groups", [](ModelSpec& m) { m.router.groups = m.router.most_groups = 2; }},
      {"router_group_best", [](ModelSpec& m) { m.router.group_best = 2; }},
      {"num_dense_layers", [](ModelSpec& m) { m.num_dense_layers = 2; }},
      {"num_shared_experts", [](ModelSpec& m) { m.num_shared_experts = 2; }},
      {"kv_rank", [](ModelSpec& m) { m.kv_rank += 3; }},
      {"q_rank", [](ModelSpec& m) { m.q_rank = 0; }},
      {"rotary_dim", [](ModelSpec& m) { m.rotary_dim += 2; }},
      {"attention_scale", [](ModelSpec& m) { m.scales.attention = 0.3; }},
      {"value_head_dim", [](ModelSpec& m) { m.value_head_dim += 1; }},
      {"num_mtp_layers", [](ModelSpec& m) { m.num_mtp_layers = 1; }}};
  std::set<std::string> refused;
  for (const char* preset : {"gpt2-tiny", "llama-tiny", "mixtral-tiny", "deepseek-v3-tiny"}) {
    for (const auto& [field, change] : changes) {
      ModelSpec model = load_model(preset);
      change(model);
      try {
        validate(model);
      } catch (const RequestError&) {
        continue;  // not of this family
      }
      std::string config;
      try {
        config = hugging_face_config(model, DType::f32);
      } catch (const RequestError& error) {
        refused.insert(field);
        EXPECT_EQ(std::string(error.what()).find("where it is nothing"), std::string::npos) << error.what();
        if (!model.latent_attention())
          expect_contains(error.what(),
                          {std::string(field) + " = ", "configuration of transformers", "legal: "});
        else  // where others follow from a field, one of them is named
          expect_contains(error.what(), {model.name, " = "});
        continue;
      }
      ModelSpec back = model_from_hugging_face(config, "config.json");
      back.name = model.name;
      if (model.experts != Experts::none) back.mlp_hidden = model.mlp_hidden;  // no layer has one
      EXPECT_EQ(to_toml(back), to_toml(model)) << preset << " " << field;
    }
  }
  // Of one group all are chosen among, so that their number alone decides nothing else.
  EXPECT_EQ(refused,
            (std::set<std::string>{"router_scores", "normalise_weights", "routed_scale", "router_groups",
                                   "router_group_best", "rotary_dim", "attention_scale", "num_mtp_layers"}));
}

}  // namespace
}  // namespace echelon::hugging_face_config_test
