// Hugging Face's config.json as a ModelSpec. A missing key has the default that transformers gives it. What
// would make transformers compute something else than Echelon does is refused. The one exception is GPT-2's
// dropout, which every published GPT-2 carries: it belongs to that training run rather than to the model, and
// Echelon has none.
#include <fmt/format.h>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/json_text.h"
#include "base/utf8.h"
#include "spec/model_spec.h"

namespace echelon {

namespace {

using Json = nlohmann::json;

class Config {
 public:
  Config(const Json& object, const std::string& where) : object_(object), where_(where) {}

  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }

  std::int64_t integer(const char* key) const {
    constexpr std::int64_t largest =
        2147483647;  // sums of products of sizes then stay in range until validate()
    const Json& value = required(key);
    const bool whole = value.is_number_integer();
    const bool fits =
        whole && value.get<double>() >= 1 && value.get<double>() <= static_cast<double>(largest);
    if (!fits) wrong(key, fmt::format("a whole number from 1 to {}", largest));
    return value.get<std::int64_t>();
  }
  std::int64_t integer_or(const char* key, std::int64_t otherwise) const {
    return has(key) ? integer(key) : otherwise;
  }
  double real_or(const char* key, double otherwise) const {
    if (!has(key)) return otherwise;
    if (!required(key).is_number()) wrong(key, "a number");
    return required(key).get<double>();
  }
  bool boolean_or(const char* key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!required(key).is_boolean()) wrong(key, "true or false");
    return required(key).get<bool>();
  }
  std::string text_or(const char* key, const char* otherwise) const {
    if (!has(key)) return otherwise;
    if (!required(key).is_string()) wrong(key, "a text");
    return required(key).get<std::string>();
  }

  void only_boolean(const char* key, bool supported) const {
    if (boolean_or(key, supported) != supported) wrong(key, supported ? "true" : "false");
  }
  void only_text(const char* key, const char* otherwise, std::initializer_list<const char*> supported) const {
    const std::string value = text_or(key, otherwise);
    for (const char* one : supported) {
      if (value == one) return;
    }
    wrong(key, fmt::format("{}", fmt::join(supported, " or ")));
  }
  void only_real(const char* key, double supported) const {
    if (real_or(key, supported) < supported || real_or(key, supported) > supported) {
      wrong(key, fmt::format("{}", supported));
    }
  }
  void only_null(const char* key) const {
    if (has(key)) wrong(key, "null");
  }
  [[noreturn]] void wrong(const char* key, const std::string& supported) const {
    const std::string value = required(key).dump(-1, ' ', false, Json::error_handler_t::replace);
    refuse("{}: {} = {} is not supported: only {} is", where_, key, value, supported);
  }
  const Json& required(const char* key) const {
    if (!has(key)) refuse("{}: the key {} is missing", where_, key);
    return object_.at(key);
  }
  const std::string& where() const { return where_; }

 private:
  const Json& object_;
  const std::string& where_;
};

std::int64_t even_head_dim(const Config& config, const char* heads_key, const char* width_key) {
  const std::int64_t heads = config.integer(heads_key), width = config.integer(width_key);
  if (heads < 1 || width % heads != 0) {
    refuse("{}: {} = {} does not divide {} = {}", config.where(), heads_key, heads, width_key, width);
  }
  return width / heads;
}

void read_gpt2(const Config& config, ModelSpec& m) {
  m.family = Family::gpt2;
  m.num_layers = config.integer("n_layer");
  m.hidden = config.integer("n_embd");
  m.num_heads = config.integer("n_head");
  m.num_kv_heads = m.num_heads;
  m.head_dim = even_head_dim(config, "n_head", "n_embd");
  m.mlp_hidden = config.integer_or("n_inner", 4 * m.hidden);
  m.vocab = config.integer("vocab_size");
  m.max_seq = config.integer("n_positions");
  m.tied_embedding = config.boolean_or("tie_word_embeddings", true);
  m.norm_eps = config.real_or("layer_norm_epsilon", 1e-5);
  config.only_text("activation_function", "gelu_new", {"gelu_new", "gelu_pytorch_tanh"});
  config.only_boolean("scale_attn_weights", true);
  config.only_boolean("scale_attn_by_inverse_layer_idx", false);
  config.only_boolean("add_cross_attention", false);
}

