// Hugging Face's config.json as a ModelSpec. A missing key has the default that transformers gives it. What
// would make transformers compute something else than Echelon does is refused. The one exception is the
// dropout of GPT-2, StarCoder2, Granite and Seed-OSS, which published ones carry: it belongs to that training
// run rather than to the model, and Echelon has none.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/json_text.h"
#include "base/utf8.h"
#include "spec/model_spec.h"
#include "spec/model_types.h"

namespace echelon {

namespace {

using Json = nlohmann::json;

class Config {
 public:
  Config(const Json& object, const std::string& where) : object_(object), where_(where) {}

  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }

  bool names(const char* key) const { return object_.contains(key); }  // null, it may be

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
  const Json& object() const { return object_; }

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

// In transformers 5 its positions are in rope_parameters.
void read_neox(const Config& config, ModelSpec& m) {
  m.family = Family::neox;
  m.num_layers = config.integer("num_hidden_layers");
  m.hidden = config.integer("hidden_size");
  m.num_heads = config.integer("num_attention_heads");
  m.num_kv_heads = m.num_heads;
  m.head_dim = even_head_dim(config, "num_attention_heads", "hidden_size");
  m.mlp_hidden = config.integer("intermediate_size");
  m.vocab = config.integer("vocab_size");
  m.max_seq = config.integer("max_position_embeddings");
  m.tied_embedding = config.boolean_or("tie_word_embeddings", false);
  m.norm_eps = config.real_or("layer_norm_eps", 1e-5);
  m.parallel_residual = config.boolean_or("use_parallel_residual", true);
  m.rope.theta = config.real_or("rotary_emb_base", 1e4);
  double part = config.real_or("rotary_pct", 0.25);
  config.only_null("rope_scaling");
  if (config.has("rope_parameters")) {
    const std::string where = config.where() + ", rope_parameters";
    const Config rope(config.required("rope_parameters"), where);
    rope.only_text("rope_type", "default", {"default"});
    m.rope.theta = rope.real_or("rope_theta", m.rope.theta);
    part = rope.real_or("partial_rotary_factor", part);
  }
  const auto turned = static_cast<std::int64_t>(static_cast<double>(m.head_dim) * part);
  if (!(part > 0) || part > 1 || turned < 1)
    refuse("{}: {} of each head of {} is to be turned: give a part above 0 and up to 1", config.where(), part,
           m.head_dim);
  m.rotary_dim = turned == m.head_dim ? 0 : turned;
  config.only_text("hidden_act", "gelu", {"gelu"});
  config.only_boolean("attention_bias", true);
  config.only_real("hidden_dropout", 0.0);
  config.only_real("attention_dropout", 0.0);
}

// A list of numbers.
std::vector<double> numbers(const Config& config, const char* key) {
  std::vector<double> values;
  const Json& list = config.required(key);
  if (!list.is_array()) config.wrong(key, "a list of numbers");
  for (const Json& value : list) {
    if (!value.is_number()) config.wrong(key, "a list of numbers");
    values.push_back(value.get<double>());
  }
  return values;
}

// `config` names them below `key`, where transformers 4 has rope_scaling beside rope_theta and transformers 5
// all of them in rope_parameters.
void read_rope_scaling(const Config& config, const char* key, ModelSpec& m) {
  const Json& object = config.required(key);
  if (!object.is_object()) config.wrong(key, "an object");
  const std::string where = fmt::format("{}, {}", config.where(), key);
  const Config rope(object, where);
  RopeSpec& r = m.rope;
  r.theta = rope.real_or("rope_theta", r.theta);
  const char* named = rope.has("rope_type") ? "rope_type" : "type";
  rope.only_text(named, "default", {"default", "linear", "dynamic", "llama3", "yarn", "longrope", "su"});
  std::string type = rope.text_or(named, "default");
  if (type == "su" || (type == "yarn" && m.fused_projections)) type = "longrope";  // of Phi-3
  if (type == "default") return;
  r.scaling = parse_choice<RopeScaling>(type, where + ": rope_type");
  if (r.scaling == RopeScaling::dynamic) {
    r.original_length = m.max_seq;  // whatever else is named
  } else if (r.scaling > RopeScaling::linear) {
    const Config& origin = config.has("original_max_position_embeddings") ? config : rope;
    r.original_length = origin.integer_or("original_max_position_embeddings", m.max_seq);
  }
  if (rope.has("factor") || r.scaling != RopeScaling::longrope) {
    rope.required("factor");
    r.factor = rope.real_or("factor", 1);
  } else {
    r.factor = static_cast<double>(m.max_seq) / static_cast<double>(r.original_length);
  }
  if (r.scaling == RopeScaling::llama3) {
    rope.required("low_freq_factor");
    rope.required("high_freq_factor");
    r.low_frequency = rope.real_or("low_freq_factor", 1);
    r.high_frequency = rope.real_or("high_freq_factor", 4);
  }
  if (r.scaling < RopeScaling::yarn) return;
  r.attention_factor =
      rope.real_or("attention_factor",
                   default_attention_factor(r, rope.real_or("mscale", 0), rope.real_or("mscale_all_dim", 0)));
  if (r.scaling == RopeScaling::yarn) {
    r.beta_fast = rope.real_or("beta_fast", r.beta_fast);
    r.beta_slow = rope.real_or("beta_slow", r.beta_slow);
    r.whole_pairs = rope.boolean_or("truncate", true);
  } else {
    r.short_factors = numbers(rope, "short_factor");
    r.long_factors = numbers(rope, "long_factor");
  }
}

// The part of a head that is turned: only some families of transformers heed it, which have `otherwise` where
// none is named.
void read_partial_rotary(const Config& config, std::optional<double> otherwise, ModelSpec& m) {
  const char* const key = "partial_rotary_factor";
  if (!otherwise) return config.only_real(key, 1.0);
  const double part = config.real_or(key, *otherwise);
  if (!(part > 0) || part > 1) config.wrong(key, "a number above 0 and up to 1");
  m.rotary_dim = part < 1 ? static_cast<std::int64_t>(static_cast<double>(m.head_dim) * part) : 0;
}

// `heeded`: not of rope_parameters alone, as Bamba's is.
void read_rope(const Config& config, double theta, std::optional<double> rotary_part, bool heeded,
               ModelSpec& m) {
  m.rope.theta = config.real_or("rope_theta", theta);
  if (heeded)
    read_partial_rotary(config, rotary_part, m);
  else
    m.rotary_dim = static_cast<std::int64_t>(static_cast<double>(m.head_dim) * *rotary_part);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!config.has(key)) continue;
    // Where both are there transformers takes the former alone, or mixes them where layers have their own.
    if (key == std::string_view("rope_parameters") && config.has("rope_scaling") &&
        !config.required("rope_scaling").empty()) {
      if (m.rope.local_theta > 0) config.only_null("rope_scaling");
      continue;
    }
    const std::string where = fmt::format("{}, {}", config.where(), key);
    const Config rope(config.required(key), where);
    if (m.rope.local_theta > 0 && key == std::string_view("rope_scaling"))
      rope.required("rope_type");  // transformers would not heed "type"
    if (m.rope.local_theta > 0 && config.required(key).contains("full_attention")) {  // by type of layer
      read_rope_scaling(rope, "full_attention", m);
      const Config local(rope.required("sliding_attention"), where);
      local.only_text("rope_type", "default", {"default"});
      m.rope.local_theta = local.real_or("rope_theta", m.rope.local_theta);
      continue;
    }
    read_rope_scaling(config, key, m);
    if (rope.has("partial_rotary_factor")) read_partial_rotary(rope, rotary_part, m);
  }
  // Of this kind max_position_embeddings is the original length; the factor says how much longer it may get.
  if (m.rope.scaling == RopeScaling::dynamic && m.rope.factor >= 1)
    m.max_seq =
        std::llround(std::min(std::floor(m.rope.factor * static_cast<double>(m.max_seq)), 0x1p31 - 1));
}

// Layers with a window, by layer_types where they are named: all, or all but each n-th, or but the first of
// each n. Where transformers
// does not heed them (`typed`) they may only say what is so anyway. A window that no trained sequence fills
// is none; returns it all the same.
WindowSpec read_window(const Config& config, bool in_all, bool typed, ModelSpec& m) {
  std::vector<bool> in(static_cast<std::size_t>(m.num_layers), in_all);
  if (config.has("layer_types")) {
    const Json& types = config.required("layer_types");
    if (!types.is_array() || std::ssize(types) != m.num_layers)
      config.wrong("layer_types", "a list of one for each layer");
    for (std::size_t i = 0; i < types.size(); ++i) {
      if (types[i] != "full_attention" && types[i] != "sliding_attention")
        config.wrong("layer_types", "full_attention and sliding_attention");
      in[i] = types[i] == "sliding_attention";
      if (!typed && in[i] != in_all)
        config.wrong("layer_types", in_all ? "sliding_attention" : "full_attention");
    }
  }
  if (std::find(in.begin(), in.end(), true) == in.end()) return {};
  const std::int64_t size = config.integer("sliding_window");
  const bool full_first = !in.front();
  const auto first_full = std::find(in.begin() + full_first, in.end(), false);
  const std::int64_t before = first_full - in.begin();
  const WindowSpec window{size, full_first ? before : first_full == in.end() ? 0 : before + 1, full_first};
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    if (window.in(layer) != in[static_cast<std::size_t>(layer)])
      config.wrong(
          "layer_types",
          "sliding_attention in all layers, in all but each n-th, or in all but the first of each n");
  if (size < m.max_seq || m.rope.local_theta > 0) m.window = window;
  return window;
}

struct LlamaDefaults {
  Activation activation = Activation::swiglu;
  bool windowed = false;  // where sliding_window is named
  bool typed = false;     // its layers are of the kinds that layer_types says
  double rope_theta = 10000.0, norm_eps = 1e-6;
  bool tied = false;
  std::optional<bool> biased = {};  // all of attention; without a value its family has no such choice
  bool gelu_is_tanh = false;        // its files say "gelu" and mean that
  bool mlp_biased = false;          // where mlp_bias says so; its family has the choice
  const char* norm_eps_key = "rms_norm_eps";
  const char* bias_key = "attention_bias";
  const char* mlp_hidden_key = "intermediate_size";
  std::optional<double> rotary_part = {};  // without a value its family turns whole heads
  bool rotary_part_on_top = true;          // beside rope_parameters too
  bool dropped = false;                    // its dropout is left out
  std::int64_t head_dim = 0;               // which other keys say; 0: as usual
  bool mixed = false;                      // layer_types say which layers have attention
};

void read_llama(const Config& config, const LlamaDefaults& defaults, ModelSpec& m) {
  m.family = Family::llama;
  m.num_layers = config.integer("num_hidden_layers");
  m.hidden = config.integer("hidden_size");
  m.num_heads = config.integer("num_attention_heads");
  m.num_kv_heads = config.integer_or("num_key_value_heads", m.num_heads);
  m.head_dim = defaults.head_dim > 0    ? defaults.head_dim
               : config.has("head_dim") ? config.integer("head_dim")
                                        : even_head_dim(config, "num_attention_heads", "hidden_size");
  m.mlp_hidden = config.integer(defaults.mlp_hidden_key);
  m.vocab = config.integer("vocab_size");
  m.max_seq = config.integer("max_position_embeddings");
  m.tied_embedding = config.boolean_or("tie_word_embeddings", defaults.tied);
  m.norm_eps = config.real_or(defaults.norm_eps_key, defaults.norm_eps);
  read_rope(config, defaults.rope_theta, defaults.rotary_part, defaults.rotary_part_on_top, m);
  m.activation = defaults.activation;
  const char* const geglu = config.has("hidden_activation") ? "hidden_activation" : "hidden_act";
  if (m.activation == Activation::geglu && defaults.gelu_is_tanh)
    config.only_text(geglu, "gelu_pytorch_tanh", {"gelu_pytorch_tanh", "gelu"});
  else if (m.activation == Activation::geglu)
    config.only_text(geglu, "gelu_pytorch_tanh", {"gelu_pytorch_tanh"});
  else if (m.activation == Activation::relu2 || m.activation == Activation::xielu)
    config.only_text("hidden_act", name_of(m.activation), {name_of(m.activation)});
  else if (m.activation == Activation::gelu)
    config.only_text("hidden_act", "gelu_pytorch_tanh", {"gelu_pytorch_tanh", "gelu_new"});
  else
    config.only_text("hidden_act", "silu", {"silu"});
  if (defaults.biased)
    m.qkv_bias = m.attention_out_bias = config.boolean_or(defaults.bias_key, *defaults.biased);
  else
    config.only_boolean(defaults.bias_key, false);
  m.mlp_bias = defaults.mlp_biased && config.boolean_or("mlp_bias", false);
  if (!defaults.mlp_biased) config.only_boolean("mlp_bias", false);
  if (!defaults.dropped) config.only_real("attention_dropout", 0.0);
  if (m.num_layers > 100000) config.wrong("num_hidden_layers", "at most 100000");
  if (!defaults.mixed)
    read_window(config, defaults.windowed && config.has("sliding_window"), defaults.typed, m);
}

// What balances the experts in training (router_aux_loss_coef) is a run's to say.
void read_mixtral(const Config& config, ModelSpec& m) {
  config.required("num_key_value_heads");
  read_llama(config, {.windowed = true, .rope_theta = 1e6, .norm_eps = 1e-5}, m);
  m.experts = Experts::mixtral;
  m.num_experts = config.integer("num_local_experts");
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = m.mlp_hidden;
  config.only_real("router_jitter_noise", 0.0);
}

