// The configuration that transformers reads: the other way of spec/model_hugging_face.cpp, which is asked
// whether it says the model.
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "base/error.h"
#include "checkpoint/hugging_face.h"

namespace echelon {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// A configuration means what its reader makes of it: that has to be the model, in every field.
void refuse_inexpressible(const ModelSpec& model, const std::string& type, const std::string& config) {
  ModelSpec meant = model_from_hugging_face(config, fmt::format("model {} as config.json", model.name));
  meant.name = model.name;
  if (model.num_expert_layers() == model.num_layers) meant.mlp_hidden = model.mlp_hidden;  // of no layer
  meant.mtp_weight = model.mtp_weight;  // a training's affair
  for (const auto& [field, here, there] : differences(model, meant))
    refuse(
        "model {}: {} = {} cannot be said in a {} configuration of transformers, where it is {}; legal: a "
        "model {}",
        model.name, field, here.empty() ? "nothing" : here, type, there.empty() ? "nothing" : there,
        there.empty() ? "without it" : fmt::format("with {} = {}", field, there));
}

// What transformers' classes of these types ask for, though it decides nothing where head_dim is said.
void refuse_uneven_heads(const ModelSpec& m, const std::string& type) {
  // Of these it is head_dim.
  for (const char* one : {"stablelm", "cohere2", "helium"})
    if (type == one && m.attention_width() != m.hidden)
      refuse("model {}: transformers has no {} with num_heads x head_dim = {} x {}; legal: hidden = {}",
             m.name, type, m.num_heads, m.head_dim, m.hidden);
  const bool asks = type == "gemma2" || type == "gemma3_text" || type == "deepseek_v2" || type == "arcee";
  if (!asks || m.hidden % m.num_heads == 0) return;
  refuse(
      "model {}: transformers loads a {} only where num_heads = {} divides hidden = {}; legal: a divisor of "
      "{}",
      m.name, type, m.num_heads, m.hidden, m.hidden);
}

// As a part of a head, of which transformers rounds down.
double rotary_part(const ModelSpec& m) {
  const auto whole = static_cast<double>(m.head_dim);
  const double part = static_cast<double>(m.turned_width()) / whole;
  return static_cast<std::int64_t>(whole * part) < m.turned_width() ? std::nextafter(part, 2.0) : part;
}

// The mscale_all_dim of a DeepSeek whose scores are sharpened by scales.attention (model_hugging_face.cpp).
double sharpening(const ModelSpec& m) {
  const double root = std::sqrt(m.scales.attention * std::sqrt(static_cast<double>(m.head_dim)));
  const double by = (root - 1) / (0.1 * std::log(m.rope.factor));
  return std::round(by * 1e12) / 1e12;  // those of configurations have few digits
}

void add_rope(const ModelSpec& m, ordered_json& config) {
  const RopeSpec& r = m.rope;
  if (r.unturned_every > 0 && config["model_type"] == "smollm3") {
    config["no_rope_layers"] = json::array();
    for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
      config["no_rope_layers"].push_back(m.is_turned(layer) ? 1 : 0);
  }
  const std::string type = config["model_type"];
  const bool always = type == "stablelm" || type == "nemotron" || type == "glm" || type == "glm4",
             partial = always || (m.rotary_dim > 0 && m.fused_projections);  // others turn whole heads
  if (partial) config["partial_rotary_factor"] = rotary_part(m);
  const bool scaled = r.scaling != RopeScaling::none;
  if (!scaled && r.local_theta == 0 && m.experts != Experts::gpt_oss) return;  // whose own are scaled
  ordered_json rope{{"rope_type", scaled ? name_of(r.scaling) : "default"}, {"rope_theta", r.theta}};
  if (scaled) rope["factor"] = r.factor;
  if (partial) rope["partial_rotary_factor"] = config["partial_rotary_factor"];
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
  if (any || type == "mistral" || type == "mixtral" || type == "phi3" || type == "starcoder2")
    config["sliding_window"] = any ? ordered_json(m.window.size) : ordered_json();
  if (type == "cohere2") {  // layers have a window where they have positions
    if (!any) config["sliding_window"] = m.max_seq;
    config["layer_types"] = json::array();
    for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
      config["layer_types"].push_back(m.is_turned(layer) ? "sliding_attention" : "full_attention");
    return;
  }
  if (type == "starcoder2") return;  // in all layers
  if (!any && !type.starts_with("gemma") && type != "gpt_oss") return;
  if (type.starts_with("qwen")) {
    config["use_sliding_window"] = true;
    config["max_window_layers"] = 0;
  }
  if (type == "qwen3_moe") return;  // has no types of layers
  config["layer_types"] = json::array();
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
    config["layer_types"].push_back(m.window.in(layer) ? "sliding_attention" : "full_attention");
}

// Of which the inverse is this number again.
double inverse_of(double number) {
  const double near = 1 / number;
  for (const double one : {std::nextafter(near, 0.0), std::nextafter(near, HUGE_VAL)})
    if (1 / near != number && 1 / one == number) return one;
  return near;
}

// Of families with LayerNorm, or with pairs that are turned side by side: what others have under other names.
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
    config["hidden_act"] = "gelu_pytorch_tanh";
    config["attention_dropout"] = config["residual_dropout"] = config["embedding_dropout"] = 0.0;
  } else if (type == "stablelm") {
    rename("rms_norm_eps", "layer_norm_eps");
    config.erase("attention_bias");
    config["use_qkv_bias"] = m.qkv_bias;
    config["use_parallel_residual"] = m.parallel_residual;
    config["qk_layernorm"] = false;
  } else if (type == "nemotron") {
    rename("rms_norm_eps", "norm_eps");
  } else if (type == "cohere" || type == "cohere2") {
    rename("rms_norm_eps", "layer_norm_eps");
    config["logit_scale"] = inverse_of(m.scales.logits_divisor);
  } else if (type == "olmo") {
    config.erase("rms_norm_eps");
    config["clip_qkv"] = nullptr;
  } else if (type == "ernie4_5") {
    rename("attention_bias", "use_bias");
    config.erase("mlp_bias");
  } else if (type == "glm" || type == "glm4" || type == "helium") {
    config["attention_bias"] = m.qkv_bias;
  }
}

