// Hugging Face's config.json as a ModelSpec. A missing key has the default that transformers gives it. What
// would make transformers compute something else than Echelon does is refused. The one exception is the
// dropout of GPT-2, GPT-J, Phi, StarCoder2, Granite with its mixtures, and Seed-OSS, which published ones
// carry: it belongs to that training run rather than to the model, and Echelon has none.
#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/json_text.h"
#include "base/utf8.h"
#include "spec/config_window.h"
#include "spec/model_type_readers.h"

namespace echelon {

namespace {

std::string model_name(const std::string& where, const std::string& type) {
  const std::string directory = std::filesystem::path(where).parent_path().filename().string();
  const bool is_name = !directory.empty() && directory != "." && directory != ".." && is_utf8(directory);
  return is_name ? directory : type;
}

const ModelType& type_of(const Config& config) {
  const std::string type = config.text_or("model_type", "");
  const auto found = std::find_if(model_types().begin(), model_types().end(),
                                  [&type](const ModelType& one) { return one.name == type; });
  if (found == model_types().end()) refuse_model_type(config.where(), type);
  return *found;
}

// Two names of one key, which transformers has for some types (attribute_map), or a type's own.
struct TwoNames {
  const char* type;
  const char *one, *other;
};
constexpr TwoNames two_names[] = {
    {"gpt2", "n_embd", "hidden_size"},
    {"gpt2", "n_positions", "max_position_embeddings"},
    {"gpt2", "n_head", "num_attention_heads"},
    {"gpt2", "n_layer", "num_hidden_layers"},
    {"gpt_bigcode", "n_embd", "hidden_size"},
    {"gpt_bigcode", "n_positions", "max_position_embeddings"},
    {"gpt_bigcode", "n_head", "num_attention_heads"},
    {"gpt_bigcode", "n_layer", "num_hidden_layers"},
    {"gpt_neo", "num_heads", "num_attention_heads"},
    {"gpt_neo", "num_layers", "num_hidden_layers"},
    {"gptj", "n_embd", "hidden_size"},
    {"gptj", "n_positions", "max_position_embeddings"},
    {"gptj", "n_head", "num_attention_heads"},
    {"gptj", "n_layer", "num_hidden_layers"},
    {"codegen", "n_embd", "hidden_size"},
    {"codegen", "n_positions", "max_position_embeddings"},
    {"codegen", "n_head", "num_attention_heads"},
    {"codegen", "n_layer", "num_hidden_layers"},
    {"falcon", "hidden_size", "n_embed"},
    {"bloom", "hidden_size", "n_embed"},
    {"bloom", "num_hidden_layers", "n_layer"},
    {"bloom", "num_attention_heads", "n_head"},
    {"mpt", "d_model", "hidden_size"},
    {"mpt", "n_heads", "num_attention_heads"},
    {"mpt", "n_layers", "num_hidden_layers"},
    {"chatglm", "num_hidden_layers", "num_layers"},
    {"chatglm", "intermediate_size", "ffn_hidden_size"},
    {"chatglm", "num_key_value_heads", "multi_query_group_num"},
    {"chatglm", "head_dim", "kv_channels"},
    {"chatglm", "vocab_size", "padded_vocab_size"},
    {"chatglm", "max_position_embeddings", "seq_length"},
    {"chatglm", "rms_norm_eps", "layernorm_epsilon"},
    {"chatglm", "attention_bias", "add_qkv_bias"},
    {"internlm2", "attention_bias", "bias"},
    {"exaone", "num_hidden_layers", "num_layers"},
    {"exaone", "rms_norm_eps", "layer_norm_epsilon"},
    {"exaone", "hidden_act", "activation_function"},
    {"ernie4_5_moe", "moe_num_experts", "num_experts"},
    {"ernie4_5_moe", "moe_k", "num_experts_per_tok"},
    {"hunyuan_v1_moe", "moe_topk", "num_experts_per_tok"},
    {"hunyuan_v1_moe", "num_experts", "num_local_experts"},
    {"minimax_m2", "num_local_experts", "num_experts"},
    {"mixtral", "num_local_experts", "num_experts"},
    {"gpt_oss", "num_local_experts", "num_experts"},
    {"mellum", "num_local_experts", "num_experts"},
    {"qwen3_moe", "num_local_experts", "num_experts"},
    {"olmoe", "num_experts", "num_local_experts"},
    {"flex_olmo", "num_experts", "num_local_experts"},
    {"hy_v3", "num_experts", "num_local_experts"},
    {"deepseek_v2", "n_routed_experts", "num_experts"},
    {"deepseek_v3", "n_routed_experts", "num_local_experts"},
    {"mistral4", "n_routed_experts", "num_local_experts"},
    {"glm4_moe", "n_routed_experts", "num_local_experts"},
    {"glm4_moe_lite", "n_routed_experts", "num_local_experts"},
    {"solar_open", "n_routed_experts", "num_local_experts"},
    {"dots1", "n_routed_experts", "num_local_experts"},
    {"nemotron_h", "n_routed_experts", "num_local_experts"},
    {"sarvam_moe", "n_routed_experts", "num_local_experts"},
    {"sarvam_moe", "n_routed_experts", "num_experts"},
    {"sarvam_moe", "n_shared_experts", "num_shared_experts"},
    {"sarvam_moe", "attention_bias", "use_qkv_bias"},
    {"glm4_moe_lite", "qk_rope_head_dim", "head_dim"},
    {"granitemoehybrid", "layer_types", "layers_block_type"},
    {"internlm3", "attention_bias", "qkv_bias"},
    {"internlm3", "mlp_bias", "bias"},
    {"qwen3_vl_moe_text", "num_local_experts", "num_experts"},
};

// The configuration with each such key under both its names. Two values, of which transformers takes one,
// are refused.
Json with_both_names(Json object, const std::string& where) {
  const Config config(object, where);
  const std::string type = config.text_or("model_type", "");
  for (const TwoNames& key : two_names) {
    if (type != key.type) continue;
    const bool has_one = config.has(key.one), has_other = config.has(key.other);
    if (has_one && has_other && config.required(key.one) != config.required(key.other))
      config.wrong(key.other, fmt::format("{}, as {},", config.required(key.one).dump(), key.one));
    if (has_one && !has_other)
      object[key.other] = Json(config.required(key.one));
    else if (has_other && !has_one)
      object[key.one] = Json(config.required(key.other));
  }
  return object;
}

ModelSpec model_of(const Json& given, const std::string& where) {
  const Json named = with_both_names(given, where);
  const Json object = with_defaults(named, Config(named, where).text_or("model_type", ""));
  const Config config(object, where);
  const ModelType& type = type_of(config);
  ModelSpec m;
  m.name = model_name(where, type.name);
  config.only_boolean("is_causal", true);
  type.read(config, m);
  config.refuse_misspelt(named);
  m.window = plain_window(m);
  m.init_std = config.real_or(type.init_key, m.init_std);
  try {
    validate(m);
  } catch (const RequestError& error) {
    refuse("{}: {}", where, error.what());
  }
  return m;
}

}  // namespace

const TransformersType& transformers_type_of(const std::string& config_json, const std::string& where) {
  const Json text = text_of(parse_python_json(config_json, where), where);
  return type_of(Config(text, where));
}

ModelSpec model_from_hugging_face(const std::string& config_json, const std::string& where) {
  return model_of(text_of(parse_python_json(config_json, where), where), where);
}

}  // namespace echelon