// Its window is in every other layer, the first one among them, and its positions are scaled, unless the
// configuration says otherwise. As published its experts are quantized, which is refused.
void read_gpt_oss(const Config& config, ModelSpec& m) {
  constexpr double theta = 150000;
  config.required("num_key_value_heads");
  config.required("head_dim");  // transformers would take 64
  m.attention_sinks = true;
  read_llama(config, {.typed = true, .rope_theta = theta, .norm_eps = 1e-5, .biased = true}, m);
  if (!config.has("rope_scaling") && !config.has("rope_parameters")) {
    m.rope.scaling = RopeScaling::yarn;
    m.rope.factor = 32;
    m.rope.original_length = 4096;
    m.rope.whole_pairs = false;
    m.rope.attention_factor = default_attention_factor(m.rope);
  }
  if (!config.has("layer_types")) {
    m.window = {config.names("sliding_window") ? config.integer("sliding_window") : 128, 2};
    if (m.window.size >= m.max_seq) m.window = {};
  }
  m.experts = Experts::gpt_oss;
  m.num_experts = config.integer(config.has("num_local_experts") ? "num_local_experts" : "num_experts");
  m.experts_per_token =
      config.integer(config.has("num_experts_per_tok") ? "num_experts_per_tok" : "experts_per_token");
  m.expert_hidden = m.mlp_hidden;
  m.clamp.alpha = config.real_or("swiglu_alpha", m.clamp.alpha);
  m.clamp.limit = config.real_or("swiglu_limit", m.clamp.limit);
}

// Their window, where one is named, is of use_sliding_window alone, and of the layers from max_window_layers
// on.
void read_qwen(const Config& config, bool qwen2, bool typed, ModelSpec& m) {
  config.required("num_key_value_heads");
  if (!qwen2) config.required("head_dim");  // transformers would take 128
  const bool window = config.boolean_or("use_sliding_window", false);
  if (window && !config.has("layer_types")) {
    // transformers' default of 28 would leave a deeper model's last layers alone.
    if (config.required("max_window_layers") != 0 &&
        config.integer("max_window_layers") < config.integer("num_hidden_layers"))
      config.wrong("max_window_layers", "0, or at least num_hidden_layers,");
  }
  const bool in_all = window && !config.has("layer_types") && config.required("max_window_layers") == 0;
  read_llama(config, {.windowed = in_all, .typed = typed, .biased = qwen2 ? std::optional<bool>() : false},
             m);
  if (!window && m.window.size > 0) config.wrong("use_sliding_window", "true beside sliding_attention");
  if (qwen2) m.qkv_bias = true;
  m.qk_norm = !qwen2;
}

// Layers that have an MLP in place of experts: those of mlp_only_layers, and all but each n-th of
// decoder_sparse_step. They have to be the first ones; where all are, the model has no experts.
std::int64_t qwen_moe_dense_layers(const Config& config, const ModelSpec& m) {
  const std::int64_t step = config.integer_or("decoder_sparse_step", 1);
  std::vector<bool> dense(static_cast<std::size_t>(m.num_layers));
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    dense[static_cast<std::size_t>(layer)] = (layer + 1) % step != 0;
  if (config.has("mlp_only_layers")) {
    const Json& list = config.required("mlp_only_layers");
    if (!list.is_array()) config.wrong("mlp_only_layers", "a list of layers");
    for (const Json& layer : list) {
      if (!layer.is_number_unsigned()) config.wrong("mlp_only_layers", "a list of layers");
      const auto number = layer.get<std::uint64_t>();
      if (number < dense.size()) dense[number] = true;
    }
  }
  const auto first = std::find(dense.begin(), dense.end(), false);
  if (std::find(first, dense.end(), true) != dense.end())
    config.wrong(
        step > 1 ? "decoder_sparse_step" : "mlp_only_layers",
        step > 1 ? "1, or what leaves MLPs to the first layers alone," : "a list of the first layers");
  return first - dense.begin();
}

// In every layer, or after the first ones.
void read_qwen_experts(const Config& config, ModelSpec& m) {
  const std::int64_t dense = qwen_moe_dense_layers(config, m);
  if (dense == m.num_layers) return;
  m.experts = Experts::deepseek;
  m.num_dense_layers = dense;
  m.num_experts = config.integer(config.has("num_experts") ? "num_experts" : "num_local_experts");
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  m.router.normalise = config.boolean_or("norm_topk_prob", false);
}

void read_qwen3_moe(const Config& config, ModelSpec& m) {
  read_qwen(config, false, false, m);
  read_qwen_experts(config, m);
}

// The text of a Qwen3-VL with experts.
void read_qwen3_vl_moe(const Config& config, ModelSpec& m) {
  Json whole = config.object();
  if (!config.has("head_dim"))
    whole["head_dim"] = even_head_dim(config, "num_attention_heads", "hidden_size");
  whole["norm_topk_prob"] = true;  // whatever it says
  read_qwen3_moe(Config(whole, config.where()), m);
}

// A shared expert of a width of its own, weighed by a gate.
void read_gated_shared_expert(const Config& config, ModelSpec& m) {
  const std::int64_t shared = config.integer("shared_expert_intermediate_size");
  const bool whole = shared % m.expert_hidden == 0;
  m.num_shared_experts = whole ? shared / m.expert_hidden : 1;
  m.shared_hidden = whole ? 0 : shared;
  m.shared_gate = true;
}

// Qwen1.5-MoE and Qwen2's. A window would be in every other layer of the first max_window_layers.
void read_qwen2_moe(const Config& config, ModelSpec& m) {
  config.required("num_key_value_heads");  // transformers would take 16
  config.only_boolean("use_sliding_window", false);
  read_llama(config, {}, m);
  m.qkv_bias = config.boolean_or("qkv_bias", true);
  read_qwen_experts(config, m);
  if (m.experts != Experts::none) read_gated_shared_expert(config, m);
}

// Qwen3-Next's and Qwen3.5's layers: those of the gated delta rule, and gated attention in each fourth or
// where layer_types say so. The three kinds of positions that a Qwen3.5 turns by are one in a text.
void read_delta_rule(const Config& config, ModelSpec& m) {
  config.required("num_key_value_heads");  // transformers would take 2
  config.required("head_dim");             // and 256
  m.norms_less_one = m.qk_norm = m.attention_gate = true;
  read_llama(config, {.rotary_part = 0.25, .mixed = true}, m);
  StateSpaceSpec& s = m.state_space;
  s.rule = StateRule::gated_delta;
  s.heads = config.integer_or("linear_num_value_heads", 32);
  s.head_dim = config.integer_or("linear_value_head_dim", 128);
  s.groups = config.integer_or("linear_num_key_heads", 16);
  s.state = config.integer_or("linear_key_head_dim", 128);
  s.kernel = config.integer_or("linear_conv_kernel_dim", 4);
  s.conv_bias = false;
  if (config.has("layer_types")) {
    const Json& types = config.required("layer_types");
    if (!types.is_array() || std::ssize(types) != m.num_layers)
      config.wrong("layer_types", "a list of one for each layer");
    for (std::int64_t layer = 0; layer < m.num_layers; ++layer) {
      const Json& type = types[static_cast<std::size_t>(layer)];
      if (type == "full_attention")
        s.attention_layers.push_back(layer);
      else if (type != "linear_attention")
        config.wrong("layer_types", "full_attention and linear_attention");
    }
  } else {
    const std::int64_t every = config.integer_or("full_attention_interval", 4);
    for (std::int64_t layer = every - 1; layer < m.num_layers; layer += every)
      s.attention_layers.push_back(layer);
  }
  if (std::ssize(s.attention_layers) == m.num_layers)
    config.wrong("layer_types", "a list with linear_attention at least once");
}

void read_qwen3_next(const Config& config, ModelSpec& m) {
  read_delta_rule(config, m);
  read_qwen_experts(config, m);
  if (m.experts == Experts::none)  // a Qwen3.5's layers, whose weights have other names
    config.wrong(config.integer_or("decoder_sparse_step", 1) > 1 ? "decoder_sparse_step" : "mlp_only_layers",
                 "what leaves experts in some layer");
  m.router.normalise = config.boolean_or("norm_topk_prob", true);
  read_gated_shared_expert(config, m);
}

// Layers without positions: each n-th. These alone would have a window.
void read_smollm3(const Config& config, ModelSpec& m) {
  if (config.has("sliding_window") && !config.has("layer_types"))
    config.only_boolean("use_sliding_window", false);
  read_llama(config, {.rope_theta = 2e6, .tied = true, .biased = false, .mlp_biased = true}, m);
  const std::int64_t every = config.integer_or("no_rope_layer_interval", 4);
  m.rope.unturned_every = every > m.num_layers ? 0 : every;
  if (!config.has("no_rope_layers")) return;
  const std::vector<double> turned = numbers(config, "no_rope_layers");
  if (std::ssize(turned) < m.num_layers) config.wrong("no_rope_layers", "a list of one for each layer");
  const auto first = std::find(turned.begin(), turned.begin() + m.num_layers, 0.0) - turned.begin();
  m.rope.unturned_every = first == m.num_layers ? 0 : first + 1;
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    if (m.is_turned(layer) != (turned[static_cast<std::size_t>(layer)] != 0))
      config.wrong("no_rope_layers", "ones with a zero in each n-th place");
}

void read_granite_factors(const Config& config, ModelSpec& m) {
  m.scales.embedding = config.real_or("embedding_multiplier", 1);
  const double attention = config.real_or("attention_multiplier", 1);
  m.scales.attention = attention == 1 / std::sqrt(static_cast<double>(m.head_dim)) ? 0 : attention;
  m.scales.residual = config.real_or("residual_multiplier", 1);
  m.scales.logits_divisor = config.real_or("logits_scaling", 1);
}

void read_granite(const Config& config, ModelSpec& m) {
  read_llama(config, {.dropped = true}, m);
  read_granite_factors(config, m);
}

// Those of a list, rising: in any order, and twice, transformers takes them too.
std::vector<std::int64_t> listed_layers(const Config& config, const char* key, const std::string& legal,
                                        const ModelSpec& m) {
  const Json& list = config.required(key);
  if (!list.is_array()) config.wrong(key, legal);
  std::vector<std::int64_t> layers;
  for (const Json& layer : list) {
    if (!layer.is_number_integer() || layer < 0 || layer >= m.num_layers) config.wrong(key, legal);
    layers.push_back(layer.get<std::int64_t>());
  }
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  return layers;
}

// LFM2's layers: those of a short convolution, and attention where layer_types or the older full_attn_idxs
// say so.
std::vector<std::int64_t> lfm2_attention_layers(const Config& config, const ModelSpec& m) {
  std::vector<std::int64_t> layers;
  if (config.has("layer_types") || !config.has("full_attn_idxs")) {
    const Json& types = config.required("layer_types");  // transformers would take attention in all
    if (!types.is_array() || std::ssize(types) != m.num_layers)
      config.wrong("layer_types", "a list of one for each layer");
    for (std::int64_t layer = 0; layer < m.num_layers; ++layer) {
      const Json& type = types[static_cast<std::size_t>(layer)];
      if (type == "full_attention")
        layers.push_back(layer);
      else if (type != "conv")
        config.wrong("layer_types", "full_attention and conv");
    }
    // A model without convolutions is one of Qwen3's kind here, whose weights have other names.
    if (std::ssize(layers) == m.num_layers) config.wrong("layer_types", "a list with conv at least once");
    return layers;
  }
  const char* const key = "full_attn_idxs";
  const std::string legal =
      fmt::format("a list of layers from 0 to {} without at least one", m.num_layers - 1);
  layers = listed_layers(config, key, legal, m);
  if (std::ssize(layers) == m.num_layers) config.wrong(key, legal);
  return layers;
}

void read_lfm2_layers(const Config& config, const char* mlp_hidden_key, ModelSpec& m) {
  config.required("num_key_value_heads");  // transformers would take 8
  read_llama(config,
             {.rope_theta = 1e6,
              .norm_eps = 1e-5,
              .tied = true,
              .norm_eps_key = "norm_eps",
              .mlp_hidden_key = mlp_hidden_key,
              .mixed = true},
             m);
  if (config.has("tie_embedding")) m.tied_embedding = config.boolean_or("tie_embedding", true);
  m.qk_norm = true;
  m.short_conv.kernel = config.integer_or("conv_L_cache", 3);
  m.short_conv.attention_layers = lfm2_attention_layers(config, m);
  config.only_boolean("conv_bias", false);
}

// Its MLPs are narrower than is said, unless that is told apart.
void read_lfm2(const Config& config, ModelSpec& m) {
  read_lfm2_layers(config, config.has("block_ff_dim") ? "block_ff_dim" : "intermediate_size", m);
  if (!config.boolean_or("block_auto_adjust_ff_dim", true)) return;
  m.mlp_hidden = 2 * m.mlp_hidden / 3;
  const char* const key = "block_ffn_dim_multiplier";
  if (config.names(key) && !config.has(key)) return;  // nor are they multiples then
  constexpr double largest = 2147483647;
  const double widened = config.real_or(key, 1) * static_cast<double>(m.mlp_hidden);
  if (!(widened >= 1) || widened > largest) config.wrong(key, "what makes an MLP of a legal width");
  const std::int64_t multiple = config.integer_or("block_multiple_of", 256);
  m.mlp_hidden = (static_cast<std::int64_t>(widened) + multiple - 1) / multiple * multiple;
}

