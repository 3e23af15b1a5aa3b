// What transformers takes where a configuration leaves a key out, as far as no size of the model is meant and
// the readers' own defaults are others: it differs from type to type.
#include <map>
#include <string>

#include "spec/model_type_readers.h"

namespace echelon {

namespace {

Json heads(std::int64_t kv_heads, std::int64_t width) {
  return {{"num_key_value_heads", kv_heads}, {"head_dim", width}};
}

Json with(Json one, const Json& other) {
  one.update(other);
  return one;
}

std::map<std::string, Json> all_defaults() {
  const auto kv_heads = [](std::int64_t number) { return Json{{"num_key_value_heads", number}}; };
  const auto window = [](std::int64_t size) { return Json{{"sliding_window", size}}; };
  const auto init = [](double std) { return Json{{"initializer_range", std}}; };
  const auto llama3 = [](double theta, double factor) {
    return Json{{"rope_parameters",
                 {{"rope_type", "llama3"},
                  {"rope_theta", theta},
                  {"factor", factor},
                  {"low_freq_factor", 1.0},
                  {"high_freq_factor", 4.0},
                  {"original_max_position_embeddings", 8192}}}};
  };
  const Json gpt_oss_rope{{"rope_parameters",
                           {{"rope_type", "yarn"},
                            {"rope_theta", 150000.0},
                            {"factor", 32.0},
                            {"beta_fast", 32.0},
                            {"beta_slow", 1.0},
                            {"truncate", false},
                            {"original_max_position_embeddings", 4096}}}};
  const Json ministral3_rope{{"rope_parameters",
                              {{"rope_type", "yarn"},
                               {"rope_theta", 1e6},
                               {"factor", 16.0},
                               {"beta_fast", 32.0},
                               {"beta_slow", 1.0},
                               {"mscale", 1.0},
                               {"mscale_all_dim", 1.0},
                               {"original_max_position_embeddings", 16384},
                               {"llama_4_scaling_beta", 0.1}}}};
  const Json mistral4_rope{{"rope_parameters",
                            {{"rope_type", "yarn"},
                             {"rope_theta", 1e4},
                             {"factor", 128.0},
                             {"beta_fast", 32.0},
                             {"beta_slow", 1.0},
                             {"mscale", 1.0},
                             {"mscale_all_dim", 1.0},
                             {"original_max_position_embeddings", 8192},
                             {"llama_4_scaling_beta", 0.1}}}};
  const Json gemma = with(with(heads(4, 256), window(4096)), {{"query_pre_attn_scalar", 256}}),
             qwen_window{{"sliding_window", 4096}, {"max_window_layers", 28}};
  return {
      {"afmoe", {{"head_dim", 128}, {"sliding_window", 1024}}},
      {"apertus", llama3(12e6, 8)},
      {"bamba", with(kv_heads(8), {{"mamba_d_state", 256}})},
      {"cohere2", window(4096)},
      {"cohere2_moe", {{"head_dim", 128}, {"sliding_window", 4096}}},
      {"cwm", with(with(heads(8, 128), window(8192)), llama3(1e6, 16))},
      {"dots1", kv_heads(32)},
      {"ernie4_5", heads(2, 128)},
      {"ernie4_5_moe", kv_heads(4)},
      {"exaone", kv_heads(8)},
      {"exaone4", with(kv_heads(32), window(4096))},
      {"exaone_moe", with(kv_heads(32), window(4096))},
      {"falcon_h1", with(kv_heads(8), {{"mamba_d_state", 256}, {"mamba_d_ssm", 1024}})},
      {"gemma", heads(16, 256)},
      {"gemma2", gemma},
      {"gemma3_text", gemma},
      {"glm", heads(2, 128)},
      {"glm4", heads(2, 128)},
      {"glm4_moe", kv_heads(8)},
      {"gpt_oss", with(with(heads(8, 64), window(128)), gpt_oss_rope)},
      {"granite_swa", with(kv_heads(4), window(128))},
      {"granitemoehybrid", {{"mamba_d_state", 256}}},
      {"helium", heads(20, 128)},
      {"hy_v3", with(heads(8, 128), init(0.006))},
      {"internlm3", heads(2, 128)},
      {"iquestcoder", heads(8, 128)},
      {"lfm2", kv_heads(8)},
      {"lfm2_moe", kv_heads(8)},
      {"mamba2", with(init(0.1), {{"n_groups", 8}})},
      {"mellum", with(heads(4, 128), window(1024))},
      {"minimax_m2", heads(8, 128)},
      {"ministral", with(kv_heads(8), window(4096))},
      {"ministral3", with(heads(8, 128), ministral3_rope)},
      {"mistral", with(kv_heads(8), window(4096))},
      {"mistral4", mistral4_rope},
      {"mixtral", kv_heads(8)},
      {"nemotron", init(0.0134)},
      {"nemotron_h", with(kv_heads(8), {{"n_groups", 8}, {"ssm_state_size", 128}})},
      {"olmo3", window(4096)},
      {"qwen2", with(kv_heads(32), qwen_window)},
      {"qwen2_moe", kv_heads(16)},
      {"qwen3", with(heads(32, 128), qwen_window)},
      {"qwen3_5_moe_text", heads(2, 256)},
      {"qwen3_5_text", heads(4, 256)},
      {"qwen3_moe", with(kv_heads(4), window(4096))},
      {"qwen3_next", heads(2, 256)},
      {"qwen3_vl_moe_text", kv_heads(16)},
      {"sarvam_moe", with(with(heads(4, 64), init(0.006)), {{"n_shared_experts", 1},
                                                            {"routed_scaling_factor", 2.5},
                                                            {"use_qk_norm", true},
                                                            {"rms_norm_eps", 1e-6},
                                                            {"partial_rotary_factor", 1.0},
                                                            {"rope_theta", 8e6}})},
      {"seed_oss", heads(8, 128)},
      {"smollm3", kv_heads(4)},
      {"solar_open", heads(8, 128)},
      {"stablelm", kv_heads(32)},
      {"starcoder2", with(kv_heads(2), init(0.018042))},
      {"vaultgemma", gemma},
  };
}

}  // namespace

Json with_defaults(Json object, const std::string& type) {
  static const std::map<std::string, Json> all = all_defaults();
  const auto found = all.find(type);
  if (found == all.end()) return object;
  for (const auto& [key, value] : found->second.items()) object.emplace(key, value);
  // Of positions null says as little.
  const char* const rope = "rope_parameters";
  if (found->second.contains(rope) && object[rope].is_null()) object[rope] = found->second[rope];
  return object;
}

}  // namespace echelon