// transformers 4 has rope_theta and rope_scaling, transformers 5 rope_parameters.
void read_rope(const Config& config, ModelSpec& m) {
  m.rope_theta = config.real_or("rope_theta", 10000.0);
  config.only_null("rope_scaling");
  config.only_real("partial_rotary_factor", 1.0);
  if (!config.has("rope_parameters")) return;
  if (!config.required("rope_parameters").is_object()) config.wrong("rope_parameters", "an object");
  const std::string where = config.where() + ", rope_parameters";
  const Config rope(config.required("rope_parameters"), where);
  rope.only_text("rope_type", "default", {"default"});
  rope.only_real("partial_rotary_factor", 1.0);
  m.rope_theta = rope.real_or("rope_theta", m.rope_theta);
}

void read_llama(const Config& config, bool window, ModelSpec& m) {
  m.family = Family::llama;
  m.num_layers = config.integer("num_hidden_layers");
  m.hidden = config.integer("hidden_size");
  m.num_heads = config.integer("num_attention_heads");
  m.num_kv_heads = config.integer_or("num_key_value_heads", m.num_heads);
  m.head_dim = config.has("head_dim") ? config.integer("head_dim")
                                      : even_head_dim(config, "num_attention_heads", "hidden_size");
  m.mlp_hidden = config.integer("intermediate_size");
  m.vocab = config.integer("vocab_size");
  m.max_seq = config.integer("max_position_embeddings");
  m.tied_embedding = config.boolean_or("tie_word_embeddings", false);
  m.norm_eps = config.real_or("rms_norm_eps", 1e-6);
  read_rope(config, m);
  config.only_text("hidden_act", "silu", {"silu"});
  config.only_boolean("attention_bias", false);
  config.only_boolean("mlp_bias", false);
  config.only_real("attention_dropout", 0.0);
  if (config.has("layer_types")) {
    for (const Json& type : config.required("layer_types")) {
      if (type != "full_attention") config.wrong("layer_types", "full_attention in every layer");
    }
  }
  if (window && config.has("sliding_window") && config.integer("sliding_window") < m.max_seq) {
    config.wrong("sliding_window", fmt::format("null, or at least max_position_embeddings = {},", m.max_seq));
  }
}

// What balances the experts in training (router_aux_loss_coef) is a run's to say.
void read_mixtral(const Config& config, ModelSpec& m) {
  config.required("num_key_value_heads");
  read_llama(config, true, m);
  m.experts = Experts::mixtral;
  m.num_experts = config.integer("num_local_experts");
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = m.mlp_hidden;
  config.only_real("router_jitter_noise", 0.0);
}

// Their window, where one is named, is of use_sliding_window alone.
void read_qwen(const Config& config, bool qwen2, ModelSpec& m) {
  config.required("num_key_value_heads");
  if (!qwen2) config.required("head_dim");  // transformers would take 128
  config.only_boolean("use_sliding_window", false);
  read_llama(config, false, m);
  m.qkv_bias = qwen2;
  m.qk_norm = !qwen2;
}

[[noreturn]] void refuse_model_type(const std::string& where, const std::string& type) {
  const char* why = "";
  if (type.starts_with("deepseek"))
    why = " (nor are its scaled positions and FP8 weights; --model deepseek-v3 plans it)";
  refuse(
      "{}: model_type = \"{}\" is not supported{}: only gpt2, llama, mistral, mixtral, qwen2 and qwen3 are",
      where, type, why);
}

std::string model_name(const std::string& where, const std::string& type) {
  const std::string directory = std::filesystem::path(where).parent_path().filename().string();
  const bool is_name = !directory.empty() && directory != "." && directory != ".." && is_utf8(directory);
  return is_name ? directory : type;
}

}  // namespace

ModelSpec model_from_hugging_face(const std::string& config_json, const std::string& where) {
  const Json object = parse_json(config_json, where);
  if (!object.is_object()) refuse("{}: not a JSON object", where);
  const Config config(object, where);
  config.required("model_type");
  const std::string type = config.text_or("model_type", "");
  ModelSpec m;
  m.name = model_name(where, type);
  if (type == "gpt2") {
    read_gpt2(config, m);
  } else if (type == "llama") {
    read_llama(config, false, m);
  } else if (type == "mistral") {
    // transformers' own defaults would be 8 heads and a window of 4096 tokens: too surprising to be assumed
    // here.
    if (!object.contains("num_key_value_heads")) config.required("num_key_value_heads");
    if (!object.contains("sliding_window")) config.required("sliding_window");
    read_llama(config, true, m);
  } else if (type == "mixtral") {
    read_mixtral(config, m);
  } else if (type == "qwen2" || type == "qwen3") {
    read_qwen(config, type == "qwen2", m);
  } else {
    refuse_model_type(where, type);
  }
  m.init_std = config.real_or("initializer_range", 0.02);
  config.only_null("quantization_config");
  try {
    validate(m);
  } catch (const RequestError& error) {
    refuse("{}: {}", where, error.what());
  }
  return m;
}

}  // namespace echelon