void read_lfm2_moe(const Config& config, ModelSpec& m) {
  read_lfm2_layers(config, "intermediate_size", m);
  m.experts = Experts::deepseek;
  config.required("num_experts");            // transformers would take 32
  config.required("num_experts_per_tok");    // and 4
  config.required("moe_intermediate_size");  // and 1792
  m.num_experts = config.integer("num_experts");
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  m.num_dense_layers = config.has("num_dense_layers") && config.required("num_dense_layers") == 0
                           ? 0
                           : config.integer_or("num_dense_layers", 2);
  m.router.scores = RouterScores::sigmoid;
  m.router.normalise = config.boolean_or("norm_topk_prob", true);
  m.router.epsilon = m.router.normalise ? 1e-6 : 0;
  m.router.scale = config.real_or("routed_scaling_factor", 1);
  config.only_boolean("use_expert_bias", true);
}

// What a step is brought to, which has to be nothing.
void read_step_limit(const Config& config, const char* key = "time_step_limit") {
  const Json infinity = {{"__float__", "Infinity"}};  // which JSON has no word for
  if (config.has(key) && config.required(key) != Json::array({0.0, infinity}))
    config.wrong(key, fmt::format("null or [0.0, {}]", infinity.dump()));
}

// Beside the sizes of a state space, as Bamba, Granite and Falcon-H1 say it.
void read_mamba_convolution(const Config& config, StateSpaceSpec& s) {
  s.kernel = config.integer_or("mamba_d_conv", 4);
  s.conv_bias = config.boolean_or("mamba_conv_bias", true);
  s.chunk = config.integer_or("mamba_chunk_size", 256);
  config.only_boolean("mamba_proj_bias", false);
  read_step_limit(config);
}

// Mamba-2's mixer in layers that are not attention_layers.
void read_state_space(const Config& config, std::vector<std::int64_t> attention_layers, ModelSpec& m) {
  if (std::ssize(attention_layers) == m.num_layers) return;
  StateSpaceSpec& s = m.state_space;
  s.attention_layers = std::move(attention_layers);
  s.heads = config.integer("mamba_n_heads");
  const std::int64_t width = config.integer_or("mamba_expand", 2) * m.hidden;
  if (width % s.heads != 0)
    config.wrong("mamba_n_heads", fmt::format("a divisor of mamba_expand x hidden_size = {}", width));
  s.head_dim = width / s.heads;
  if (config.has("mamba_d_head") && config.required("mamba_d_head") != "auto" &&
      config.required("mamba_d_head") != s.head_dim)
    config.wrong("mamba_d_head", fmt::format("mamba_expand x hidden_size / mamba_n_heads = {}", s.head_dim));
  s.groups = config.integer_or("mamba_n_groups", 1);
  if (s.groups < 1 || s.heads % s.groups != 0)
    config.wrong("mamba_n_groups", fmt::format("a divisor of mamba_n_heads = {}", s.heads));
  config.required("mamba_d_state");  // transformers would take 256
  s.state = config.integer("mamba_d_state");
  read_mamba_convolution(config, s);
}

void read_bamba(const Config& config, ModelSpec& m) {
  const char* const key = "attn_layer_indices";
  config.required("num_key_value_heads");  // transformers would take 8
  read_llama(config,
             {.norm_eps = 1e-5,
              .biased = false,
              .mlp_biased = true,
              .rotary_part = 0.5,
              .rotary_part_on_top = false},
             m);
  config.only_real("z_loss_coefficient", 0.0);
  std::vector<std::int64_t> layers;
  if (config.has(key))
    layers = listed_layers(config, key, fmt::format("a list of layers from 0 to {}", m.num_layers - 1), m);
  // A model that has no state space is one of Llama's kind here, whose weights have other names.
  if (std::ssize(layers) == m.num_layers) config.wrong(key, "a list that lacks at least one layer");
  read_state_space(config, std::move(layers), m);
}

// So many numbers above 0, or ones where there is no list.
std::vector<double> multipliers(const Config& config, const char* key, std::size_t count) {
  if (!config.has(key)) return std::vector<double>(count, 1.0);
  std::vector<double> values = numbers(config, key);
  if (values.size() != count) config.wrong(key, fmt::format("a list of {} numbers", count));
  return values;
}

// Falcon-H1: attention and a state space side by side in every layer. What multiplies attention's input, its
// keys and its output is one factor of scores and one of what it makes.
void read_falcon_h1(const Config& config, ModelSpec& m) {
  if (!config.names("num_key_value_heads"))
    config.required("num_key_value_heads");  // transformers would take 8
  read_llama(config, {.norm_eps = 1e-5}, m);
  StateSpaceSpec& s = m.state_space;
  s.beside_attention = true;
  for (const char* key : {"mamba_n_heads", "mamba_d_state"})
    config.required(key);                                            // it would take 128 and 256
  if (!config.names("mamba_d_ssm")) config.required("mamba_d_ssm");  // and 1024
  s.heads = config.integer("mamba_n_heads");
  const std::int64_t width =
      config.integer_or("mamba_d_ssm", config.integer_or("mamba_expand", 2) * m.hidden);
  if (width % s.heads != 0)
    config.wrong("mamba_n_heads", fmt::format("a divisor of the {} channels of a state space", width));
  s.head_dim = width / s.heads;
  if (config.has("mamba_d_head") && config.required("mamba_d_head") != "auto" &&
      config.required("mamba_d_head") != s.head_dim)
    config.wrong("mamba_d_head", fmt::format("{}, as mamba_n_heads has it,", s.head_dim));
  s.groups = config.integer_or("mamba_n_groups", 1);
  s.state = config.integer("mamba_d_state");
  read_mamba_convolution(config, s);
  s.norm = config.boolean_or("mamba_rms_norm", false);
  if (s.norm && config.boolean_or("mamba_norm_before_gate", true)) {
    config.required("mamba_norm_before_gate");  // transformers would take true
    config.wrong("mamba_norm_before_gate", "false beside mamba_rms_norm");
  }
  config.only_boolean("projectors_bias", false);
  ScaleSpec& scales = m.scales;
  scales.embedding = config.real_or("embedding_multiplier", 1);
  const double logits = config.real_or("lm_head_multiplier", 1);
  if (!(logits > 0)) config.wrong("lm_head_multiplier", "a number above 0");
  scales.logits_divisor = 1 / logits;
  const double in = config.real_or("attention_in_multiplier", 1), keys = config.real_or("key_multiplier", 1);
  if (const double of_scores = in * in * keys; of_scores != 1)
    scales.attention = of_scores / std::sqrt(static_cast<double>(m.head_dim));
  scales.attention_out = in * config.real_or("attention_out_multiplier", 1);
  const std::vector<double> of_mlp = multipliers(config, "mlp_multipliers", 2),
                            of_state = multipliers(config, "ssm_multipliers", scales.state_space.size());
  scales.mlp_gate = of_mlp[0];
  scales.mlp_out = of_mlp[1];
  for (std::size_t i = 0; i < of_state.size(); ++i)
    scales.state_space[i] = config.real_or("ssm_in_multiplier", 1) * of_state[i];
  scales.state_space_out = config.real_or("ssm_out_multiplier", 1);
}

// Weights are a softmax over the logits of those that are chosen.
void read_granite_experts(const Config& config, std::int64_t shared, ModelSpec& m) {
  m.experts = Experts::deepseek;
  m.num_experts = config.integer("num_local_experts");
  config.required("num_experts_per_tok");  // transformers would take 2, or 8
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("intermediate_size");
  m.num_shared_experts = shared > 0 ? 1 : 0;
  m.shared_hidden = shared == m.expert_hidden ? 0 : shared;
}

// Granite 3's mixtures, with an MLP for all tokens or without.
void read_granite_moe(const Config& config, bool shared, ModelSpec& m) {
  const char* const key = "shared_intermediate_size";
  m.fused_mlp = true;
  read_llama(config, {.biased = false}, m);
  read_granite_factors(config, m);
  config.required("num_local_experts");  // transformers would take 8
  const bool has_shared = shared && config.has(key) && config.required(key) != 0;
  read_granite_experts(config, has_shared ? config.integer(key) : 0, m);
  m.mlp_hidden = has_shared ? m.shared_width() : m.expert_hidden;  // of no layer
}

// Granite 4's: the MLP of each layer is the shared one, beside routed experts or without. In some all layers
// have attention.
void read_granite_hybrid(const Config& config, ModelSpec& m) {
  m.fused_mlp = true;
  read_llama(config, {.biased = false, .mixed = true}, m);
  config.required("num_local_experts");  // transformers would take 8
  m.mlp_hidden = config.integer("shared_intermediate_size");
  read_granite_factors(config, m);
  if (config.required("num_local_experts") != 0) read_granite_experts(config, m.mlp_hidden, m);
  if (config.text_or("position_embedding_type", "nope") == "rope")
    m.rope.unturned_every = 0;
  else
    m.rope.unturned_every = 1;
  config.only_text("position_embedding_type", "nope", {"nope", "rope"});
  const Json& types = config.required("layer_types");
  if (!types.is_array() || std::ssize(types) != m.num_layers)
    config.wrong("layer_types", "a list of one for each layer");
  std::vector<std::int64_t> layers;
  for (std::size_t i = 0; i < types.size(); ++i) {
    const bool attends = types[i] == "full_attention" || types[i] == "attention";
    if (!attends && types[i] != "linear_attention" && types[i] != "mamba")
      config.wrong("layer_types", "full_attention (attention) and linear_attention (mamba)");
    if (attends) layers.push_back(static_cast<std::int64_t>(i));
  }
  read_state_space(config, std::move(layers), m);
}

void read_olmo2(const Config& config, ModelSpec& m) {
  read_llama(config, {.norm_eps = 1e-5}, m);
  m.norm_place = NormPlace::after;
  m.qk_norm = m.qk_norm_whole = true;
}

// OLMo 2 with a window in all layers but each fourth, by default; positions are scaled where there is none.
void read_olmo3(const Config& config, ModelSpec& m) {
  constexpr double theta = 500000;
  if (!config.has("rope_parameters"))
    config.only_real("rope_theta", theta);  // transformers would take another one in layers without a window
  m.rope.local_theta = config.real_or("rope_theta", theta);
  read_llama(config, {.typed = true, .rope_theta = theta, .norm_eps = 1e-5}, m);
  if (!config.has("layer_types")) {
    m.window = {config.names("sliding_window") ? config.integer("sliding_window") : 4096, 4};
    // This many layers have no full one.
    if (m.num_layers < m.window.full_every) m.window.full_every = 0;
  }
  m.norm_place = NormPlace::after;
  m.qk_norm = m.qk_norm_whole = true;
}

// OLMoE: a mixture in every layer, of experts as wide as intermediate_size.
void read_olmoe(const Config& config, ModelSpec& m) {
  read_llama(config, {.norm_eps = 1e-5}, m);
  m.qk_norm = m.qk_norm_whole = true;
  m.experts = Experts::deepseek;
  m.num_experts = config.integer(config.has("num_experts") ? "num_experts" : "num_local_experts");
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = m.mlp_hidden;
  m.router.normalise = config.boolean_or("norm_topk_prob", false);
  config.only_null("clip_qkv");
  if (m.attention_width() != m.hidden)
    config.wrong("head_dim", fmt::format("{}, as its norms have it,", m.hidden / m.num_heads));
}

// Biases of attention's inputs by default, of what it hands on and of MLPs on request.
void read_seed_oss(const Config& config, ModelSpec& m) {
  config.required("head_dim");  // transformers would take 128
  read_llama(config, {.biased = true, .mlp_biased = true, .dropped = true}, m);
  m.attention_out_bias = config.boolean_or("attention_out_bias", false);
}

// Phi-3, and Phi-4 with it.
void read_phi3(const Config& config, ModelSpec& m) {
  m.fused_projections = true;
  config.only_real("resid_pdrop", 0.0);
  config.only_real("embd_pdrop", 0.0);
  read_llama(config, {.windowed = true, .norm_eps = 1e-5, .rotary_part = 1.0}, m);
}

// Biases of all projections, or of none.
void read_starcoder2(const Config& config, ModelSpec& m) {
  config.required("num_key_value_heads");  // transformers would take 2
  m.norm_kind = NormKind::layer;
  read_llama(config,
             {.activation = Activation::gelu,
              .windowed = true,
              .norm_eps = 1e-5,
              .tied = true,
              .biased = true,
              .norm_eps_key = "norm_epsilon",
              .bias_key = "use_bias",
              .dropped = true},
             m);
  m.mlp_bias = m.qkv_bias;
}

// StableLM, and StableLM 2 but for its largest.
void read_stablelm(const Config& config, ModelSpec& m) {
  config.required("num_key_value_heads");  // transformers would take 32
  m.norm_kind = NormKind::layer;
  m.parallel_residual = config.boolean_or("use_parallel_residual", false);
  read_llama(config, {.norm_eps = 1e-5, .norm_eps_key = "layer_norm_eps", .rotary_part = 0.25}, m);
  m.qkv_bias = config.boolean_or("use_qkv_bias", false);
  config.only_boolean("qk_layernorm", false);
  config.only_real("hidden_dropout", 0.0);
}

