// Mixtures whose routers choose by the probabilities of a softmax, or by its logits. Cohere's may choose by
// sigmoids.
#include <fmt/format.h>

#include <algorithm>

#include "spec/config_experts.h"
#include "spec/config_llama.h"
#include "spec/config_rope.h"
#include "spec/config_window.h"
#include "spec/model_type_readers.h"

namespace echelon {

// What balances the experts in training (router_aux_loss_coef) is a run's to say.
void read_mixtral(const Config& config, ModelSpec& m) {
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
  m.attention_sinks = true;
  read_llama(config, {.typed = true, .rope_theta = theta, .norm_eps = 1e-5, .biased = true}, m);
  if (!config.has("layer_types")) m.window = {config.integer("sliding_window"), 2};
  m.experts = Experts::gpt_oss;
  m.num_experts = config.integer("num_local_experts");
  m.experts_per_token =
      config.integer(config.has("num_experts_per_tok") ? "num_experts_per_tok" : "experts_per_token");
  m.expert_hidden = m.mlp_hidden;
  m.clamp.alpha = config.real_or("swiglu_alpha", m.clamp.alpha);
  m.clamp.limit = config.real_or("swiglu_limit", m.clamp.limit);
}

// Qwen1.5-MoE and Qwen2's. A window would be in every other layer of the first max_window_layers.
void read_qwen2_moe(const Config& config, ModelSpec& m) {
  config.only_boolean("use_sliding_window", false);
  read_llama(config, {}, m);
  m.qkv_bias = config.boolean_or("qkv_bias", true);
  read_qwen_experts(config, m);
  if (m.experts != Experts::none) read_gated_shared_expert(config, m);
}

// Without a width of heads they share the layer's, and a window is in all layers.
void read_qwen3_moe(const Config& config, ModelSpec& m) {
  Json whole = config.object();
  if (!config.names("head_dim"))
    whole["head_dim"] = even_head_dim(config, "num_attention_heads", "hidden_size");
  whole["max_window_layers"] = 0;
  const Config all(whole, config.where());
  read_qwen(all, false, false, m);
  read_qwen_experts(all, m);
}

// The text of a Qwen3-VL with experts.
void read_qwen3_vl_moe(const Config& config, ModelSpec& m) {
  Json whole = config.object();
  if (!config.has("head_dim"))
    whole["head_dim"] = even_head_dim(config, "num_attention_heads", "hidden_size");
  whole["norm_topk_prob"] = true;  // whatever it says
  read_qwen3_moe(config.with(whole), m);
}

// Granite 3's mixtures, with an MLP for all tokens or without.
void read_granite_moe(const Config& config, bool shared, ModelSpec& m) {
  const char* const key = "shared_intermediate_size";
  m.fused_mlp = true;
  read_llama(config, {.biased = false, .dropped = true}, m);
  read_granite_factors(config, m);
  config.required("num_local_experts");  // transformers would take 8
  const bool has_shared = shared && config.has(key) && config.required(key) != 0;
  read_granite_experts(config, has_shared ? config.integer(key) : 0, m);
  m.mlp_hidden = has_shared ? m.shared_width() : m.expert_hidden;  // of no layer
}

// OLMoE: a mixture in every layer, of experts as wide as intermediate_size.
void read_olmoe(const Config& config, ModelSpec& m) {
  read_llama(config, {.norm_eps = 1e-5}, m);
  m.qk_norm = m.qk_norm_whole = true;
  m.experts = Experts::deepseek;
  m.num_experts = config.integer("num_experts");
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = m.mlp_hidden;
  m.router.normalise = config.boolean_or("norm_topk_prob", false);
  config.only_null("clip_qkv");
  if (m.attention_width() != m.hidden)
    config.wrong("head_dim", fmt::format("{}, as its norms have it,", m.hidden / m.num_heads));
}

// FlexOlmo: OLMo 2's layers with OLMoE's experts.
void read_flex_olmo(const Config& config, ModelSpec& m) {
  read_llama(config, {.rope_theta = 500000}, m);
  m.norm_place = NormPlace::after;
  m.qk_norm = m.qk_norm_whole = true;
  m.experts = Experts::deepseek;
  m.num_experts = config.integer("num_experts");
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = m.mlp_hidden;
  m.router.normalise = config.boolean_or("norm_topk_prob", false);
}

// Mellum 2: Qwen3's experts, a window in some layers, and positions of their own there. What predicts more
// tokens is left out, as transformers leaves it out.
void read_mellum(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_kinds(config, 0);
  m.rope.local_theta = 1e4;
  read_llama(config, {.typed = true, .rope_theta = 5e5}, m);
  m.qk_norm = true;
  if (dense >= m.num_layers) config.wrong("mlp_layer_types", "sparse in some layer");
  m.experts = Experts::deepseek;
  m.num_dense_layers = dense;
  m.num_experts = config.integer("num_experts");
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  m.router.normalise = config.boolean_or("norm_topk_prob", true);
}

// Its mixtures: experts in every layer beside one for all tokens, all as wide.
void read_hunyuan_moe(const Config& config, ModelSpec& m) {
  read_hunyuan(config, m);
  m.experts = Experts::deepseek;
  m.num_experts = same_in_all(config, "num_experts");
  m.experts_per_token = same_in_all(config, "moe_topk");
  m.expert_hidden = m.mlp_hidden;
  m.num_shared_experts = 1;
}

// ERNIE 4.5's mixtures: routers choose by the probabilities of a softmax and biases beside them. What
// predicts more tokens is left out, as transformers leaves it.
void read_ernie_moe(const Config& config, ModelSpec& m) {
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
  m.num_experts = config.integer("moe_num_experts");
  m.experts_per_token = config.integer("moe_k");
  m.expert_hidden = config.integer("moe_intermediate_size");
  const char* const shared = "moe_num_shared_experts";
  m.num_shared_experts =
      config.has(shared) && config.required(shared) == 0 ? 0 : config.integer_or(shared, 2);
}

// Cohere's mixtures: experts beside attention of the same norm, LayerNorm or RMSNorm.
void read_cohere2_moe(const Config& config, ModelSpec& m) {
  const char *const shared = "num_shared_experts", *const kinds = "mlp_layer_types",
                    *const chosen = "expert_selection_fn";
  config.only_null("rope_scaling");  // which it does not heed here
  Json whole = config.object();
  if (config.has("rms_norm_eps")) whole["layer_norm_eps"] = config.required("rms_norm_eps");
  read_cohere(config.with(whole), true, 1e4, m);
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

}  // namespace echelon