void add_deepseek(const ModelSpec& m, ordered_json& config) {
  config["head_dim"] = m.rotary_dim;  // as transformers has it
  config["q_lora_rank"] = m.q_rank > 0 ? ordered_json(m.q_rank) : ordered_json();
  config["kv_lora_rank"] = m.kv_rank;
  config["qk_rope_head_dim"] = m.rotary_dim;
  config["qk_nope_head_dim"] = m.head_dim - m.rotary_dim;
  config["v_head_dim"] = m.value_head_dim;
  const bool experts = m.experts != Experts::none;
  config["first_k_dense_replace"] = experts ? m.num_dense_layers : m.num_layers;
  const bool v3 = config["model_type"] == "deepseek_v3";
  if (v3) config["num_nextn_predict_layers"] = m.num_mtp_layers;
  if (!experts) return;
  config["n_routed_experts"] = m.num_experts;
  config["n_shared_experts"] = m.num_shared_experts;
  config["num_experts_per_tok"] = m.experts_per_token;
  config["moe_intermediate_size"] = m.expert_hidden;
  config["routed_scaling_factor"] = m.router.scale;
  config["norm_topk_prob"] = m.router.normalise;
  config["n_group"] = m.router.groups;
  config["topk_group"] = m.router.most_groups;
  config["scoring_func"] = v3 ? "sigmoid" : "softmax";
  config["topk_method"] = v3 ? "noaux_tc" : m.router.groups > 1 ? "group_limited_greedy" : "greedy";
}

}  // namespace