// NVIDIA's Nemotron-4 and Minitron.
void read_nemotron(const Config& config, ModelSpec& m) {
  m.norm_kind = NormKind::layer;
  m.norms_less_one = true;
  read_llama(config,
             {.activation = Activation::relu2,
              .norm_eps = 1e-5,
              .biased = false,
              .mlp_biased = true,
              .norm_eps_key = "norm_eps",
              .rotary_part = 0.5},
             m);
}

// Of what logit_scale multiplies logits with: transformers has the divisor's inverse.
void read_logit_scale(const Config& config, ModelSpec& m) {
  const double scale = config.real_or("logit_scale", 0.0625);
  if (!(scale > 0)) config.wrong("logit_scale", "a number above 0");
  m.scales.logits_divisor = 1 / scale;
}

// Command-R: attention and MLP of the same norm.
void read_cohere(const Config& config, bool typed, double theta, ModelSpec& m) {
  m.norm_kind = NormKind::layer_weight;
  m.parallel_residual = m.interleaved_rope = true;
  read_llama(config,
             {.typed = typed,
              .rope_theta = theta,
              .norm_eps = 1e-5,
              .tied = true,
              .biased = false,
              .norm_eps_key = "layer_norm_eps"},
             m);
  read_logit_scale(config, m);
  config.only_boolean("use_qk_norm", false);
}

// A window in all layers but each fourth, by default, and positions in these alone.
void read_turned_windows(const Config& config, ModelSpec& m, std::int64_t otherwise = 4096,
                         const char* interval = "sliding_window_pattern") {
  if (config.names("sliding_window")) config.required("sliding_window");
  WindowSpec window;
  if (config.has("layer_types")) {
    window = read_window(config, false, true, m);
  } else {
    window = {config.integer_or("sliding_window", otherwise), config.integer_or(interval, 4)};
    if (window.full_every > m.num_layers) window.full_every = 0;  // this many have no full one
    if (window.full_every == 1) window = {};
    if (window.size < m.max_seq) m.window = window;
  }
  if (window.full_first)
    config.wrong("layer_types", "sliding_attention in all layers or in all but each n-th");
  m.rope.unturned_every = window.size == 0 ? 1 : window.full_every;
}

// Command-R7B and Command A.
void read_cohere2(const Config& config, ModelSpec& m) {
  read_cohere(config, true, 1e4, m);
  read_turned_windows(config, m);
}

// Cohere's mixtures: experts beside attention of the same norm, LayerNorm or RMSNorm.
void read_cohere2_moe(const Config& config, ModelSpec& m) {
  const char *const shared = "num_shared_experts", *const kinds = "mlp_layer_types",
                    *const chosen = "expert_selection_fn";
  config.required("head_dim");  // transformers would take 128
  Json whole = config.object();
  if (config.has("rms_norm_eps")) whole["layer_norm_eps"] = config.required("rms_norm_eps");
  read_cohere(Config(whole, config.where()), true, 1e4, m);
  if (config.has("rms_norm_eps")) m.norm_kind = NormKind::rms;
  read_turned_windows(config, m);
  // Those would come first, and have windows and positions as another key says.
  const Json* const list = config.has(kinds) ? &config.required(kinds) : nullptr;
  if (list != nullptr && (!list->is_array() || std::any_of(list->begin(), list->end(), [](const Json& kind) {
        return kind != "sparse";
      })))
    config.wrong(kinds, "sparse in all layers");
  if (config.has("first_k_dense_replace") && config.required("first_k_dense_replace") != 0)
    config.wrong("first_k_dense_replace", "0");
  m.experts = Experts::deepseek;
  m.num_experts = config.integer_or(config.has("num_experts") ? "num_experts" : "num_local_experts", 8);
  m.experts_per_token = config.integer_or("num_experts_per_tok", 2);
  m.expert_hidden = m.mlp_hidden;
  m.num_shared_experts = config.has(shared) && config.required(shared) != 0 ? config.integer(shared) : 0;
  if (m.num_shared_experts > 0) config.only_text("shared_expert_combination_strategy", "average", {"sum"});
  config.only_text(chosen, "softmax", {"softmax", "sigmoid"});
  if (config.text_or(chosen, "softmax") == "softmax") return;
  m.router.scores = RouterScores::sigmoid;
  m.router.normalise = config.boolean_or("norm_topk_prob", true);
}

// GLM-4 of 2024 and, with norms behind attention and MLP too, of 2025.
void read_glm(const Config& config, bool glm4, ModelSpec& m) {
  config.required("num_key_value_heads");  // transformers would take 2
  config.required("head_dim");             // and 128
  m.fused_mlp = m.interleaved_rope = true;
  if (glm4) m.norm_place = NormPlace::both;
  read_llama(config, {.norm_eps = 1.5625e-7, .biased = true, .rotary_part = 0.5}, m);
  m.attention_out_bias = false;
}

// The first OLMo: norms without weights.
void read_olmo(const Config& config, ModelSpec& m) {
  constexpr double eps = 1e-5;  // whatever a configuration says
  m.norm_kind = NormKind::layer_plain;
  read_llama(config, {.biased = false}, m);
  m.norm_eps = eps;
  config.only_null("clip_qkv");
}

void read_ernie(const Config& config, ModelSpec& m) {
  config.required("head_dim");  // transformers would take 128
  m.interleaved_rope = true;
  read_llama(config,
             {.rope_theta = 500000, .norm_eps = 1e-5, .tied = true, .biased = false, .bias_key = "use_bias"},
             m);
  m.mlp_bias = m.qkv_bias;
}

// ERNIE 4.5's mixtures: routers choose by the probabilities of a softmax and biases beside them. What
// predicts more tokens is left out, as transformers leaves it.
void read_ernie_moe(const Config& config, ModelSpec& m) {
  const auto number = [&config](const char* name, const char* other) {
    return config.integer(config.has(name) ? name : other);
  };
  config.required("num_key_value_heads");  // transformers would take 4
  m.interleaved_rope = true;
  read_llama(config, {.rope_theta = 500000, .norm_eps = 1e-5, .tied = true, .bias_key = "use_bias"}, m);
  config.only_real("moe_norm_min", 1e-12);  // what the sum of a token's weights is brought up to
  const char* const first = "moe_layer_start_index";
  m.num_dense_layers = config.has(first) && config.required(first) == 0 ? 0 : config.integer_or(first, 1);
  if (m.num_dense_layers >= m.num_layers) config.wrong(first, fmt::format("0 to {}", m.num_layers - 1));
  for (const auto& [key, only] :
       {std::pair{"moe_layer_interval", std::int64_t{1}}, {"moe_layer_end_index", m.num_layers - 1}})
    if (config.has(key) && config.required(key) != only && config.required(key) != -1)
      config.wrong(key, fmt::format("{}", only));
  m.experts = Experts::deepseek;
  m.num_experts = number("moe_num_experts", "num_experts");
  m.experts_per_token = number("moe_k", "num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  const char* const shared = "moe_num_shared_experts";
  m.num_shared_experts =
      config.has(shared) && config.required(shared) == 0 ? 0 : config.integer_or(shared, 2);
}

void read_helium(const Config& config, ModelSpec& m) {
  config.required("num_key_value_heads");  // transformers would take 20
  config.required("head_dim");             // and 128
  m.interleaved_rope = true;
  read_llama(config, {.rope_theta = 100000, .norm_eps = 1e-8, .biased = false, .mlp_biased = true}, m);
  m.attention_out_bias = false;
  if (m.attention_width() != m.hidden)
    config.wrong("head_dim",
                 fmt::format("hidden_size / num_attention_heads = {} / {}", m.hidden, m.num_heads));
}

// Jais 2: LayerNorm, squared ReLUs, biases of all projections.
void read_jais2(const Config& config, ModelSpec& m) {
  m.norm_kind = NormKind::layer;
  read_llama(config,
             {.activation = Activation::relu2,
              .norm_eps = 1e-5,
              .biased = true,
              .mlp_biased = true,
              .norm_eps_key = "layer_norm_eps"},
             m);
  m.mlp_bias = config.boolean_or("mlp_bias", true);
}

// Llamas by other names, InternLM3 and IQuest-Coder.
void read_llama_relative(const Config& config, ModelSpec& m) {
  for (const char* key : {"num_key_value_heads", "head_dim"})
    config.required(key);  // transformers would take numbers of its own
  for (const char* key : {"qkv_bias", "bias", "use_sliding_window"}) config.only_boolean(key, false);
  config.only_null("clip_qkv");
  read_llama(config, {.norm_eps = 1e-5, .biased = false, .mlp_biased = true}, m);
}

// What Gemma 2 and 3 share; the window in all layers but each n-th, by default where layer_types is missing.
void read_gemma(const Config& config, double theta, std::int64_t full_every, ModelSpec& m) {
  m.norm_place = NormPlace::both;
  m.norms_less_one = true;
  config.required("num_key_value_heads");
  config.required("head_dim");
  config.required("query_pre_attn_scalar");
  read_llama(config, {.activation = Activation::geglu, .typed = true, .rope_theta = theta, .tied = true}, m);
  if (!config.has("layer_types")) {
    // As many layers as this have no full one.
    m.window = {config.integer("sliding_window"), full_every > m.num_layers ? 0 : full_every};
    if (full_every == 1) m.window = {};
  }
  m.scales.embedding = std::sqrt(static_cast<double>(m.hidden));
  const std::int64_t scalar = config.integer("query_pre_attn_scalar");
  if (scalar != m.head_dim) m.scales.attention = 1 / std::sqrt(static_cast<double>(scalar));
  config.only_boolean("use_bidirectional_attention", false);
}

// Null: none.
double read_cap(const Config& config, const char* key, double otherwise) {
  return config.names(key) && !config.has(key) ? 0 : config.real_or(key, otherwise);
}

// The first one: norms before alone, no window. "gelu" is what its first files call the tanh form.
void read_gemma1(const Config& config, ModelSpec& m) {
  m.norms_less_one = true;
  config.required("num_key_value_heads");
  config.required("head_dim");
  read_llama(config, {.activation = Activation::geglu, .tied = true, .biased = false, .gelu_is_tanh = true},
             m);
  m.scales.embedding = std::sqrt(static_cast<double>(m.hidden));
  config.only_boolean("use_bidirectional_attention", false);
}

void read_gemma2(const Config& config, ModelSpec& m) {
  read_gemma(config, 1e4, 2, m);
  m.caps = {read_cap(config, "attn_logit_softcapping", 50), read_cap(config, "final_logit_softcapping", 30)};
}

// VaultGemma: a Gemma 2 without norms behind attention and MLP.
void read_vaultgemma(const Config& config, ModelSpec& m) {
  read_gemma2(config, m);
  m.norm_place = NormPlace::before;
}

// Its text alone. Layers with a window have positions of their own; without layer_types each sixth has none.
void read_gemma3(const Config& config, ModelSpec& m) {
  m.qk_norm = true;
  m.rope.local_theta = config.real_or("rope_local_base_freq", 1e4);
  read_gemma(config, 1e6, config.integer_or("sliding_window_pattern", 6), m);
  config.only_null("attn_logit_softcapping");
  config.only_null("final_logit_softcapping");
}

// By which YaRN sharpens DeepSeek's scores, beside what it does to positions: the square of a temperature.
void read_sharpening(const Config& config, ModelSpec& m) {
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!config.has(key) || m.rope.scaling == RopeScaling::none) continue;
    const std::string where = fmt::format("{}, {}", config.where(), key);
    const double by = Config(config.required(key), where).real_or("mscale_all_dim", 0);
    if (by == 0) continue;
    const double sharper = m.rope.factor <= 1 ? 1 : 0.1 * by * std::log(m.rope.factor) + 1;
    m.scales.attention = sharper * sharper / std::sqrt(static_cast<double>(m.head_dim));
  }
}

std::int64_t read_dense_layers(const Config& config, std::int64_t otherwise) {
  const char* const key = "first_k_dense_replace";
  return config.has(key) && config.required(key) == 0 ? 0 : config.integer_or(key, otherwise);
}

// Where the key is missing transformers would take 1, but of weights that are there alone.
void read_module(const Config& config, ModelSpec& m) {
  for (const char* key : {"num_nextn_predict_layers", "num_mtp_layers"})
    if (config.has(key) && config.required(key) != 0) m.num_mtp_layers = config.integer(key);
}

void read_deepseek_experts(const Config& config, std::int64_t dense, double scale, ModelSpec& m) {
  m.experts = Experts::deepseek;
  m.num_dense_layers = dense;
  m.num_experts = config.integer("n_routed_experts");
  m.num_shared_experts = config.integer("n_shared_experts");
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  m.router.scale = config.real_or("routed_scaling_factor", scale);
  if (config.has("moe_layer_freq") && config.required("moe_layer_freq") != 1)
    config.wrong("moe_layer_freq", "1");
}

// Of `best` of a group's scores.
void read_groups(const Config& config, std::int64_t groups, std::int64_t most, std::int64_t best,
                 ModelSpec& m) {
  m.router.groups = config.integer_or("n_group", groups);
  m.router.most_groups = config.integer_or("topk_group", most);
  if (m.router.most_groups == m.router.groups) return;
  m.router.group_best = m.experts_per_token / m.router.most_groups == best ? 0 : best;
}

