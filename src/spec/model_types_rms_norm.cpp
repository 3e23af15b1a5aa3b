// Relatives of Llama: RMSNorm, an MLP in every layer, and no window, or one in all layers.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "spec/config_llama.h"
#include "spec/config_rope.h"
#include "spec/config_window.h"
#include "spec/model_type_readers.h"

namespace echelon {

// Llamas by other names, InternLM3 and IQuest-Coder.
void read_llama_relative(const Config& config, ModelSpec& m) {
  config.only_boolean("use_sliding_window", false);
  config.only_null("clip_qkv");
  read_llama(config, {.norm_eps = 1e-5, .biased = false, .mlp_biased = true}, m);
  config.only_boolean("qkv_bias", m.qkv_bias);
  config.only_boolean("bias", m.mlp_bias);
}

// EXAONE 3 and 3.5: a Llama whose files have names of their own.
void read_exaone(const Config& config, ModelSpec& m) {
  constexpr double theta = 500000;
  read_llama(config, {.rope_theta = theta, .norm_eps = 1e-5, .biased = false, .mlp_biased = true}, m);
}

// InternLM2: the same, of files with one matrix for queries, keys and values.
void read_internlm2(const Config& config, ModelSpec& m) { read_llama(config, {.biased = true}, m); }

// A squared ReLU, without a gate.
void read_arcee(const Config& config, ModelSpec& m) {
  read_llama(config,
             {.activations = {Activation::relu2}, .norm_eps = 1e-5, .biased = false, .mlp_biased = true}, m);
}

void read_mistral(const Config& config, ModelSpec& m) { read_llama(config, {.windowed = true}, m); }

// Ministral 3: Mistral's layers, with queries that grow with their position.
void read_ministral3(const Config& config, ModelSpec& m) {
  read_llama(config, {.windowed = true, .norm_eps = 1e-5}, m);
  m.rope.query_growth = read_query_growth(config, m);
}

// Qwen2 and Qwen3. Their window, where one is named, is of use_sliding_window alone, and of the layers from
// max_window_layers on.
void read_qwen(const Config& config, bool qwen2, bool typed, ModelSpec& m) {
  const char* const first = "max_window_layers";
  const bool window = config.boolean_or("use_sliding_window", false),
             counted = window && !config.has("layer_types") && config.has("sliding_window");
  const std::int64_t full = counted && config.required(first) != 0 ? config.integer(first) : 0;
  read_llama(
      config,
      {.windowed = counted && full == 0, .typed = typed, .biased = qwen2 ? std::optional<bool>() : false}, m);
  if (full > 0 && full < m.num_layers) {
    std::vector<bool> in(static_cast<std::size_t>(m.num_layers), true);
    std::fill_n(in.begin(), full, false);
    m.window = window_of(in, config.integer("sliding_window"));
  }
  if (!window && m.window.size > 0) config.wrong("use_sliding_window", "true beside sliding_attention");
  if (qwen2) m.qkv_bias = true;
  m.qk_norm = !qwen2;
}

// SmolLM3: layers without positions, each n-th. These alone would have a window.
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

// Norms behind attention and MLP, and over all queries and all keys.
void read_olmo2(const Config& config, ModelSpec& m) {
  read_llama(config, {.norm_eps = 1e-5}, m);
  m.norm_place = NormPlace::after;
  m.qk_norm = m.qk_norm_whole = true;
}

// Biases of attention's inputs by default, of what it hands on and of MLPs on request.
void read_seed_oss(const Config& config, ModelSpec& m) {
  read_llama(config, {.biased = true, .mlp_biased = true, .dropped = true}, m);
  m.attention_out_bias = config.boolean_or("attention_out_bias", false);
}

// Phi-3, and Phi-4 with it.
void read_phi3(const Config& config, ModelSpec& m) {
  m.fused_projections = true;
  config.only_real("resid_pdrop", 0.0);
  config.only_real("embd_pdrop", 0.0);
  read_llama(config, {.windowed = true, .norm_eps = 1e-5, .rotary_part = 1.0}, m);
  if (m.rope.scaling == RopeScaling::none) return;
  const char* const key = rope_key(config);
  const std::string where = fmt::format("{}, {}", config.where(), key);
  const Config rope(config.required(key), where);
  if (m.rope.scaling != RopeScaling::longrope)
    rope.wrong(rope.has("rope_type") ? "rope_type" : "type", "longrope");
  config.required("original_max_position_embeddings");  // transformers would take 4096, whatever rope says
}

// GLM-4 of 2024 and, with norms behind attention and MLP too, of 2025.
void read_glm(const Config& config, bool glm4, ModelSpec& m) {
  m.fused_mlp = m.interleaved_rope = true;
  if (glm4) m.norm_place = NormPlace::both;
  read_llama(config, {.norm_eps = 1.5625e-7, .biased = true, .rotary_part = 0.5}, m);
  m.attention_out_bias = false;
}

// ChatGLM 2 and 3, and GLM-4 as it was first published: GLM's layers under other names. What positions are
// scaled by is a factor of theta.
void read_chatglm(const Config& config, ModelSpec& m) {
  for (const char* key : {"rmsnorm", "post_layer_norm", "multi_query_attention"})
    config.only_boolean(key, true);
  for (const char* key :
       {"add_bias_linear", "apply_residual_connection_post_layernorm", "position_encoding_2d"})
    config.only_boolean(key, false);
  config.only_real("hidden_dropout", 0.0);
  Json whole = config.object();
  whole.emplace("rms_norm_eps", 1e-5);
  whole.emplace("attention_bias", false);
  whole["rope_theta"] = 1e4 * config.real_or("rope_ratio", 1);
  read_glm(config.with(whole), false, m);
}

void read_ernie(const Config& config, ModelSpec& m) {
  m.interleaved_rope = true;
  read_llama(config,
             {.rope_theta = 500000, .norm_eps = 1e-5, .tied = true, .biased = false, .bias_key = "use_bias"},
             m);
  m.mlp_bias = m.qkv_bias;
}

void read_helium(const Config& config, ModelSpec& m) {
  m.interleaved_rope = true;
  read_llama(config, {.rope_theta = 100000, .norm_eps = 1e-8, .biased = false, .mlp_biased = true}, m);
  m.attention_out_bias = false;
  if (m.attention_width() != m.hidden)
    config.wrong("head_dim",
                 fmt::format("hidden_size / num_attention_heads = {} / {}", m.hidden, m.num_heads));
}

// Tencent's Hunyuan, without experts: norms of heads behind the rotation. What its files call dynamic is a
// larger theta, whatever the length, where they have an alpha.
void read_hunyuan(const Config& config, ModelSpec& m) {
  config.only_boolean("use_qk_norm", true);
  config.only_boolean("use_cla", false);
  read_llama(config, {.norm_eps = 1e-5, .biased = false}, m);
  m.qk_norm = m.qk_norm_turned = true;
  if (m.rope.scaling != RopeScaling::dynamic) return;
  const char* const key = rope_key(config);
  const double alpha = Config(config.required(key), config.where()).real_or("alpha", 0);
  if (!(alpha > 0) || m.head_dim < 4) return;
  RopeSpec larger;
  const double width = static_cast<double>(m.head_dim);
  larger.theta = m.rope.theta * std::pow(alpha, width / (width - 2));
  m.rope = larger;
  m.max_seq = config.integer("max_position_embeddings");
}

void read_granite(const Config& config, ModelSpec& m) {
  read_llama(config, {.dropped = true}, m);
  read_granite_factors(config, m);
}

// MiniCPM, and MiniCPM4 where all keys are seen: Granite's factors in other words.
void read_minicpm(const Config& config, ModelSpec& m) {
  for (const char* key : {"scale_emb", "scale_depth", "dim_model_base"}) config.required(key);
  if (config.has("num_experts") && config.required("num_experts") != 0) config.wrong("num_experts", "0");
  config.only_null("sparse_config");
  read_llama(config, {.tied = true}, m);
  m.scales.embedding = config.real_or("scale_emb", 1);
  m.scales.residual = config.real_or("scale_depth", 1) / std::sqrt(static_cast<double>(m.num_layers));
  m.scales.logits_divisor =
      static_cast<double>(m.hidden) / static_cast<double>(config.integer("dim_model_base"));
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
  read_granite_factors(config.with(whole), m);
  const double scale = config.real_or(factor, 1);
  if (!(scale > 0)) config.wrong(factor, "a number above 0");
  m.scales.logits_divisor = 1 / scale;
}

// Apertus: an activation that learns, and norms of heads.
void read_apertus(const Config& config, ModelSpec& m) {
  read_llama(config,
             {.activations = {Activation::xielu}, .rope_theta = 12e6, .norm_eps = 1e-5, .biased = false}, m);
  m.qk_norm = true;
}

// nanochat: norms without weights, of the embedding and behind the rotation too, squared ReLUs, soft caps.
void read_nanochat(const Config& config, ModelSpec& m) {
  m.norm_kind = NormKind::rms_plain;
  m.embedding_norm = true;
  read_llama(config, {.activations = {Activation::relu2}, .biased = false}, m);
  m.attention_out_bias = m.qkv_bias;
  m.qk_norm = m.qk_norm_turned = true;
  m.caps.logits = read_cap(config, "final_logit_softcapping", 15);
}

}  // namespace echelon