std::string hugging_face_config(const ModelSpec& m, DType dtype) {
  ordered_json config;
  if (m.family == Family::gpt2) {
    config = {{"model_type", "gpt2"},
              {"architectures", {"GPT2LMHeadModel"}},
              {"n_layer", m.num_layers},
              {"n_embd", m.hidden},
              {"n_head", m.num_heads},
              {"n_inner", m.mlp_hidden},
              {"n_positions", m.max_seq},
              {"layer_norm_epsilon", m.norm_eps},
              {"activation_function", "gelu_new"},
              {"resid_pdrop", 0.0},
              {"embd_pdrop", 0.0},
              {"attn_pdrop", 0.0}};
  } else if (m.family == Family::neox) {
    const double part = rotary_part(m);
    config = {{"model_type", "gpt_neox"},
              {"architectures", {"GPTNeoXForCausalLM"}},
              {"num_hidden_layers", m.num_layers},
              {"hidden_size", m.hidden},
              {"intermediate_size", m.mlp_hidden},
              {"num_attention_heads", m.num_heads},
              {"max_position_embeddings", m.max_seq},
              {"layer_norm_eps", m.norm_eps},
              {"hidden_act", "gelu"},
              {"use_parallel_residual", m.parallel_residual},
              {"attention_bias", true},
              {"attention_dropout", 0.0},
              {"hidden_dropout", 0.0},
              {"rotary_pct", part},
              {"rotary_emb_base", m.rope.theta},
              {"rope_parameters",
               {{"rope_type", "default"}, {"rope_theta", m.rope.theta}, {"partial_rotary_factor", part}}}};
  } else {
    const bool mixtral = m.experts == Experts::mixtral;
    const bool deepseek = m.latent_attention();
    const bool normed = m.experts == Experts::deepseek && m.qk_norm && m.num_shared_experts == 0;
    const bool olmoe = normed && m.qk_norm_whole, qwen3_moe = normed && !olmoe;
    if (m.experts == Experts::deepseek && !normed && !deepseek)
      refuse(
          "model {}: transformers has no class of experts as in deepseek without its latent attention; "
          "legal: "
          "kv_rank above 0, or qk_norm = true and num_shared_experts = 0 (Qwen3's)",
          m.name);
    const bool later = m.norm_kind != NormKind::rms || m.interleaved_rope || m.fused_mlp;
    const bool gemma = m.norms_less_one && !later, gemma1 = gemma && m.norm_place == NormPlace::before,
               gemma2 = gemma && !gemma1 && !m.qk_norm;
    const bool relu2 = m.activation == Activation::relu2;
    const bool olmo = m.norm_place == NormPlace::after && m.qk_norm_whole;
    // Which biases it has a Seed-OSS says one by one.
    const bool seed_oss = m.experts == Experts::none && !m.qk_norm &&
                          (m.qkv_bias != m.attention_out_bias && (m.attention_out_bias || m.mlp_bias));
    const bool v2 = m.experts == Experts::deepseek && m.router.scores == RouterScores::softmax;
    const bool gpt_oss = m.experts == Experts::gpt_oss;
    using NormKind::layer, NormKind::layer_weight, NormKind::layer_plain;
    const bool gelu = m.activation == Activation::gelu, both = m.norm_place == NormPlace::both,
               unturned = m.window.size > 0 || m.rope.unturned_every > 0,
               alike = m.qkv_bias == m.attention_out_bias && m.qkv_bias == m.mlp_bias;
    const auto [type, architecture] =
        m.norm_kind == layer && gelu              ? std::pair{"starcoder2", "Starcoder2ForCausalLM"}
        : m.norm_kind == layer && relu2           ? std::pair{"nemotron", "NemotronForCausalLM"}
        : m.norm_kind == layer                    ? std::pair{"stablelm", "StableLmForCausalLM"}
        : m.norm_kind == layer_weight && unturned ? std::pair{"cohere2", "Cohere2ForCausalLM"}
        : m.norm_kind == layer_weight             ? std::pair{"cohere", "CohereForCausalLM"}
        : m.norm_kind == layer_plain              ? std::pair{"olmo", "OlmoForCausalLM"}
        : m.fused_mlp && both                     ? std::pair{"glm4", "Glm4ForCausalLM"}
        : m.fused_mlp                             ? std::pair{"glm", "GlmForCausalLM"}
        : m.interleaved_rope && alike             ? std::pair{"ernie4_5", "Ernie4_5ForCausalLM"}
        : m.interleaved_rope                      ? std::pair{"helium", "HeliumForCausalLM"}
        : mixtral                                 ? std::pair{"mixtral", "MixtralForCausalLM"}
        : gpt_oss                                 ? std::pair{"gpt_oss", "GptOssForCausalLM"}
        : deepseek && v2                          ? std::pair{"deepseek_v2", "DeepseekV2ForCausalLM"}
        : deepseek                                ? std::pair{"deepseek_v3", "DeepseekV3ForCausalLM"}
        : qwen3_moe                               ? std::pair{"qwen3_moe", "Qwen3MoeForCausalLM"}
        : olmoe                                   ? std::pair{"olmoe", "OlmoeForCausalLM"}
        : m.fused_projections                     ? std::pair{"phi3", "Phi3ForCausalLM"}
        : olmo && m.rope.local_theta > 0          ? std::pair{"olmo3", "Olmo3ForCausalLM"}
        : olmo                                    ? std::pair{"olmo2", "Olmo2ForCausalLM"}
        : gemma1                                  ? std::pair{"gemma", "GemmaForCausalLM"}
        : gemma2                                  ? std::pair{"gemma2", "Gemma2ForCausalLM"}
        : gemma                                   ? std::pair{"gemma3_text", "Gemma3ForCausalLM"}
        : m.scales != ScaleSpec{}                 ? std::pair{"granite", "GraniteForCausalLM"}
        : m.rope.unturned_every > 0               ? std::pair{"smollm3", "SmolLM3ForCausalLM"}
        : seed_oss                                ? std::pair{"seed_oss", "SeedOssForCausalLM"}
        : m.qkv_bias && !m.attention_out_bias     ? std::pair{"qwen2", "Qwen2ForCausalLM"}
        : m.qk_norm                               ? std::pair{"qwen3", "Qwen3ForCausalLM"}
        : relu2                                   ? std::pair{"arcee", "ArceeForCausalLM"}
        // A Mistral without a window is a Llama, but may have heads of any width.
        : m.window.size > 0 || m.hidden % m.num_heads != 0 ? std::pair{"mistral", "MistralForCausalLM"}
                                                           : std::pair{"llama", "LlamaForCausalLM"};
    refuse_uneven_heads(m, type);
    config = {{"model_type", type},
              {"architectures", {architecture}},
              {"num_hidden_layers", m.num_layers},
              {"hidden_size", m.hidden},
              {"intermediate_size", mixtral || gpt_oss || olmoe ? m.expert_hidden : m.mlp_hidden},
              {"num_attention_heads", m.num_heads},
              {"num_key_value_heads", m.num_kv_heads},
              {"head_dim", m.head_dim},
              {"max_position_embeddings", m.max_seq},
              {"rms_norm_eps", m.norm_eps},
              {"rope_theta", m.rope.theta},
              {"hidden_act", "silu"},
              {"attention_bias", seed_oss ? m.qkv_bias : m.attention_out_bias},
              {"mlp_bias", m.mlp_bias}};
    if (relu2) config["hidden_act"] = "relu2";
    if (seed_oss) {
      config["attention_out_bias"] = m.attention_out_bias;
      config["attention_dropout"] = config["residual_dropout"] = 0.0;
    }
    if (olmoe) {
      config["num_experts"] = m.num_experts;
      config["num_experts_per_tok"] = m.experts_per_token;
      config["norm_topk_prob"] = m.router.normalise;
    }
    if (deepseek) add_deepseek(m, config);
    if (mixtral || gpt_oss) {
      config["num_local_experts"] = m.num_experts;
      config["num_experts_per_tok"] = m.experts_per_token;
    }
    if (gpt_oss) {
      config.erase("mlp_bias");  // experts always have them
      config["attention_bias"] = m.qkv_bias || m.attention_out_bias;
      config["attention_dropout"] = 0.0;
      config["swiglu_alpha"] = m.clamp.alpha;
      config["swiglu_limit"] = m.clamp.limit;
    }
    if (qwen3_moe) {
      config["num_experts"] = m.num_experts;
      config["num_experts_per_tok"] = m.experts_per_token;
      config["moe_intermediate_size"] = m.expert_hidden;
      config["norm_topk_prob"] = m.router.normalise;
      config["decoder_sparse_step"] = 1;
      config["mlp_only_layers"] = json::array();
      for (std::int64_t layer = 0; layer < m.num_dense_layers; ++layer)
        config["mlp_only_layers"].push_back(layer);
    }
    add_rope(m, config);
    add_window(m, config);
    if (gemma2) {
      const auto cap = [](double value) { return value > 0 ? ordered_json(value) : ordered_json(); };
      config["attn_logit_softcapping"] = cap(m.caps.attention);
      config["final_logit_softcapping"] = cap(m.caps.logits);
    }
    if (gemma1) {
      config["hidden_act"] = "gelu_pytorch_tanh";
    } else if (gemma) {
      config.erase("hidden_act");
      config["hidden_activation"] = "gelu_pytorch_tanh";
      const double scalar = m.scales.attention > 0 ? 1 / (m.scales.attention * m.scales.attention)
                                                   : static_cast<double>(m.head_dim);
      // transformers loads whole numbers alone.
      if (std::abs(scalar - std::round(scalar)) < 1e-9 * scalar)
        config["query_pre_attn_scalar"] = std::llround(scalar);
      else
        config["query_pre_attn_scalar"] = scalar;
    } else if (m.scales != ScaleSpec{} && !deepseek && !later) {
      config["embedding_multiplier"] = m.scales.embedding;
      config["attention_multiplier"] =
          m.scales.attention > 0 ? m.scales.attention : 1 / std::sqrt(static_cast<double>(m.head_dim));
      config["residual_multiplier"] = m.scales.residual;
      config["logits_scaling"] = m.scales.logits_divisor;
    }
  }
  if (m.family == Family::llama) add_later_families(m, config);
  config["vocab_size"] = m.vocab;
  config["tie_word_embeddings"] = m.tied_embedding;
  config["initializer_range"] = m.init_std;
  config["torch_dtype"] = dtype == DType::f64 ? "float64" : dtype == DType::bf16 ? "bfloat16" : "float32";
  // transformers' own would lie outside a small vocabulary. Of bytes the last one ends a text.
  config["bos_token_id"] = config["eos_token_id"] = m.vocab - 1;
  config["pad_token_id"] = nullptr;
  const std::string text = config.dump(2) + "\n";
  refuse_inexpressible(m, config["model_type"], text);
  return text;
}

}  // namespace echelon