// Multi-head latent attention, in layers that are a Llama's otherwise.
void read_latent(const Config& config, LlamaDefaults defaults, ModelSpec& m) {
  for (const char* key : {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"})
    config.required(key);
  m.rotary_dim = config.integer("qk_rope_head_dim");
  defaults.head_dim = config.integer("qk_nope_head_dim") + m.rotary_dim;
  read_llama(config, defaults, m);
  m.kv_rank = config.integer("kv_lora_rank");
  if (!config.names("q_lora_rank")) config.required("q_lora_rank");  // null says that there is none
  m.q_rank = config.integer_or("q_lora_rank", 0);
  m.value_head_dim = config.integer("v_head_dim");
  config.only_boolean("rope_interleave", true);
  read_sharpening(config, m);
}

// By sigmoids, and biases beside them, of the best groups (DeepSeek-V3).
void read_sigmoid_routing(const Config& config, bool normalise, std::int64_t groups, std::int64_t most,
                          ModelSpec& m) {
  config.only_text("scoring_func", "sigmoid", {"sigmoid"});
  config.only_text("topk_method", "noaux_tc", {"noaux_tc"});
  m.router.scores = RouterScores::sigmoid;
  m.router.normalise = config.boolean_or("norm_topk_prob", normalise);
  read_groups(config, groups, most, 2, m);
}

// DeepSeek-V3, and Kimi K2 with it. It may have a module that predicts one more token.
void read_deepseek3(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_layers(config, 3);
  read_latent(config, {}, m);
  read_module(config, m);
  if (dense >= m.num_layers) return;
  read_deepseek_experts(config, dense, 2.5, m);
  read_sigmoid_routing(config, true, 8, 4, m);
}

// Layers with an MLP in place of experts: the first ones, as mlp_layer_types has them, or so many.
std::int64_t read_dense_kinds(const Config& config, std::int64_t otherwise) {
  const char* const key = "mlp_layer_types";
  std::int64_t dense = otherwise;
  if (config.has(key)) {
    const Json& kinds = config.required(key);
    if (!kinds.is_array() || std::ssize(kinds) != config.integer("num_hidden_layers"))
      config.wrong(key, "a list of one for each layer");
    const auto sparse = [](const Json& kind) { return kind == "sparse"; };
    const auto first = std::find_if(kinds.begin(), kinds.end(), sparse);
    dense = first - kinds.begin();
    if (!std::all_of(first, kinds.end(), sparse) ||
        std::any_of(kinds.begin(), first, [](const Json& kind) { return kind != "dense"; }))
      config.wrong(key, "dense, so many times, and sparse behind them");
  }
  if (read_dense_layers(config, dense) != dense)
    config.wrong("first_k_dense_replace", fmt::format("{}, as {} has it,", dense, key));
  return dense;
}

// GLM-4.7-Flash: DeepSeek-V3's layers without groups of experts.
void read_glm4_moe_lite(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_kinds(config, 1);
  read_latent(config, {.norm_eps = 1e-5}, m);
  read_module(config, m);
  if (dense >= m.num_layers) return;
  read_deepseek_experts(config, dense, 1.8, m);
  read_sigmoid_routing(config, true, 1, 1, m);
}

// Youtu-LLM: DeepSeek-V3's attention alone.
void read_youtu(const Config& config, ModelSpec& m) { read_latent(config, {.tied = true}, m); }

void read_deepseek2(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_layers(config, 0);
  read_latent(config, {}, m);
  if (dense >= m.num_layers) return;
  read_deepseek_experts(config, dense, 1, m);
  config.only_text("scoring_func", "softmax", {"softmax"});
  config.only_text("topk_method", "greedy", {"greedy", "group_limited_greedy"});
  config.only_boolean("norm_topk_prob", false);  // transformers does not heed it
  m.router.normalise = false;
  if (config.text_or("topk_method", "greedy") != "greedy") read_groups(config, 1, 1, 1, m);
}

// GLM-4.5: DeepSeek-V3's experts behind attention of Qwen's kind, a part of each head turned.
void read_glm4_moe(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_layers(config, 1);
  config.required("num_key_value_heads");  // transformers would take 8
  read_llama(config, {.norm_eps = 1e-5, .biased = false, .rotary_part = 0.5}, m);
  m.attention_out_bias = false;
  m.qk_norm = config.boolean_or("use_qk_norm", false);
  read_module(config, m);
  if (dense >= m.num_layers) config.wrong("first_k_dense_replace", fmt::format("0 to {}", m.num_layers - 1));
  read_deepseek_experts(config, dense, 1, m);
  read_sigmoid_routing(config, true, 1, 1, m);
}

// Solar Open: the same in every layer, whole heads turned.
void read_solar(const Config& config, ModelSpec& m) {
  config.required("num_key_value_heads");  // transformers would take 8
  config.required("head_dim");             // and 128
  read_llama(
      config,
      {.rope_theta = 1e6, .norm_eps = 1e-5, .biased = false, .mlp_hidden_key = "moe_intermediate_size"}, m);
  m.attention_out_bias = false;
  read_deepseek_experts(config, read_dense_layers(config, 0), 1, m);
  if (m.num_dense_layers > 0) config.wrong("first_k_dense_replace", "0");
  read_sigmoid_routing(config, true, 1, 1, m);
}

// dots.llm1: the same behind norms of heads, and positions of whole heads. A window would be in the layers
// from max_window_layers on.
void read_dots1(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_layers(config, 0);
  config.required("num_key_value_heads");  // transformers would take 32
  if (!config.has("layer_types") && !(config.names("sliding_window") && !config.has("sliding_window")) &&
      config.integer_or("max_window_layers", 62) < config.integer("num_hidden_layers"))
    config.wrong("max_window_layers", "at least num_hidden_layers");
  read_llama(config, {}, m);
  m.qk_norm = true;
  if (dense >= m.num_layers) config.wrong("first_k_dense_replace", fmt::format("0 to {}", m.num_layers - 1));
  read_deepseek_experts(config, dense, 1, m);
  read_sigmoid_routing(config, false, 1, 1, m);
}

// MiniMax-M2: a mixture of Mixtral's kind in every layer, routed as DeepSeek-V3's, behind norms over all
// queries and all keys.
void read_minimax_m2(const Config& config, ModelSpec& m) {
  for (const char* key : {"num_key_value_heads", "head_dim"})
    config.required(key);  // transformers would take 8 and 128
  read_llama(config, {.rope_theta = 5e6, .rotary_part = 1.0}, m);
  if (config.has("rotary_dim")) {  // of published configurations
    const std::int64_t turned = config.integer("rotary_dim");
    m.rotary_dim = turned == m.head_dim ? 0 : turned;
  }
  m.qk_norm = m.qk_norm_whole = true;
  m.experts = Experts::mixtral;
  m.num_experts = config.integer("num_local_experts");
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = m.mlp_hidden;
  config.only_real("router_jitter_noise", 0.0);
  config.only_text("scoring_func", "sigmoid", {"sigmoid"});
  m.router.scores = RouterScores::sigmoid;
}

// A letter for each layer, as NVIDIA's files have them, or a list of words.
std::string read_layer_pattern(const Config& config) {
  for (const char* key : {"layers_block_type", "layer_types"}) {
    if (!config.has(key)) continue;
    const std::pair<const char*, char> words[] = {
        {"linear_attention", 'M'}, {"mamba", 'M'}, {"full_attention", '*'},
        {"attention", '*'},        {"mlp", '-'},   {"moe", 'E'}};
    const Json& list = config.required(key);
    std::string pattern;
    for (const Json& word : list) {
      const auto* found = std::find_if(std::begin(words), std::end(words),
                                       [&word](const auto& known) { return word == known.first; });
      if (!list.is_array() || found == std::end(words))
        config.wrong(key, "a list of linear_attention (mamba), full_attention (attention), mlp and moe");
      pattern += found->second;
    }
    if (pattern.empty()) config.wrong(key, "a list of one for each layer");
    return pattern;
  }
  const char* const key = "hybrid_override_pattern";
  config.required(key);
  const std::string pattern = config.text_or(key, "");
  if (pattern.empty() || pattern.find_first_not_of("M*-E") != std::string::npos)
    config.wrong(key, "a text of M, *, - and E, one for each layer,");
  return pattern;
}

// What YaRN's positions have beside them in these models.
double read_query_growth(const Config& config, ModelSpec& m) {
  const char* const key = config.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  config.required(key);  // transformers would take some
  const std::string where = fmt::format("{}, {}", config.where(), key);
  const Config rope(config.required(key), where);
  rope.required("llama_4_scaling_beta");
  const double growth = rope.real_or("llama_4_scaling_beta", 0);
  if (growth != 0 && m.rope.scaling != RopeScaling::yarn) rope.only_text("rope_type", "default", {"yarn"});
  return growth;
}

// Ministral 3: Mistral's layers, with queries that grow with their position.
void read_ministral3(const Config& config, ModelSpec& m) {
  for (const char* key : {"num_key_value_heads", "head_dim"})
    config.required(key);  // transformers would take 8 and 128
  read_llama(config, {.windowed = true, .norm_eps = 1e-5}, m);
  m.rope.query_growth = read_query_growth(config, m);
}

// Tencent's Hunyuan, without experts: norms of heads behind the rotation. What its files call dynamic is a
// larger theta, whatever the length, where they have an alpha.
void read_hunyuan(const Config& config, ModelSpec& m) {
  config.only_boolean("use_qk_norm", true);
  config.only_boolean("use_cla", false);
  read_llama(config, {.norm_eps = 1e-5, .biased = false}, m);
  m.qk_norm = m.qk_norm_turned = true;
  if (m.rope.scaling != RopeScaling::dynamic) return;
  const char* const key = config.has("rope_scaling") ? "rope_scaling" : "rope_parameters";
  const double alpha = Config(config.required(key), config.where()).real_or("alpha", 0);
  if (!(alpha > 0) || m.head_dim < 4) return;
  RopeSpec larger;
  const double width = static_cast<double>(m.head_dim);
  larger.theta = m.rope.theta * std::pow(alpha, width / (width - 2));
  m.rope = larger;
  m.max_seq = config.integer("max_position_embeddings");
}

// A number for all layers, or a list of the same one for each.
std::int64_t same_in_all(const Config& config, const char* key) {
  const Json& list = config.required(key);
  if (!list.is_array()) return config.integer(key);
  if (list.empty() || !list.front().is_number_unsigned() ||
      std::any_of(list.begin(), list.end(), [&list](const Json& one) { return one != list.front(); }))
    config.wrong(key, "a number, or a list of the same one for each layer,");
  return list.front().get<std::int64_t>();
}

// Its mixtures: experts in every layer beside one for all tokens, all as wide.
void read_hunyuan_moe(const Config& config, ModelSpec& m) {
  read_hunyuan(config, m);
  m.experts = Experts::deepseek;
  m.num_experts = same_in_all(config, config.has("num_experts") ? "num_experts" : "num_local_experts");
  m.experts_per_token = same_in_all(config, config.has("moe_topk") ? "moe_topk" : "num_experts_per_tok");
  m.expert_hidden = m.mlp_hidden;
  m.num_shared_experts = 1;
}

// What transformers calls otherwise elsewhere; both names are read.
const char* one_of(const Config& config, const char* name, const char* other) {
  return config.has(other) ? other : name;
}

void read_nemotron_experts(const Config& config, ModelSpec& m) {
  if (m.num_expert_layers() == 0) return;
  read_deepseek_experts(config, 0, 1, m);
  // There is one MLP for all tokens, whatever the number of shared experts.
  if (m.num_shared_experts != 1) config.wrong("n_shared_experts", "1");
  const std::int64_t shared = config.integer("moe_shared_expert_intermediate_size");
  m.shared_hidden = shared == m.expert_hidden ? 0 : shared;
  m.expert_latent = config.integer_or("moe_latent_size", 0);
  read_sigmoid_routing(config, true, 1, 1, m);
}

// Nemotron-H, Nemotron Nano 2 and Nemotron 3: layers of one part each, without positions. Its module that
// predicts more tokens is left out, as transformers leaves it. transformers brings steps up to time_step_min,
// which the code that these models were trained by does not, nor is it done here.
void read_nemotron_h(const Config& config, ModelSpec& m) {
  m.family = Family::llama;
  m.layer_pattern = read_layer_pattern(config);
  m.num_layers = std::ssize(m.layer_pattern);
  if (config.has("num_hidden_layers") && config.integer("num_hidden_layers") != m.num_layers)
    config.wrong("num_hidden_layers", fmt::format("{}, as the pattern of layers has it,", m.num_layers));
  m.hidden = config.integer("hidden_size");
  m.num_heads = config.integer("num_attention_heads");
  if (!config.names("num_key_value_heads"))
    config.required("num_key_value_heads");  // transformers would take 8
  m.num_kv_heads = config.integer_or("num_key_value_heads", m.num_heads);
  // And 128, which is what the first files call otherwise.
  m.head_dim = config.integer(
      config.has("attention_head_dim") && !config.has("head_dim") ? "attention_head_dim" : "head_dim");
  m.mlp_hidden = config.integer("intermediate_size");
  m.vocab = config.integer("vocab_size");
  m.max_seq = config.integer("max_position_embeddings");
  m.tied_embedding = config.boolean_or("tie_word_embeddings", false);
  m.norm_eps = config.real_or("layer_norm_epsilon", 1e-5);
  m.rope.unturned_every = 1;
  m.activation = Activation::relu2;
  config.only_text("mlp_hidden_act", "relu2", {"relu2"});
  config.only_boolean("attention_bias", false);
  config.only_real("attention_dropout", 0.0);
  config.only_real("hidden_dropout", 0.0);
  config.only_null("sliding_window");
  m.mlp_bias = m.num_expert_layers() == 0 && config.boolean_or("mlp_bias", false);
  if (!m.mlp_bias) config.only_boolean("mlp_bias", false);
  read_nemotron_experts(config, m);
  if (m.num_state_space_layers() == 0) return;
  StateSpaceSpec& s = m.state_space;
  s.heads = config.integer("mamba_num_heads");
  s.head_dim = config.integer("mamba_head_dim");
  s.groups = config.integer(one_of(config, "n_groups", "mamba_n_groups"));
  config.required("ssm_state_size");
  s.state = config.integer("ssm_state_size");
  s.kernel = config.integer_or(one_of(config, "conv_kernel", "mamba_d_conv"), 4);
  s.conv_bias = config.boolean_or(one_of(config, "use_conv_bias", "mamba_conv_bias"), true);
  s.chunk = config.integer_or(one_of(config, "chunk_size", "mamba_chunk_size"), 128);
  config.only_text("mamba_hidden_act", "silu", {"silu"});
  config.only_boolean("use_bias", false);
  config.only_boolean("mamba_proj_bias", false);
  read_step_limit(config, one_of(config, "time_step_limit", "mamba_dt_limit"));
}

// EXAONE 4: norms behind attention and MLP, and of heads. Without a window all layers have positions.
void read_exaone4(const Config& config, ModelSpec& m) {
  config.required("num_key_value_heads");  // transformers would take 32
  read_llama(config, {.typed = true, .norm_eps = 1e-5}, m);
  m.norm_place = NormPlace::after;
  m.qk_norm = true;
  if (!config.names("sliding_window") || config.has("sliding_window")) read_turned_windows(config, m);
}

// K-EXAONE: EXAONE 4's windows and norms of heads, norms before, DeepSeek-V3's experts. What predicts more
// tokens is left out, as transformers leaves it.
void read_exaone_moe(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_kinds(config, read_dense_layers(config, 1));
  config.required("num_key_value_heads");  // transformers would take 32
  read_llama(config, {.typed = true, .norm_eps = 1e-5}, m);
  m.qk_norm = true;
  read_turned_windows(config, m);
  if (m.window.size == 0 &&
      m.rope.unturned_every == 0)  // a dots.llm1's layers, whose biases have another name
    config.wrong("sliding_window", "less than max_position_embeddings, where all layers have it,");
  if (dense >= m.num_layers) config.wrong("first_k_dense_replace", fmt::format("0 to {}", m.num_layers - 1));
  m.experts = Experts::deepseek;
  m.num_dense_layers = dense;
  m.num_experts = config.integer(config.has("num_experts") ? "num_experts" : "num_local_experts");
  m.num_shared_experts = config.integer_or("num_shared_experts", 1);
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  m.router.scale = config.real_or("routed_scaling_factor", 2.5);
  read_sigmoid_routing(config, true, 1, 1, m);
}

// Qwen3.5's mixtures: Qwen3-Next's layers, all of them with experts.
void read_qwen3_5_moe(const Config& config, ModelSpec& m) {
  Json whole = config.object();
  whole.emplace("intermediate_size", config.integer("moe_intermediate_size"));  // of no layer
  for (const char* other : {"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"}) whole.erase(other);
  read_qwen3_next(Config(whole, config.where()), m);
}

// Hunyuan 3: DeepSeek-V3's experts behind norms of heads. What predicts more tokens is left out, as
// transformers leaves it out.
void read_hy_v3(const Config& config, ModelSpec& m) {
  constexpr double theta = 11158840, scale = 2.826;
  for (const char* key : {"num_key_value_heads", "head_dim"})
    config.required(key);  // transformers would take 8 and 128
  const std::int64_t dense = read_dense_kinds(config, read_dense_layers(config, 1));
  read_llama(config, {.rope_theta = theta, .norm_eps = 1e-5, .biased = false}, m);
  m.qk_norm = true;
  if (dense >= m.num_layers) config.wrong("mlp_layer_types", "sparse in some layer");
  m.experts = Experts::deepseek;
  m.num_dense_layers = dense;
  m.num_experts = config.integer(one_of(config, "num_experts", "num_local_experts"));
  m.num_shared_experts = config.integer_or("num_shared_experts", 1);
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  m.router = {.scores = RouterScores::sigmoid, .scale = config.real_or("router_scaling_factor", scale)};
}

// Sarvam: GLM-4.5's layers with whole heads turned. Its first files say some numbers otherwise.
void read_sarvam(const Config& config, ModelSpec& m) {
  constexpr double theta = 8e6;
  Json whole = config.object();
  for (const auto& [ours, theirs] : {std::pair{"n_routed_experts", "num_experts"},
                                     {"n_shared_experts", "num_shared_experts"},
                                     {"attention_bias", "use_qkv_bias"}})
    if (config.has(theirs)) whole.emplace(ours, config.required(theirs));
  whole.emplace("n_shared_experts", 1);
  whole.emplace("routed_scaling_factor", 2.5);
  whole.emplace("use_qk_norm", true);
  whole.emplace("rms_norm_eps", 1e-6);
  whole.emplace("partial_rotary_factor", 1.0);
  whole.emplace("rope_theta", theta);
  read_glm4_moe(Config(whole, config.where()), m);
}

// EXAONE 3 and 3.5: a Llama whose files have names of their own.
void read_exaone(const Config& config, ModelSpec& m) {
  constexpr double theta = 500000;
  Json whole = config.object();
  for (const auto& [ours, theirs] : {std::pair{"num_hidden_layers", "num_layers"},
                                     {"rms_norm_eps", "layer_norm_epsilon"},
                                     {"hidden_act", "activation_function"}})
    if (config.has(theirs)) whole.emplace(ours, config.required(theirs));
  const Config named(whole, config.where());
  named.required("num_key_value_heads");  // transformers would take 8
  read_llama(named, {.rope_theta = theta, .norm_eps = 1e-5, .biased = false, .mlp_biased = true}, m);
}

// Code World Model: a Llama with a window in all layers but the first of each four, by default.
void read_cwm(const Config& config, ModelSpec& m) {
  for (const char* key : {"num_key_value_heads", "head_dim"})
    config.required(key);                                               // transformers would take 8 and 128
  if (!config.has("rope_scaling")) config.required("rope_parameters");  // and scale positions
  read_llama(config, {.typed = true, .rope_theta = 1e6, .norm_eps = 1e-5}, m);
  if (!config.has("layer_types")) m.window = {config.integer("sliding_window"), 4, true};
  if (m.window.size >= m.max_seq) m.window = {};
}

// Sinks, and a window in all layers but the first of each four, by default. Thetas may be told layer by
// layer, of which 0 would leave positions out.
void read_granite_windows(const Config& config, ModelSpec& m) {
  constexpr std::int64_t window = 128;
  m.attention_sinks = true;
  if (config.has("layer_types"))
    read_window(config, false, true, m);
  else
    m.window = {config.integer_or("sliding_window", window), 4, true};
  if (m.window.size >= m.max_seq) m.window = {};
  const char* const key = "layer_rope_theta";
  if (!config.has(key)) return;
  const std::vector<double> thetas = numbers(config, key);
  if (std::ssize(thetas) != m.num_layers ||
      std::any_of(thetas.begin(), thetas.end(),
                  [&thetas](double theta) { return theta == 0 || theta != thetas.front(); }))
    config.wrong(key, "a list of the same number above 0 for each layer");
  m.rope.theta = thetas.front();
}

// Granite's factors, windows and sinks.
void read_granite_swa(const Config& config, ModelSpec& m) {
  config.required("num_key_value_heads");  // transformers would take 4
  read_llama(config, {.typed = true, .norm_eps = 1e-5, .tied = true, .dropped = true, .mixed = true}, m);
  read_granite_factors(config, m);
  read_granite_windows(config, m);
}

// HyperCLOVA X SEED Think: Granite's factors, a factor of logits and not a divisor, and norms behind
// attention and MLP too.
void read_hyperclovax(const Config& config, ModelSpec& m) {
  const char* const factor = "logits_scaling";
  m.norm_place = NormPlace::both;
  config.only_boolean("use_post_norm", true);
  read_llama(config, {.dropped = true}, m);
  const double own = 1 / std::sqrt(static_cast<double>(m.head_dim));
  Json whole = config.object();
  if (!config.has("attention_multiplier")) whole["attention_multiplier"] = own;
  read_granite_factors(Config(whole, config.where()), m);
  const double scale = config.real_or(factor, 1);
  if (!(scale > 0)) config.wrong(factor, "a number above 0");
  m.scales.logits_divisor = 1 / scale;
}

// Mellum 2: Qwen3's experts, a window in some layers, and positions of their own there. What predicts more
// tokens is left out, as transformers leaves it out.
void read_mellum(const Config& config, ModelSpec& m) {
  for (const char* key : {"num_key_value_heads", "head_dim"})
    config.required(key);  // transformers would take 4 and 128
  const std::int64_t dense = read_dense_kinds(config, 0);
  m.rope.local_theta = 1e4;
  read_llama(config, {.typed = true, .rope_theta = 5e5}, m);
  m.qk_norm = true;
  if (dense >= m.num_layers) config.wrong("mlp_layer_types", "sparse in some layer");
  m.experts = Experts::deepseek;
  m.num_dense_layers = dense;
  m.num_experts = config.integer(one_of(config, "num_experts", "num_local_experts"));
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  m.router.normalise = config.boolean_or("norm_topk_prob", true);
}

// FlexOlmo: OLMo 2's layers with OLMoE's experts.
void read_flex_olmo(const Config& config, ModelSpec& m) {
  read_llama(config, {.rope_theta = 500000}, m);
  m.norm_place = NormPlace::after;
  m.qk_norm = m.qk_norm_whole = true;
  m.experts = Experts::deepseek;
  m.num_experts = config.integer(one_of(config, "num_experts", "num_local_experts"));
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = m.mlp_hidden;
  m.router.normalise = config.boolean_or("norm_topk_prob", false);
}

// Arcee's Trinity: norms before and behind, gated attention, positions where there is a window alone, and
// DeepSeek-V3's experts.
void read_afmoe(const Config& config, ModelSpec& m) {
  const char* const dense = "num_dense_layers";
  for (const char* key : {"num_key_value_heads", "head_dim"})
    config.required(key);  // transformers would take as many as queries, and 128
  m.norm_place = NormPlace::both;
  read_llama(config, {.typed = true, .norm_eps = 1e-5}, m);
  m.qk_norm = m.attention_gate = true;
  read_turned_windows(config, m, 1024, "global_attn_every_n_layers");
  if (config.boolean_or("mup_enabled", false)) m.scales.embedding = std::sqrt(static_cast<double>(m.hidden));
  m.experts = Experts::deepseek;
  m.num_dense_layers = config.has(dense) && config.required(dense) == 0 ? 0 : config.integer_or(dense, 1);
  if (m.num_dense_layers >= m.num_layers) config.wrong(dense, fmt::format("0 to {}", m.num_layers - 1));
  m.num_experts = config.integer(one_of(config, "num_experts", "num_local_experts"));
  m.num_shared_experts = config.integer_or("num_shared_experts", 2);
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  m.router = {.scores = RouterScores::sigmoid, .scale = config.real_or("route_scale", 1)};
}

// Apertus: an activation that learns, and norms of heads.
void read_apertus(const Config& config, ModelSpec& m) {
  if (!config.has("rope_scaling")) config.required("rope_parameters");  // transformers would scale positions
  read_llama(config, {.activation = Activation::xielu, .rope_theta = 12e6, .norm_eps = 1e-5}, m);
  m.qk_norm = true;
}

// Of a Gemma 3 that sees images, which says of its text what is not as usual: with the rest.
Json text_of_gemma3(const Config& config) {
  const Json& text = config.required("text_config");
  if (!text.is_object()) config.wrong("text_config", "an object");
  Json whole = {{"vocab_size", 262208},  {"num_attention_heads", 8},          {"num_key_value_heads", 4},
                {"head_dim", 256},       {"max_position_embeddings", 131072}, {"query_pre_attn_scalar", 256},
                {"sliding_window", 4096}};
  whole.update(text);
  whole["model_type"] = "gemma3_text";
  return whole;
}

// Of a Mistral that sees images (Small 3.1 and 3.2, Ministral 3). Whether the output matrix is the
// embedding's, the whole says.
Json text_of_mistral3(const Config& config) {
  Json whole = config.required("text_config");
  if (!whole.is_object()) config.wrong("text_config", "an object");
  const Config text(whole, config.where());
  text.only_text("model_type", "mistral", {"mistral", "ministral3"});
  whole["model_type"] = text.text_or("model_type", "mistral");
  if (config.has("tie_word_embeddings"))
    whole["tie_word_embeddings"] = config.boolean_or("tie_word_embeddings", false);
  return whole;
}

// Of a Qwen that sees images, which older files have beside what they say of images. A text's positions are
// the same in all three directions that images have.
Json text_of_qwen(const Config& config, const char* type, double theta, double eps) {
  Json whole = config.has("text_config") ? config.required("text_config") : config.object();
  if (!whole.is_object()) config.wrong("text_config", "an object");
  whole["model_type"] = type;
  const bool tied = config.boolean_or("tie_word_embeddings", false) ||
                    Config(whole, config.where()).boolean_or("tie_word_embeddings", false);
  whole["tie_word_embeddings"] = tied;
  whole.emplace("rope_theta", theta);
  whole.emplace("rms_norm_eps", eps);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!whole.contains(key) || !whole[key].is_object()) continue;
    for (const char* named : {"rope_type", "type"})
      if (whole[key].contains(named) && whole[key][named] == "mrope") whole[key][named] = "default";
  }
  return whole;
}

