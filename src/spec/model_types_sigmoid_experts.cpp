// Mixtures whose routers choose by sigmoids, and by biases beside them, as DeepSeek-V3's do.
#include <fmt/format.h>

#include <cmath>

#include "spec/config_experts.h"
#include "spec/config_llama.h"
#include "spec/config_window.h"
#include "spec/model_type_readers.h"

namespace echelon {

// GLM-4.5: DeepSeek-V3's experts behind attention of Qwen's kind, a part of each head turned, or whole ones
// (Sarvam).
void read_glm4_moe(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_layers(config, 1);
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
  read_llama(config, {.rope_theta = 5e6, .rotary_part = 1.0}, m);
  const bool says_part =
      config.has("rope_parameters") && config.required("rope_parameters").contains("partial_rotary_factor");
  if (config.has("rotary_dim") && !says_part) {  // of published configurations
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

// K-EXAONE: EXAONE 4's windows and norms of heads, norms before, DeepSeek-V3's experts. What predicts more
// tokens is left out, as transformers leaves it.
void read_exaone_moe(const Config& config, ModelSpec& m) {
  const std::int64_t dense = read_dense_kinds(config, read_dense_layers(config, 1));
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

// Hunyuan 3: DeepSeek-V3's experts behind norms of heads. What predicts more tokens is left out, as
// transformers leaves it out.
void read_hy_v3(const Config& config, ModelSpec& m) {
  constexpr double theta = 11158840, scale = 2.826;
  const std::int64_t dense = read_dense_kinds(config, read_dense_layers(config, 1));
  read_llama(config, {.rope_theta = theta, .norm_eps = 1e-5, .biased = false}, m);
  m.qk_norm = true;
  if (dense >= m.num_layers) config.wrong("mlp_layer_types", "sparse in some layer");
  m.experts = Experts::deepseek;
  m.num_dense_layers = dense;
  m.num_experts = config.integer("num_experts");
  m.num_shared_experts = config.integer_or("num_shared_experts", 1);
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  m.router = {.scores = RouterScores::sigmoid, .scale = config.real_or("router_scaling_factor", scale)};
}

// Arcee's Trinity: norms before and behind, gated attention, positions where there is a window alone, and
// DeepSeek-V3's experts.
void read_afmoe(const Config& config, ModelSpec& m) {
  const char* const dense = "num_dense_layers";
  m.norm_place = NormPlace::both;
  read_llama(config, {.typed = true, .norm_eps = 1e-5}, m);
  m.qk_norm = m.attention_gate = true;
  read_turned_windows(config, m, "global_attn_every_n_layers");
  if (config.boolean_or("mup_enabled", false)) m.scales.embedding = std::sqrt(static_cast<double>(m.hidden));
  m.experts = Experts::deepseek;
  m.num_dense_layers = config.has(dense) && config.required(dense) == 0 ? 0 : config.integer_or(dense, 1);
  if (m.num_dense_layers >= m.num_layers) config.wrong(dense, fmt::format("0 to {}", m.num_layers - 1));
  m.num_experts = config.integer("num_experts");
  m.num_shared_experts = config.integer_or("num_shared_experts", 2);
  m.experts_per_token = config.integer("num_experts_per_tok");
  m.expert_hidden = config.integer("moe_intermediate_size");
  m.router = {.scores = RouterScores::sigmoid, .scale = config.real_or("route_scale", 1)};
}

}  // namespace echelon
