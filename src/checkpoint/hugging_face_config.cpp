// Writes configurations for transformers: the inverse of spec/model_types.cpp, which is then used to check
// that the configuration describes the model.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "checkpoint/hugging_face.h"
#include "spec/config_window.h"
#include "spec/model_types.h"

namespace echelon {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// A configuration means what its reader makes of it: reading it must give the model, in every field.
void refuse_inexpressible(const ModelSpec& model, const std::string& type, const std::string& config) {
  ModelSpec meant;
  try {
    meant = model_from_hugging_face(config, fmt::format("model {} as config.json", model.name));
  } catch (const RequestError&) {
    if (model.window.size == 0) throw;
    // In words of the model's own: types that have windows may have none beside other fields.
    ModelSpec without = model;
    without.window = {};
    (void)hugging_face_config(without, DType::f32, {});  // refused for another field otherwise
    refuse(
        "model {}: window = {} cannot be said in a {} configuration of transformers; legal: a model without "
        "it",
        model.name, model.window.size, type);
  }
  meant.name = model.name;
  if (model.num_mlp_layers() == 0) meant.mlp_hidden = model.mlp_hidden;                 // no layer uses it
  if (plain_window(meant) == plain_window(model)) meant.window = model.window;          // said otherwise
  meant.mtp_weight = model.mtp_weight;                                                  // of training
  if (model.state_space.is_delta()) meant.state_space.chunk = model.state_space.chunk;  // only concerns cost
  for (const auto& [field, here, there] : differences(model, meant))
    refuse("model {}: {} = {} cannot be said in a {} configuration of transformers{}; legal: a model {}",
           model.name, field, here.empty() ? "nothing" : here, type,
           there.empty() ? "" : fmt::format(", where it is {}", there),
           there.empty() ? "without it" : fmt::format("with {} = {}", field, there));
}

// Refuses sizes that transformers' classes for these types reject, although they have no effect if head_dim
// is given.
void refuse_uneven_heads(const ModelSpec& m, const std::string& type) {
  // In these types it determines head_dim, or how positions' factors are counted.
  const bool shared =
      type == "stablelm" || type == "helium" || (type == "phi3" && m.rope.scaling == RopeScaling::longrope);
  if (shared && m.attention_width() != m.hidden)
    refuse("model {}: transformers has no {} with num_heads x head_dim = {} x {}; legal: hidden = {}", m.name,
           type, m.num_heads, m.head_dim, m.attention_width());
  const bool asks = type == "gemma2" || type == "gemma3_text" || type == "vaultgemma" ||
                    type == "deepseek_v2" || type == "arcee" || type == "hyperclovax";
  if (!asks || m.hidden % m.num_heads == 0) return;
  refuse(
      "model {}: transformers loads a {} only where num_heads = {} divides hidden = {}; legal: a divisor of "
      "{}",
      m.name, type, m.num_heads, m.hidden, m.hidden);
}

// Types without latent attention that have experts as in deepseek.
void refuse_experts_of_no_type(const ModelSpec& m, const std::string& type) {
  constexpr std::array<std::string_view, 14> with_experts{
      "olmoe",        "flex_olmo",      "qwen2_moe",  "qwen3_moe", "mellum",   "qwen3_next",  "glm4_moe",
      "ernie4_5_moe", "hunyuan_v1_moe", "exaone_moe", "afmoe",     "lfm2_moe", "cohere2_moe", "hy_v3"};
  if (m.experts != Experts::deepseek || m.latent_attention() || type.starts_with("granitemoe") ||
      std::find(with_experts.begin(), with_experts.end(), type) != with_experts.end())
    return;
  refuse(
      "model {}: transformers has no class of experts as in deepseek without its latent attention; "
      "legal: kv_rank above 0, qk_norm = true and num_shared_experts = 0 (Qwen3's), shared_gate = true "
      "(Qwen2's), or router_scores = \"sigmoid\" (GLM-4.5's)",
      m.name);
}

// What transformers calls it: gpt-oss's clamped one is silu in a configuration.
const char* name_in_transformers(Activation activation) {
  switch (activation) {
    case Activation::swiglu:
    case Activation::clamped_swiglu:
      return "silu";
    case Activation::geglu:
      return "gelu_pytorch_tanh";
    case Activation::gelu:
      return "gelu_new";
    case Activation::gelu_erf:
      return "gelu";
    case Activation::relu2:
      return "relu2";
    case Activation::relu:
      return "relu";
    case Activation::xielu:
      return "xielu";
  }
  return "";
}

// The fraction of a head that is rotated. transformers multiplies and rounds down, so it may need to be
// rounded up.
double rotary_part(const ModelSpec& m) {
  const auto whole = static_cast<double>(m.head_dim);
  const double part = static_cast<double>(m.turned_width()) / whole;
  return static_cast<std::int64_t>(whole * part) < m.turned_width() ? std::nextafter(part, 2.0) : part;
}

// The mscale_all_dim of a DeepSeek whose scores are scaled by scales.attention (model_types_latent.cpp).
double sharpening(const ModelSpec& m) {
  const double root = std::sqrt(m.scales.attention * std::sqrt(static_cast<double>(m.head_dim)));
  const double by = (root - 1) / (0.1 * std::log(m.rope.factor));
  return std::round(by * 1e12) / 1e12;  // configurations have few digits
}

void add_rope(const ModelSpec& m, ordered_json& config) {
  const RopeSpec& r = m.rope;
  if (r.unturned_every > 0 && config["model_type"] == "smollm3") {
    config["no_rope_layers"] = json::array();
    for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
      config["no_rope_layers"].push_back(m.is_turned(layer) ? 1 : 0);
  }
  const std::string type = config["model_type"];
  const bool always = type == "stablelm" || type == "phi" || type == "nemotron" || type == "minimax_m2" ||
                      type == "qwen3_next" || type == "qwen3_5_text" || type.starts_with("glm"),
             only_inside = type == "bamba" || type == "gpt_neox",     // of its rope_parameters
      partial = always || (m.rotary_dim > 0 && m.fused_projections);  // others rotate whole heads
  if (partial) config["partial_rotary_factor"] = rotary_part(m);
  const bool scaled = r.scaling != RopeScaling::none;
  const bool own_are_scaled = m.experts == Experts::gpt_oss || type == "cwm" || type == "apertus";
  if (!scaled && r.local_theta == 0 && !own_are_scaled && !only_inside) return;
  ordered_json rope{{"rope_type", scaled ? name_of(r.scaling) : "default"}, {"rope_theta", r.theta}};
  if (scaled) rope["factor"] = r.factor;
  if (partial || only_inside) rope["partial_rotary_factor"] = rotary_part(m);
  if (r.scaling == RopeScaling::dynamic)
    config["max_position_embeddings"] = r.original_length;
  else if (r.scaling > RopeScaling::linear)
    rope["original_max_position_embeddings"] = r.original_length;
  if (r.scaling == RopeScaling::llama3) {
    rope["low_freq_factor"] = r.low_frequency;
    rope["high_freq_factor"] = r.high_frequency;
  } else if (r.scaling == RopeScaling::yarn) {
    rope["beta_fast"] = r.beta_fast;
    rope["beta_slow"] = r.beta_slow;
    rope["truncate"] = r.whole_pairs;
  } else if (r.scaling == RopeScaling::longrope) {
    rope["short_factor"] = r.short_factors;
    rope["long_factor"] = r.long_factors;
    if (m.fused_projections) config["original_max_position_embeddings"] = r.original_length;
  }
  if (r.scaling > RopeScaling::llama3) rope["attention_factor"] = r.attention_factor;
  if (r.query_growth != 0) rope["llama_4_scaling_beta"] = r.query_growth;
  if (m.latent_attention() && m.scales.attention > 0) rope["mscale_all_dim"] = sharpening(m);
  if (r.local_theta == 0)
    config["rope_parameters"] = rope;
  else
    config["rope_parameters"] = {
        {"full_attention", rope},
        {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", r.local_theta}}}};
}

void add_window(const ModelSpec& m, ordered_json& config) {
  const bool any = m.window.size > 0;
  const std::string type = config["model_type"];
  if (any || type == "mistral" || type == "ministral3" || type == "mixtral" || type == "phi3" ||
      type == "starcoder2" || type.starts_with("exaone"))
    config["sliding_window"] = any ? ordered_json(m.window.size) : ordered_json();
  // In these types, layers with positions have a window.
  if (type.starts_with("cohere2") || type == "afmoe" ||
      (type.starts_with("exaone") && (any || m.rope.unturned_every > 0))) {
    if (!any) config["sliding_window"] = m.max_seq;
    config["layer_types"] = json::array();
    for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
      config["layer_types"].push_back(m.is_turned(layer) ? "sliding_attention" : "full_attention");
    return;
  }
  if (type == "starcoder2" || type == "ministral3") return;  // all layers have it
  if (!any && !type.starts_with("gemma") && type != "vaultgemma" && type != "gpt_oss" && type != "olmo3" &&
      !type.starts_with("exaone") && type != "granite_swa" && type != "mellum")
    return;
  if (type.starts_with("qwen")) {
    config["use_sliding_window"] = true;
    config["max_window_layers"] = 0;
  }
  if (type == "qwen3_moe") return;  // has no layer types
  config["layer_types"] = json::array();
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    config["layer_types"].push_back(m.window.in(layer) ? "sliding_attention" : "full_attention");
}

// The double whose reciprocal is exactly `number`, if there is one nearby.
double inverse_of(double number) {
  const double near = 1 / number;
  for (const double one : {std::nextafter(near, 0.0), std::nextafter(near, HUGE_VAL)})
    if (1 / near != number && 1 / one == number) return one;
  return near;
}

// Families with LayerNorm or with rotation of neighbouring elements, which use other names for some keys.
void add_later_families(const ModelSpec& m, ordered_json& config) {
  const std::string type = config["model_type"];
  const auto rename = [&config](const char* from, const char* to) {
    config[to] = config[from];
    config.erase(from);
  };
  if (type == "starcoder2") {
    rename("rms_norm_eps", "norm_epsilon");
    rename("attention_bias", "use_bias");
    config.erase("mlp_bias");
    config["attention_dropout"] = config["residual_dropout"] = config["embedding_dropout"] = 0.0;
  } else if (type == "jais2") {
    rename("rms_norm_eps", "layer_norm_eps");
  } else if (type == "stablelm") {
    rename("rms_norm_eps", "layer_norm_eps");
    config.erase("attention_bias");
    config["use_qkv_bias"] = m.qkv_bias;
    config["use_parallel_residual"] = m.parallel_residual;
    config["qk_layernorm"] = false;
  } else if (type == "phi") {
    rename("rms_norm_eps", "layer_norm_eps");
    config.erase("attention_bias");
    config.erase("mlp_bias");
    config["qk_layernorm"] = false;
    config["resid_pdrop"] = config["embd_pdrop"] = config["attention_dropout"] = 0.0;
  } else if (type == "nemotron") {
    rename("rms_norm_eps", "norm_eps");
  } else if (type.starts_with("cohere")) {
    if (m.norm_kind != NormKind::rms) rename("rms_norm_eps", "layer_norm_eps");
    config["logit_scale"] = inverse_of(m.scales.logits_divisor);
  } else if (type == "olmo") {
    config.erase("rms_norm_eps");
    config["clip_qkv"] = nullptr;
  } else if (type == "ernie4_5" || type == "ernie4_5_moe") {
    rename("attention_bias", "use_bias");
    config.erase("mlp_bias");
    if (m.experts != Experts::none) {
      config["moe_num_experts"] = m.num_experts;
      config["moe_k"] = m.experts_per_token;
      config["moe_intermediate_size"] = m.expert_hidden;
      config["moe_num_shared_experts"] = m.num_shared_experts;
      config["moe_layer_start_index"] = m.num_dense_layers;
      config["moe_layer_end_index"] = m.num_layers - 1;
      config["moe_layer_interval"] = 1;
    }
  } else if (type.starts_with("glm") || type == "helium") {
    config["attention_bias"] = m.qkv_bias;
  }
  if (type == "glm4_moe") config["use_qk_norm"] = m.qk_norm;
}

void add_delta_rule(const ModelSpec& m, ordered_json& config) {
  const StateSpaceSpec& s = m.state_space;
  config.erase("mlp_bias");
  config["linear_num_value_heads"] = s.heads;
  config["linear_value_head_dim"] = s.head_dim;
  config["linear_num_key_heads"] = s.groups;
  config["linear_key_head_dim"] = s.state;
  config["linear_conv_kernel_dim"] = s.kernel;
  config["layer_types"] = json::array();
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    config["layer_types"].push_back(m.has_state_space(layer) ? "linear_attention" : "full_attention");
}

// The number which, divided by the root of the head's width, is exactly the factor of scores.
double key_multiplier(const ModelSpec& m) {
  const double root = std::sqrt(static_cast<double>(m.head_dim));
  if (m.scales.attention == 0) return 1;
  const double near = m.scales.attention * root;
  for (const double one : {near, std::nextafter(near, 0.0), std::nextafter(near, HUGE_VAL)})
    if (one / root == m.scales.attention) return one;
  return near;
}

// Keys that Bamba, Granite and Falcon-H1 share.
void add_mamba_sizes(const StateSpaceSpec& s, ordered_json& config) {
  config["mamba_n_heads"] = s.heads;
  config["mamba_d_head"] = s.head_dim;
  config["mamba_n_groups"] = s.groups;
  config["mamba_d_state"] = s.state;
  config["mamba_d_conv"] = s.kernel;
  config["mamba_chunk_size"] = s.chunk;
  config["mamba_conv_bias"] = s.conv_bias;
  config["mamba_proj_bias"] = false;
}

// Attention and a state space side by side.
void add_falcon_h1(const ModelSpec& m, ordered_json& config) {
  const StateSpaceSpec& s = m.state_space;
  add_mamba_sizes(s, config);
  config["mamba_d_ssm"] = s.width();
  config["mamba_rms_norm"] = s.norm;
  config["mamba_norm_before_gate"] = config["projectors_bias"] = false;
  config["attention_dropout"] = 0.0;
  config["embedding_multiplier"] = m.scales.embedding;
  config["lm_head_multiplier"] = inverse_of(m.scales.logits_divisor);
  config["attention_in_multiplier"] = config["ssm_in_multiplier"] = 1.0;
  config["key_multiplier"] = key_multiplier(m);
  config["attention_out_multiplier"] = m.scales.attention_out;
  config["ssm_multipliers"] = m.scales.state_space;
  config["ssm_out_multiplier"] = m.scales.state_space_out;
  config["mlp_multipliers"] = {m.scales.mlp_gate, m.scales.mlp_out};
}

void add_state_space(const ModelSpec& m, ordered_json& config) {
  const StateSpaceSpec& s = m.state_space;
  if (s.is_delta()) return add_delta_rule(m, config);
  if (s.beside_attention) return add_falcon_h1(m, config);
  if (s.heads == 0 && config["model_type"] != "granitemoehybrid") return;
  if (s.width() % m.hidden != 0)
    refuse(
        "model {}: transformers has state spaces of a multiple of hidden = {} channels alone, and "
        "ssm_heads x ssm_head_dim = {} x {}; legal: a product that is one",
        m.name, m.hidden, s.heads, s.head_dim);
  if (s.heads > 0) {
    add_mamba_sizes(s, config);
    config["mamba_expand"] = s.width() / m.hidden;
  } else {
    config["mamba_n_heads"] = 1;  // unused, but its default of 128 would have to divide as well
  }
  if (config["model_type"] == "bamba") {
    config["attn_layer_indices"] = s.attention_layers;
    return;
  }
  config.erase("mlp_bias");
  config["shared_intermediate_size"] = m.experts == Experts::none ? m.mlp_hidden : m.shared_width();
  config["num_local_experts"] = m.num_experts;
  config["num_experts_per_tok"] = m.experts_per_token;
  config["position_embedding_type"] = m.rope.unturned_every == 1 ? "nope" : "rope";
  config["layer_types"] = json::array();
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    config["layer_types"].push_back(m.has_state_space(layer) ? "linear_attention" : "full_attention");
}

// Says not to adjust the MLP's width.
void add_short_conv(const ModelSpec& m, ordered_json& config) {
  if (m.short_conv.kernel == 0) return;
  config["norm_eps"] = config["rms_norm_eps"];
  for (const char* other : {"rms_norm_eps", "hidden_act", "attention_bias", "mlp_bias"}) config.erase(other);
  config["conv_L_cache"] = m.short_conv.kernel;
  config["conv_bias"] = false;
  config["layer_types"] = json::array();
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    config["layer_types"].push_back(m.has_short_conv(layer) ? "conv" : "full_attention");
  if (m.experts == Experts::none) {
    config["block_auto_adjust_ff_dim"] = false;
    return;
  }
  config["moe_intermediate_size"] = m.expert_hidden;
  config["num_experts"] = m.num_experts;
  config["num_experts_per_tok"] = m.experts_per_token;
  config["num_dense_layers"] = m.num_dense_layers;
  config["norm_topk_prob"] = m.router.normalise;
  config["routed_scaling_factor"] = m.router.scale;
  config["use_expert_bias"] = true;
}

void add_latent(const ModelSpec& m, ordered_json& config) {
  if (config["model_type"] != "mistral4") config["head_dim"] = m.rotary_dim;  // as in transformers
  config["q_lora_rank"] = m.q_rank > 0 ? ordered_json(m.q_rank) : ordered_json();
  config["kv_lora_rank"] = m.kv_rank;
  config["qk_rope_head_dim"] = m.rotary_dim;
  config["qk_nope_head_dim"] = m.head_dim - m.rotary_dim;
  config["v_head_dim"] = m.value_head_dim;
}

void add_deepseek_experts(const ModelSpec& m, ordered_json& config) {
  const bool experts = m.experts != Experts::none;
  config["first_k_dense_replace"] = experts ? m.num_dense_layers : m.num_layers;
  const bool sigmoids = config["model_type"] != "deepseek_v2" && config["model_type"] != "mistral4";
  if (sigmoids) config["num_nextn_predict_layers"] = m.num_mtp_layers;
  if (!experts) return;
  config["n_routed_experts"] = m.num_experts;
  config["n_shared_experts"] = m.num_shared_experts;
  config["num_experts_per_tok"] = m.experts_per_token;
  config["moe_intermediate_size"] = m.expert_hidden;
  config["routed_scaling_factor"] = m.router.scale;
  config["norm_topk_prob"] = m.router.normalise;
  config["n_group"] = m.router.groups;
  config["topk_group"] = m.router.most_groups;
  config["scoring_func"] = sigmoids ? "sigmoid" : "softmax";
  config["topk_method"] = sigmoids ? "noaux_tc" : m.router.groups > 1 ? "group_limited_greedy" : "greedy";
}

ordered_json gpt2_config(const ModelSpec& m) {
  return {{"n_layer", m.num_layers},
          {"n_embd", m.hidden},
          {"n_head", m.num_heads},
          {"n_inner", m.mlp_hidden},
          {"n_positions", m.max_seq},
          {"layer_norm_epsilon", m.norm_eps},
          {"activation_function", name_in_transformers(m.activation)},
          {"resid_pdrop", 0.0},
          {"embd_pdrop", 0.0},
          {"attn_pdrop", 0.0}};
}

// GPT-2's relatives, whose configurations have other key names.
ordered_json positions_config(const ModelSpec& m, const std::string& type) {
  if (type == "opt")
    return {{"num_hidden_layers", m.num_layers},
            {"hidden_size", m.hidden},
            {"num_attention_heads", m.num_heads},
            {"ffn_dim", m.mlp_hidden},
            {"max_position_embeddings", m.max_seq},
            {"word_embed_proj_dim", m.hidden},
            {"activation_function", name_in_transformers(m.activation)},
            {"do_layer_norm_before", true},
            {"enable_bias", true},
            {"layer_norm_elementwise_affine", true},
            {"dropout", 0.0},
            {"attention_dropout", 0.0}};
  if (type == "gpt_bigcode") {
    ordered_json config = gpt2_config(m);
    config["multi_query"] = true;
    return config;
  }
  ordered_json types = json::array();
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    types.push_back({{m.window.in(layer) ? "local" : "global"}, 1});
  return {{"num_layers", m.num_layers},
          {"hidden_size", m.hidden},
          {"num_heads", m.num_heads},
          {"intermediate_size", m.mlp_hidden},
          {"max_position_embeddings", m.max_seq},
          {"attention_types", types},
          {"window_size", m.window.size > 0 ? m.window.size : 256},
          {"layer_norm_epsilon", m.norm_eps},
          {"activation_function", name_in_transformers(m.activation)},
          {"resid_dropout", 0.0},
          {"embed_dropout", 0.0},
          {"attention_dropout", 0.0}};
}

// ALiBi's. transformers has no maximum length for BLOOM, but keeps unknown keys.
ordered_json alibi_config(const ModelSpec& m, const std::string& type) {
  if (type == "bloom")
    return {{"n_layer", m.num_layers},
            {"hidden_size", m.hidden},
            {"n_head", m.num_heads},
            {"seq_length", m.max_seq},
            {"layer_norm_epsilon", m.norm_eps},
            {"apply_residual_connection_post_layernorm", false},
            {"hidden_dropout", 0.0},
            {"attention_dropout", 0.0}};
  ordered_json attention{{"alibi", true}};
  if (m.scales.attention > 0) attention["softmax_scale"] = m.scales.attention;
  return {{"n_layers", m.num_layers},         {"d_model", m.hidden},
          {"n_heads", m.num_heads},           {"max_seq_len", m.max_seq},
          {"layer_norm_epsilon", m.norm_eps}, {"attn_config", attention}};
}

// Only state spaces. transformers has no maximum length, but keeps unknown keys.
ordered_json mamba2_config(const ModelSpec& m) {
  const StateSpaceSpec& s = m.state_space;
  if (s.width() % m.hidden != 0)
    refuse(
        "model {}: transformers has state spaces of a multiple of hidden = {} channels alone, and "
        "ssm_heads x ssm_head_dim = {} x {}; legal: a product that is one",
        m.name, m.hidden, s.heads, s.head_dim);
  return {{"num_hidden_layers", m.num_layers},
          {"hidden_size", m.hidden},
          {"num_heads", s.heads},
          {"head_dim", s.head_dim},
          {"expand", s.width() / m.hidden},
          {"n_groups", s.groups},
          {"state_size", s.state},
          {"conv_kernel", s.kernel},
          {"use_conv_bias", s.conv_bias},
          {"chunk_size", s.chunk},
          {"hidden_act", "silu"},
          {"use_bias", false},
          {"residual_in_fp32", false},
          {"layer_norm_epsilon", m.norm_eps},
          {"max_position_embeddings", m.max_seq}};
}

// Layers with one part each.
ordered_json nemotron_h_config(const ModelSpec& m) {
  ordered_json config{{"model_type", "nemotron_h"},
                      {"architectures", {transformers_type(m).architecture}},
                      {"layers_block_type", json::array()},
                      {"hidden_size", m.hidden},
                      {"intermediate_size", m.mlp_hidden},
                      {"mlp_hidden_act", "relu2"},
                      {"mlp_bias", m.mlp_bias},
                      {"num_attention_heads", m.num_heads},
                      {"num_key_value_heads", m.num_kv_heads},
                      {"head_dim", m.head_dim},
                      {"attention_bias", false},
                      {"attention_dropout", 0.0},
                      {"max_position_embeddings", m.max_seq},
                      {"layer_norm_epsilon", m.norm_eps},
                      {"residual_in_fp32", false},
                      {"num_nextn_predict_layers", 0}};
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    config["layers_block_type"].push_back(m.has_state_space(layer) ? "linear_attention"
                                          : m.has_attention(layer) ? "full_attention"
                                          : m.has_experts(layer)   ? "moe"
                                                                   : "mlp");
  if (const StateSpaceSpec& s = m.state_space; s.heads > 0) {
    config["mamba_num_heads"] = s.heads;
    config["mamba_head_dim"] = s.head_dim;
    config["n_groups"] = s.groups;
    config["ssm_state_size"] = s.state;
    config["conv_kernel"] = s.kernel;
    config["use_conv_bias"] = s.conv_bias;
    config["chunk_size"] = s.chunk;
    config["mamba_hidden_act"] = "silu";
    config["use_bias"] = config["mamba_proj_bias"] = false;
  }
  if (m.num_expert_layers() == 0) return config;
  add_deepseek_experts(m, config);
  for (const char* other : {"first_k_dense_replace", "scoring_func", "topk_method"}) config.erase(other);
  config["moe_shared_expert_intermediate_size"] = m.shared_width();
  config["moe_latent_size"] = m.expert_latent > 0 ? ordered_json(m.expert_latent) : ordered_json();
  return config;
}

// Several heads of keys and values are those of its new architecture, as is a norm for attention and one for
// the MLP.
ordered_json falcon_config(const ModelSpec& m) {
  const bool one_head = m.num_kv_heads == 1 && !m.parallel_norms,
             grouped = m.parallel_residual && !one_head && (m.parallel_norms || m.num_kv_heads < m.num_heads);
  ordered_json config{{"model_type", "falcon"},
                      {"architectures", {transformers_type(m).architecture}},
                      {"num_hidden_layers", m.num_layers},
                      {"hidden_size", m.hidden},
                      {"ffn_hidden_size", m.mlp_hidden},
                      {"num_attention_heads", m.num_heads},
                      {"num_kv_heads", m.num_kv_heads},
                      {"max_position_embeddings", m.max_seq},
                      {"layer_norm_epsilon", m.norm_eps},
                      {"rope_theta", m.rope.theta},
                      {"activation", "gelu"},
                      {"bias", m.mlp_bias},
                      {"alibi", false},
                      {"new_decoder_architecture", grouped},
                      {"multi_query", one_head},
                      {"parallel_attn", m.parallel_residual},
                      {"hidden_dropout", 0.0},
                      {"attention_dropout", 0.0}};
  if (grouped) config["num_ln_in_parallel_attn"] = m.parallel_norms ? 2 : 1;
  add_rope(m, config);
  return config;
}

// Whether the type's intermediate_size is that of an expert.
bool names_experts_alone(const ModelSpec& m, const std::string& type) {
  return type == "mixtral" || type == "minimax_m2" || type == "gpt_oss" || type == "olmoe" ||
         type == "flex_olmo" || type == "hunyuan_v1_moe" || type == "cohere2_moe" ||
         (type.starts_with("granitemoe") && m.experts != Experts::none);
}

// Which layers have experts, as most types say it.
void add_kinds_of_mlps(const ModelSpec& m, ordered_json& config) {
  config["mlp_layer_types"] = json::array();
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    config["mlp_layer_types"].push_back(m.has_experts(layer) ? "sparse" : "dense");
}

// Mixtures of a llama's layers, each under the names of its type.
void add_experts(const ModelSpec& m, const std::string& type, ordered_json& config) {
  const auto add = [&](const char* all, const char* of_token) {
    config[all] = m.num_experts;
    config[of_token] = m.experts_per_token;
  };
  const auto add_usual = [&] { add("num_experts", "num_experts_per_tok"); };
  const bool gpt_oss = type == "gpt_oss", next = type == "qwen3_next", mellum = type == "mellum";
  if (m.latent_attention() || type == "glm4_moe" || type == "exaone_moe") add_deepseek_experts(m, config);
  if (type == "mixtral" || type == "minimax_m2" || gpt_oss || type == "granitemoe")
    add("num_local_experts", "num_experts_per_tok");
  if (gpt_oss) {
    config.erase("mlp_bias");  // experts always have them
    config["attention_bias"] = m.qkv_bias || m.attention_out_bias;
    config["attention_dropout"] = 0.0;
    config["swiglu_alpha"] = m.clamp.alpha;
    config["swiglu_limit"] = m.clamp.limit;
  }
  if (type == "olmoe" || type == "flex_olmo") {
    add_usual();
    config["norm_topk_prob"] = m.router.normalise;
  }
  if (type == "qwen2_moe" || type == "qwen3_moe" || mellum || next) {
    add_usual();
    config["moe_intermediate_size"] = m.expert_hidden;
    config["norm_topk_prob"] = m.router.normalise;
    if (mellum) {
      add_kinds_of_mlps(m, config);
    } else {
      config["decoder_sparse_step"] = 1;
      config["mlp_only_layers"] = json::array();
      for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
        if (!m.has_experts(layer)) config["mlp_only_layers"].push_back(layer);
    }
  }
  if (type == "qwen2_moe") config["qkv_bias"] = m.qkv_bias;
  if (type == "qwen2_moe" || next) config["shared_expert_intermediate_size"] = m.shared_width();
  if (type == "hunyuan_v1_moe") add("num_experts", "moe_topk");
  if (type == "exaone_moe") {
    for (const char* other : {"n_routed_experts", "n_shared_experts", "num_nextn_predict_layers"})
      config.erase(other);
    config["num_experts"] = m.num_experts;
    config["num_shared_experts"] = m.num_shared_experts;
  }
  if (type == "hy_v3") {
    add_usual();
    config["moe_intermediate_size"] = m.expert_hidden;
    config["num_shared_experts"] = m.num_shared_experts;
    config["router_scaling_factor"] = m.router.scale;
    add_kinds_of_mlps(m, config);
  }
  if (type == "afmoe") {
    add_usual();
    config["moe_intermediate_size"] = m.expert_hidden;
    config["num_shared_experts"] = m.num_shared_experts;
    config["num_dense_layers"] = m.num_dense_layers;
    config["route_scale"] = m.router.scale;
    config["mup_enabled"] = m.scales.embedding != 1;
  }
  if (type == "cohere2_moe") {
    add_usual();
    config["num_shared_experts"] = m.num_shared_experts;
    config["shared_expert_combination_strategy"] = "sum";
    config["expert_selection_fn"] = m.router.scores == RouterScores::sigmoid ? "sigmoid" : "softmax";
    config["norm_topk_prob"] = m.router.normalise;
    config["mlp_layer_types"] = std::vector<std::string>(static_cast<std::size_t>(m.num_layers), "sparse");
  }
}

// Caps of scores and logits, and the factors of Gemma's and Granite's types.
void add_factors(const ModelSpec& m, const std::string& type, ordered_json& config) {
  const auto cap = [](double value) { return value > 0 ? ordered_json(value) : ordered_json(); };
  const bool capped = type == "gemma2" || type == "vaultgemma";
  if (capped) config["attn_logit_softcapping"] = cap(m.caps.attention);
  if (capped || type == "nanochat") config["final_logit_softcapping"] = cap(m.caps.logits);
  if (capped || type == "gemma3_text") {
    config["hidden_activation"] = config["hidden_act"];
    config.erase("hidden_act");
    const double scalar = m.scales.attention > 0 ? 1 / (m.scales.attention * m.scales.attention)
                                                 : static_cast<double>(m.head_dim);
    // transformers loads only whole numbers.
    if (std::abs(scalar - std::round(scalar)) < 1e-9 * scalar)
      config["query_pre_attn_scalar"] = std::llround(scalar);
    else
      config["query_pre_attn_scalar"] = scalar;
  } else if (const bool hyperclovax = type == "hyperclovax"; type.starts_with("granite") || hyperclovax) {
    config["embedding_multiplier"] = m.scales.embedding;
    config["attention_multiplier"] =
        m.scales.attention > 0 ? m.scales.attention : 1 / std::sqrt(static_cast<double>(m.head_dim));
    config["residual_multiplier"] = m.scales.residual;
    config["logits_scaling"] = hyperclovax ? inverse_of(m.scales.logits_divisor) : m.scales.logits_divisor;
  }
}

ordered_json llama_config(const ModelSpec& m, const TransformersType& of) {
  const std::string type = of.name;
  const bool seed_oss = type == "seed_oss";
  refuse_experts_of_no_type(m, type);
  refuse_uneven_heads(m, type);
  ordered_json config{{"model_type", type},
                      {"architectures", {of.architecture}},
                      {"num_hidden_layers", m.num_layers},
                      {"hidden_size", m.hidden},
                      {"intermediate_size", names_experts_alone(m, type) ? m.expert_hidden : m.mlp_hidden},
                      {"num_attention_heads", m.num_heads},
                      {"num_key_value_heads", m.num_kv_heads},
                      {"head_dim", m.head_dim},
                      {"max_position_embeddings", m.max_seq},
                      {"rms_norm_eps", m.norm_eps},
                      {"rope_theta", m.rope.theta},
                      {"hidden_act", name_in_transformers(m.activation)},
                      {"attention_bias", seed_oss ? m.qkv_bias : m.attention_out_bias},
                      {"mlp_bias", m.mlp_bias}};
  if (seed_oss) {
    config["attention_out_bias"] = m.attention_out_bias;
    config["attention_dropout"] = config["residual_dropout"] = 0.0;
  }
  if (m.latent_attention()) add_latent(m, config);
  add_experts(m, type, config);
  add_rope(m, config);
  add_window(m, config);
  add_factors(m, type, config);
  return config;
}

}  // namespace

std::string hugging_face_config(const ModelSpec& m, DType dtype, const TextBounds& bounds) {
  const TransformersType& of = transformers_type(m);
  const std::string type = of.name;
  ordered_json config;
  if (m.family == Family::gpt2) {
    config = {{"model_type", type}, {"architectures", {of.architecture}}};
    config.update(gpt2_config(m));
  } else if (m.family == Family::neox) {
    config = {{"model_type", type},
              {"architectures", {of.architecture}},
              {"num_hidden_layers", m.num_layers},
              {"hidden_size", m.hidden},
              {"intermediate_size", m.mlp_hidden},
              {"num_attention_heads", m.num_heads},
              {"max_position_embeddings", m.max_seq},
              {"layer_norm_eps", m.norm_eps},
              {"hidden_act", name_in_transformers(m.activation)},
              {"use_parallel_residual", m.parallel_residual},
              {"attention_bias", true},
              {"attention_dropout", 0.0},
              {"hidden_dropout", 0.0},
              {"rotary_pct", rotary_part(m)},
              {"rotary_emb_base", m.rope.theta}};
    add_rope(m, config);
  } else if (type == "falcon") {
    config = falcon_config(m);
  } else if (type == "gptj" || type == "codegen") {
    config = gpt2_config(m);
    config["model_type"] = type;
    config["architectures"] = {of.architecture};
    config["rotary_dim"] = m.turned_width();
  } else if (m.learned_positions || m.alibi || type == "mamba2") {
    config = m.learned_positions ? positions_config(m, type)
             : m.alibi           ? alibi_config(m, type)
                                 : mamba2_config(m);
    config["model_type"] = type;
    config["architectures"] = {of.architecture};
  } else if (!m.layer_pattern.empty()) {
    config = nemotron_h_config(m);
  } else {
    config = llama_config(m, of);
  }
  if (m.family == Family::llama && m.layer_pattern.empty() && !m.learned_positions && !m.alibi) {
    add_later_families(m, config);
    add_state_space(m, config);
    add_short_conv(m, config);
  }
  config["vocab_size"] = m.vocab;
  config["tie_word_embeddings"] = m.tied_embedding;
  config[of.init_key] = m.init_std;
  config["torch_dtype"] = dtype == DType::f64 ? "float64" : dtype == DType::bf16 ? "bfloat16" : "float32";
  if (bounds.begin || type != "cwm")  // transformers accepts no null for it
    config["bos_token_id"] = bounds.begin ? ordered_json(*bounds.begin) : ordered_json();
  config["eos_token_id"] = bounds.ends.empty()       ? ordered_json()
                           : bounds.ends.size() == 1 ? ordered_json(bounds.ends.front())
                                                     : ordered_json(bounds.ends);
  config["pad_token_id"] = nullptr;
  const std::string text = config.dump(2) + "\n";
  refuse_inexpressible(m, type, text);
  return text;
}

}  // namespace echelon