void read_arcee(const Config& config, ModelSpec& m) {
  read_llama(config, {.activation = Activation::relu2, .norm_eps = 1e-5, .biased = false, .mlp_biased = true},
             m);
}

// nanochat: norms without weights, of the embedding and behind the rotation too, squared ReLUs, soft caps.
void read_nanochat(const Config& config, ModelSpec& m) {
  m.norm_kind = NormKind::rms_plain;
  m.embedding_norm = true;
  read_llama(config, {.activation = Activation::relu2, .biased = false}, m);
  m.attention_out_bias = m.qkv_bias;
  m.qk_norm = m.qk_norm_turned = true;
  m.caps.logits = read_cap(config, "final_logit_softcapping", 15);
}

// transformers' own defaults would be 8 heads and a window of 4096 tokens: too surprising to be assumed here.
void read_mistral(const Config& config, ModelSpec& m) {
  if (!config.names("num_key_value_heads")) config.required("num_key_value_heads");
  if (!config.names("sliding_window")) config.required("sliding_window");
  read_llama(config, {.windowed = true}, m);
}

// With a window in some layers (Ministral-8B): all of them where layer_types is missing.
void read_ministral(const Config& config, ModelSpec& m) {
  if (!config.names("num_key_value_heads")) config.required("num_key_value_heads");
  if (!config.names("sliding_window")) config.required("sliding_window");
  read_llama(config, {.windowed = true, .typed = true}, m);
}

struct ModelType : TransformersType {
  void (*read)(const Config& config, ModelSpec& m);
  // Whether a model is written as this type, where none before it in the table is.
  bool (*is)(const ModelSpec& m);
};

// Of Granite's, windows beside sinks.
bool granite_windows(const ModelSpec& m) { return m.attention_sinks && m.experts != Experts::gpt_oss; }

bool normed_experts(const ModelSpec& m) {
  return m.experts == Experts::deepseek && m.qk_norm && m.num_shared_experts == 0;
}

// Of types whose models are written as another one's, which is the same in other words.
bool written_otherwise(const ModelSpec& /*model*/) { return false; }

// Of LFM2's layers.
std::vector<std::pair<const char*, const char*>> lfm2_names() {
  return {{".input_layernorm.", ".operator_norm."},
          {".post_attention_layernorm.", ".ffn_norm."},
          {"self_attn.q_norm.", "self_attn.q_layernorm."},
          {"self_attn.k_norm.", "self_attn.k_layernorm."},
          {"self_attn.o_proj.", "self_attn.out_proj."},
          {".mlp.gate.e_score_correction_bias", ".feed_forward.expert_bias"},
          {".mlp.", ".feed_forward."},
          {".gate_proj.", ".w1."},
          {".up_proj.", ".w3."},
          {".down_proj.", ".w2."},
          {"model.norm.", "model.embedding_norm."}};
}

// Behind those that are special cases of theirs.
const std::vector<ModelType>& model_types() {
  using M = const ModelSpec&;
  // Of an MLP that all tokens have.
  const std::vector<std::pair<const char*, const char*>> granite_names{
      {"mlp.gate_up_proj.", "shared_mlp.input_linear."},
      {"mlp.down_proj.", "shared_mlp.output_linear."},
      {"mlp.shared_experts.gate_up_proj.", "shared_mlp.input_linear."},
      {"mlp.shared_experts.down_proj.", "shared_mlp.output_linear."},
      {"mlp.gate.", "block_sparse_moe.router.layer."}};
  static const std::vector<ModelType> all{
      {{"gpt2", "GPT2LMHeadModel"}, read_gpt2, [](M m) { return m.family == Family::gpt2; }},
      {{"gpt_neox", "GPTNeoXForCausalLM"}, read_neox, [](M m) { return m.family == Family::neox; }},
      {{"nemotron_h",
        "NemotronHForCausalLM",
        {{".input_layernorm.", ".norm."},
         {".mamba.", ".mixer."},
         {".self_attn.", ".mixer."},
         {".mlp.", ".mixer."},
         {"model.embed_tokens.", "model.embeddings."},
         {"model.norm.", "model.norm_f."}},
        true,
        false,
        "backbone."},
       read_nemotron_h,
       [](M m) { return !m.layer_pattern.empty(); }},
      {{"qwen3_next", "Qwen3NextForCausalLM"},
       read_qwen3_next,
       [](M m) { return m.state_space.is_delta() && m.experts != Experts::none; }},
      {{"qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"}, read_qwen3_5_moe, written_otherwise},
      {{"qwen3_5_text", "Qwen3_5ForCausalLM"}, read_delta_rule, [](M m) { return m.state_space.is_delta(); }},
      {{"lfm2_moe", "Lfm2MoeForCausalLM", lfm2_names(), true},
       read_lfm2_moe,
       [](M m) { return m.short_conv.kernel > 0 && m.experts != Experts::none; }},
      {{"lfm2", "Lfm2ForCausalLM", lfm2_names()}, read_lfm2, [](M m) { return m.short_conv.kernel > 0; }},
      {{"falcon_h1",
        "FalconH1ForCausalLM",
        {{"post_attention_layernorm.", "pre_ff_layernorm."},
         {".mlp.", ".feed_forward."},
         {"model.norm.", "model.final_layernorm."}}},
       read_falcon_h1,
       [](M m) { return m.state_space.beside_attention; }},
      {{"granite_swa", "GraniteSWAForCausalLM"}, read_granite_swa, granite_windows},
      {{"apertus",
        "ApertusForCausalLM",
        {{"input_layernorm", "attention_layernorm"}, {"post_attention_layernorm", "feedforward_layernorm"}}},
       read_apertus,
       [](M m) { return m.activation == Activation::xielu; }},
      {{"granitemoe",
        "GraniteMoeForCausalLM",
        {{"mlp.gate.", "block_sparse_moe.router.layer."}},
        false,
        false,
        nullptr,
        true},
       [](const Config& config, ModelSpec& m) { read_granite_moe(config, false, m); },
       [](M m) { return m.fused_mlp && m.experts != Experts::none && m.num_shared_experts == 0; }},
      {{"granitemoeshared", "GraniteMoeSharedForCausalLM", granite_names, false, false, nullptr, true},
       [](const Config& config, ModelSpec& m) { read_granite_moe(config, true, m); },
       written_otherwise},
      {{"granitemoehybrid", "GraniteMoeHybridForCausalLM", granite_names, false, false, nullptr, true},
       read_granite_hybrid,
       [](M m) { return m.fused_mlp && (m.state_space.heads > 0 || !m.interleaved_rope); }},
      {{"bamba",
        "BambaForCausalLM",
        {{"post_attention_layernorm.", "pre_ff_layernorm."},
         {".mlp.", ".feed_forward."},
         {"model.norm.", "model.final_layernorm."}}},
       read_bamba,
       [](M m) { return m.state_space.heads > 0; }},
      {{"starcoder2", "Starcoder2ForCausalLM"},
       read_starcoder2,
       [](M m) { return m.norm_kind == NormKind::layer && m.activation == Activation::gelu; }},
      {{.name = "nanochat",
        .architecture = "NanoChatForCausalLM",
        .renamed = {{"mlp.up_proj.", "mlp.fc1."}, {"mlp.down_proj.", "mlp.fc2."}},
        .turns_back = true},
       read_nanochat,
       [](M m) { return m.norm_kind == NormKind::rms_plain; }},
      {{"jais2", "Jais2ForCausalLM"},
       read_jais2,
       [](M m) {
         return m.norm_kind == NormKind::layer && m.activation == Activation::relu2 && !m.norms_less_one;
       }},
      {{"nemotron", "NemotronForCausalLM"},
       read_nemotron,
       [](M m) { return m.norm_kind == NormKind::layer && m.activation == Activation::relu2; }},
      {{"stablelm", "StableLmForCausalLM"},
       read_stablelm,
       [](M m) { return m.norm_kind == NormKind::layer; }},
      {{"cohere2_moe", "Cohere2MoeForCausalLM"},
       read_cohere2_moe,
       [](M m) { return m.parallel_residual && m.experts == Experts::deepseek; }},
      {{"cohere2", "Cohere2ForCausalLM"},
       read_cohere2,
       [](M m) {
         return m.norm_kind == NormKind::layer_weight && (m.window.size > 0 || m.rope.unturned_every > 0);
       }},
      {{"cohere", "CohereForCausalLM"},
       [](const Config& config, ModelSpec& m) { read_cohere(config, false, 5e5, m); },
       [](M m) { return m.norm_kind == NormKind::layer_weight; }},
      {{"olmo", "OlmoForCausalLM"}, read_olmo, [](M m) { return m.norm_kind == NormKind::layer_plain; }},
      {{"glm4",
        "Glm4ForCausalLM",
        {{"post_attention_layernorm", "post_self_attn_layernorm"},
         {"pre_feedforward_layernorm", "post_attention_layernorm"},
         {"post_feedforward_layernorm", "post_mlp_layernorm"}}},
       [](const Config& config, ModelSpec& m) { read_glm(config, true, m); },
       [](M m) { return m.fused_mlp && m.norm_place == NormPlace::both; }},
      {{"glm", "GlmForCausalLM"},
       [](const Config& config, ModelSpec& m) { read_glm(config, false, m); },
       [](M m) { return m.fused_mlp; }},
      {{"ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        {{"mlp.gate.e_score_correction_bias", "mlp.moe_statics.e_score_correction_bias"}},
        true},
       read_ernie_moe,
       [](M m) { return m.interleaved_rope && m.experts == Experts::deepseek; }},
      {{"ernie4_5", "Ernie4_5ForCausalLM"},
       read_ernie,
       [](M m) {
         return m.interleaved_rope && m.qkv_bias == m.attention_out_bias && m.qkv_bias == m.mlp_bias;
       }},
      {{"helium", "HeliumForCausalLM"}, read_helium, [](M m) { return m.interleaved_rope; }},
      {{"minimax_m2",
        "MiniMaxM2ForCausalLM",
        {{"gate.e_score_correction_bias", "e_score_correction_bias"}},
        true},
       read_minimax_m2,
       [](M m) {
         return m.experts == Experts::mixtral && m.router.scores == RouterScores::sigmoid && m.qk_norm_whole;
       }},
      {{"afmoe",
        "AfmoeForCausalLM",
        {{"pre_feedforward_layernorm", "pre_mlp_layernorm"},
         {"post_feedforward_layernorm", "post_mlp_layernorm"},
         {"mlp.gate.e_score_correction_bias", "mlp.expert_bias"},
         {"mlp.gate.", "mlp.router.gate."}},
        true},
       read_afmoe,
       [](M m) { return m.attention_gate && m.experts == Experts::deepseek; }},
      {{"hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        {{"self_attn.q_norm.", "self_attn.query_layernorm."},
         {"self_attn.k_norm.", "self_attn.key_layernorm."},
         {"mlp.gate.", "mlp.gate.wg."},
         {"mlp.shared_experts.", "mlp.shared_mlp."}}},
       read_hunyuan_moe,
       [](M m) { return m.qk_norm_turned && m.experts == Experts::deepseek; }},
      {{"mixtral", "MixtralForCausalLM"}, read_mixtral, [](M m) { return m.experts == Experts::mixtral; }},
      {{"gpt_oss", "GptOssForCausalLM"}, read_gpt_oss, [](M m) { return m.experts == Experts::gpt_oss; }},
      {{"deepseek_v2", "DeepseekV2ForCausalLM"},
       read_deepseek2,
       [](M m) {
         return m.latent_attention() && m.experts == Experts::deepseek &&
                m.router.scores == RouterScores::softmax;
       }},
      {{"deepseek_v3", "DeepseekV3ForCausalLM", {}, true, true},
       read_deepseek3,
       [](M m) { return m.latent_attention(); }},
      {{"kimi_k2", "DeepseekV3ForCausalLM", {}, true, true}, read_deepseek3, written_otherwise},
      {{"youtu", "YoutuForCausalLM"}, read_youtu, written_otherwise},
      {{"glm4_moe_lite", "Glm4MoeLiteForCausalLM", {}, true, true}, read_glm4_moe_lite, written_otherwise},
      {{"exaone_moe",
        "ExaoneMoeForCausalLM",
        {{"mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"}},
        true},
       read_exaone_moe,
       [](M m) {
         return m.experts == Experts::deepseek && m.router.scores == RouterScores::sigmoid && m.qk_norm &&
                (m.rope.unturned_every > 0 || m.window.size > 0);
       }},
      {{"glm4_moe", "Glm4MoeForCausalLM", {}, true, true},
       read_glm4_moe,
       [](M m) { return m.experts == Experts::deepseek && m.router.scores == RouterScores::sigmoid; }},
      {{"solar_open", "SolarOpenForCausalLM", {}, true}, read_solar, written_otherwise},
      {{"hy_v3",
        "HYV3ForCausalLM",
        {{"mlp.gate.e_score_correction_bias", "mlp.expert_bias"},
         {"mlp.gate.", "mlp.router.gate."},
         {"mlp.shared_experts.", "mlp.shared_mlp."}},
        true},
       read_hy_v3,
       written_otherwise},
      {{"sarvam_moe",
        "Glm4MoeForCausalLM",
        {{"model.embed_tokens.", "model.word_embeddings."},
         {"self_attn.q_proj.", "attention.query_key_value."},
         {"self_attn.k_proj.", "attention.query_key_value."},
         {"self_attn.v_proj.", "attention.query_key_value."},
         {"self_attn.o_proj.", "attention.dense."},
         {"self_attn.q_norm.", "attention.query_layernorm."},
         {"self_attn.k_norm.", "attention.key_layernorm."},
         {"mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias"}},
        true},
       read_sarvam,
       written_otherwise},
      {{"dots1", "Dots1ForCausalLM", {}, true}, read_dots1, written_otherwise},
      {{"qwen2_moe", "Qwen2MoeForCausalLM"}, read_qwen2_moe, [](M m) { return m.shared_gate; }},
      {{"flex_olmo", "FlexOlmoForCausalLM"},
       read_flex_olmo,
       [](M m) { return normed_experts(m) && m.qk_norm_whole && m.norm_place == NormPlace::after; }},
      {{"olmoe", "OlmoeForCausalLM"}, read_olmoe, [](M m) { return normed_experts(m) && m.qk_norm_whole; }},
      {{"mellum", "MellumForCausalLM"},
       read_mellum,
       [](M m) { return normed_experts(m) && m.rope.local_theta > 0; }},
      {{.name = "qwen3_vl_moe_text", .architecture = "Qwen3MoeForCausalLM", .turned_experts = true},
       read_qwen3_vl_moe,
       written_otherwise},
      {{"qwen3_moe", "Qwen3MoeForCausalLM"}, read_qwen3_moe, normed_experts},
      {{"phi3", "Phi3ForCausalLM"}, read_phi3, [](M m) { return m.fused_projections; }},
      {{"hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        {{"self_attn.q_norm.", "self_attn.query_layernorm."},
         {"self_attn.k_norm.", "self_attn.key_layernorm."}}},
       read_hunyuan,
       [](M m) { return m.qk_norm_turned; }},
      {{"ministral3", "Ministral3ForCausalLM"},
       read_ministral3,
       [](M m) { return m.rope.query_growth != 0; }},
      {{"olmo3", "Olmo3ForCausalLM"},
       read_olmo3,
       [](M m) { return m.norm_place == NormPlace::after && m.qk_norm_whole && m.rope.local_theta > 0; }},
      {{"olmo2", "Olmo2ForCausalLM"},
       read_olmo2,
       [](M m) { return m.norm_place == NormPlace::after && m.qk_norm_whole; }},
      {{"exaone4", "Exaone4ForCausalLM"},
       read_exaone4,
       [](M m) { return m.norm_place == NormPlace::after && m.qk_norm; }},
      {{"vaultgemma", "VaultGemmaForCausalLM", {{"post_attention_layernorm", "pre_feedforward_layernorm"}}},
       read_vaultgemma,
       [](M m) {
         return m.norms_less_one && m.norm_place == NormPlace::before &&
                (m.window.size > 0 || !(m.caps == CapSpec{}) || m.scales.attention > 0);
       }},
      {{"gemma", "GemmaForCausalLM"},
       read_gemma1,
       [](M m) { return m.norms_less_one && m.norm_place == NormPlace::before; }},
      {{"gemma2", "Gemma2ForCausalLM"}, read_gemma2, [](M m) { return m.norms_less_one && !m.qk_norm; }},
      {{"gemma3_text", "Gemma3ForCausalLM"}, read_gemma3, [](M m) { return m.norms_less_one; }},
      {{"hyperclovax",
        "HyperCLOVAXForCausalLM",
        {{"post_attention_layernorm", "post_norm1"},
         {"pre_feedforward_layernorm", "post_attention_layernorm"},
         {"post_feedforward_layernorm", "post_norm2"}}},
       read_hyperclovax,
       [](M m) { return m.norm_place == NormPlace::both; }},
      {{"granite", "GraniteForCausalLM"}, read_granite, [](M m) { return m.scales != ScaleSpec{}; }},
      {{"smollm3", "SmolLM3ForCausalLM"}, read_smollm3, [](M m) { return m.rope.unturned_every > 0; }},
      // Which biases it has it says one by one, and heads may be of any width beside them.
      {{"seed_oss", "SeedOssForCausalLM"},
       read_seed_oss,
       [](M m) {
         return !m.qk_norm && m.activation == Activation::swiglu && (m.attention_out_bias || m.mlp_bias) &&
                (m.qkv_bias != m.attention_out_bias || m.hidden % m.num_heads != 0);
       }},
      {{"qwen2", "Qwen2ForCausalLM"},
       [](const Config& config, ModelSpec& m) { read_qwen(config, true, true, m); },
       [](M m) { return m.qkv_bias && !m.attention_out_bias; }},
      {{"qwen3", "Qwen3ForCausalLM"},
       [](const Config& config, ModelSpec& m) { read_qwen(config, false, true, m); },
       [](M m) { return m.qk_norm; }},
      {{"arcee", "ArceeForCausalLM"}, read_arcee, [](M m) { return m.activation == Activation::relu2; }},
      {{"cwm", "CwmForCausalLM"}, read_cwm, [](M m) { return m.window.full_first && !m.qkv_bias; }},
      {{"ministral", "MinistralForCausalLM"}, read_ministral, [](M m) { return m.window.full_every > 0; }},
      // A Mistral without a window is a Llama, but may have heads of any width.
      {{"mistral", "MistralForCausalLM"},
       read_mistral,
       [](M m) { return m.window.size > 0 || m.hidden % m.num_heads != 0; }},
      {{"internlm3", "LlamaForCausalLM"}, read_llama_relative, written_otherwise},
      {{"iquestcoder", "LlamaForCausalLM"}, read_llama_relative, written_otherwise},
      {{"exaone",
        "LlamaForCausalLM",
        {{"model.embed_tokens.", "transformer.wte."},
         {"model.norm.", "transformer.ln_f."},
         {"model.layers.", "transformer.h."},
         {".self_attn.o_proj.", ".attn.attention.out_proj."},
         {".self_attn.", ".attn.attention."},
         {".input_layernorm.", ".ln_1."},
         {".post_attention_layernorm.", ".ln_2."},
         {".mlp.gate_proj.", ".mlp.c_fc_0."},
         {".mlp.up_proj.", ".mlp.c_fc_1."},
         {".mlp.down_proj.", ".mlp.c_proj."}}},
       read_exaone,
       written_otherwise},
      {{"llama", "LlamaForCausalLM"},
       [](const Config& config, ModelSpec& m) {
         read_llama(config, {.biased = false, .mlp_biased = true}, m);
       },
       [](M) { return true; }},
  };
  return all;
}

// What people have that no block here is, and why.
struct OtherType {
  const char* name;
  const char* has;
};
constexpr OtherType other_types[] = {
    {"bloom", "scores that fall with the distance of a key (ALiBi)"},
    {"falcon",
     "GELU (erf form) in layers of a Llama's kind, and in some sizes scores that fall with distance"},
    {"mpt", "scores that fall with the distance of a key (ALiBi)"},
    {"opt", "learned positions that begin at 2, and ReLU"},
    {"phi", "a bias of the output matrix"},
    {"gptj", "a bias of the output matrix"},
    {"codegen", "a bias of the output matrix"},
    {"gpt_neo", "attention that is not divided by the root of a head's width"},
    {"gpt_bigcode", "one key for all heads beside learned positions"},
    {"llama4_text", "positions and chunks of attention of its own"},
    {"llama4", "positions and chunks of attention of its own"},
    {"phimoe", "a router of its own (SparseMixer)"},
    {"apertus1p5_text", "an activation with weights of its own (xIELU)"},
    {"bitnet", "weights of three values"},
    {"deepseek_v32", "attention to tokens that an indexer chooses"},
    {"diffllama", "the difference of two attentions"},
    {"doge", "a mask of attention that is learned"},
    {"falcon_mamba", "a state space for each channel (Mamba-1)"},
    {"gemma3n", "an embedding for each layer"},
    {"gemma3n_text", "an embedding for each layer"},
    {"gemma4", "layers whose heads differ in width, and that share keys and values"},
    {"gemma4_text", "layers whose heads differ in width, and that share keys and values"},
    {"glm_moe_dsa", "attention to tokens that an indexer chooses"},
    {"granitemoe_swa", "Granite's experts under other names of tensors, beside sinks"},
    {"jetmoe", "experts in attention"},
    {"kimi_linear", "a delta rule whose decays differ from channel to channel"},
    {"laguna", "gates of whole heads, and layers whose numbers of heads differ"},
    {"longcat_flash", "layers of two attentions, and experts that do nothing"},
    {"mimo_v2_flash", "values narrower than keys, times a factor"},
    {"minicpm3", "factors of the embedding and of layers beside latent attention"},
    {"minimax", "linear attention whose decays are not learned"},
    {"olmo_hybrid", "a delta rule whose betas reach 2"},
    {"persimmon", "LayerNorm of each head of queries and keys"},
    {"phi4_multimodal", "adapters for images and sound beside a Phi-4's weights"},
    {"recurrent_gemma", "linear recurrences in place of attention in some layers"},
    {"rwkv", "linear recurrences in place of attention"},
    {"sarvam_mla", "DeepSeek-V3's layers under other names of tensors"},
    {"xlstm", "linear recurrences in place of attention"},
    {"zamba", "attention that several layers share"},
    {"mamba", "a state space for each channel (Mamba-1)"},
    {"mamba2", "layers without MLPs"},
    {"jamba", "a state space for each channel (Mamba-1)"},
    {"zamba2", "attention that several layers share"},
    {"t5", "an encoder"},
    {"bert", "attention to later tokens"},
};

[[noreturn]] void refuse_model_type(const std::string& where, const std::string& type) {
  // Whose text models are read.
  std::vector<std::string> legal{"gemma3",   "mistral3",     "qwen2_vl", "qwen2_5_vl",
                                 "qwen3_vl", "qwen3_vl_moe", "qwen3_5",  "qwen3_5_moe"};
  for (const ModelType& one : model_types()) legal.emplace_back(one.name);
  std::sort(legal.begin(), legal.end());
  const auto* other = std::find_if(std::begin(other_types), std::end(other_types),
                                   [&type](const OtherType& one) { return one.name == type; });
  refuse("{}: model_type = \"{}\" is not supported{}: only {} are", where, type,
         other == std::end(other_types) ? std::string() : fmt::format(", which has {}", other->has),
         fmt::join(legal, ", "));
}

std::string model_name(const std::string& where, const std::string& type) {
  const std::string directory = std::filesystem::path(where).parent_path().filename().string();
  const bool is_name = !directory.empty() && directory != "." && directory != ".." && is_utf8(directory);
  return is_name ? directory : type;
}

}  // namespace

// Of a model that sees images what its configuration says of its text.
static Json text_of(const Json& object, const std::string& where) {
  if (!object.is_object()) refuse("{}: not a JSON object", where);
  const Config config(object, where);
  config.required("model_type");
  const std::string type = config.text_or("model_type", "");
  if (type == "gemma3") return text_of_gemma3(config);
  if (type == "mistral3") return text_of_mistral3(config);
  if (type == "qwen2_vl" || type == "qwen2_5_vl") return text_of_qwen(config, "qwen2", 1e6, 1e-5);
  if (type == "qwen3_vl") return text_of_qwen(config, "qwen3", 5e5, 1e-6);
  if (type == "qwen3_vl_moe") return text_of_qwen(config, "qwen3_vl_moe_text", 5e5, 1e-6);
  if (type == "qwen3_5") return text_of_qwen(config, "qwen3_5_text", 1e4, 1e-6);
  if (type == "qwen3_5_moe") return text_of_qwen(config, "qwen3_5_moe_text", 1e4, 1e-6);
  return object;
}

static const ModelType& type_of(const Config& config) {
  const std::string type = config.text_or("model_type", "");
  const auto found = std::find_if(model_types().begin(), model_types().end(),
                                  [&type](const ModelType& one) { return one.name == type; });
  if (found == model_types().end()) refuse_model_type(config.where(), type);
  return *found;
}

static ModelSpec model_of(const Json& object, const std::string& where) {
  const Config config(object, where);
  const ModelType& type = type_of(config);
  ModelSpec m;
  m.name = model_name(where, type.name);
  type.read(config, m);
  m.init_std = config.real_or("initializer_range", 0.02);
  try {
    validate(m);
  } catch (const RequestError& error) {
    refuse("{}: {}", where, error.what());
  }
  return m;
}

const TransformersType& transformers_type_of(const std::string& config_json, const std::string& where) {
  const Json text = text_of(parse_python_json(config_json, where), where);
  return type_of(Config(text, where));
}

const TransformersType& transformers_type(const ModelSpec& m) {
  const ModelType& type = *std::find_if(model_types().begin(), model_types().end(),
                                        [&m](const ModelType& one) { return one.is(m); });
  return type;
}

ModelSpec model_from_hugging_face(const std::string& config_json, const std::string& where) {
  return model_of(text_of(parse_python_json(config_json, where), where), where);
}

}  // namespace echelon
