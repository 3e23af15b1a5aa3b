// Types with a gated short convolution in place of attention in some layers.
#include <fmt/format.h>

#include "spec/config_llama.h"
#include "spec/model_type_readers.h"

namespace echelon {

namespace {

// LFM2's layers: those of a short convolution, and attention where layer_types or the older full_attn_idxs
// say so.
std::vector<std::int64_t> lfm2_attention_layers(const Config& config, const ModelSpec& m) {
  if (config.has("layer_types") || !config.has("full_attn_idxs")) {
    // Without either transformers would take attention in all.
    std::vector<std::int64_t> layers = attention_layers(config, {"full_attention"}, {"conv"}, m.num_layers);
    // A model without convolutions is one of Qwen3's kind here, whose weights have other names.
    if (std::ssize(layers) == m.num_layers) config.wrong("layer_types", "a list with conv at least once");
    return layers;
  }
  const char* const key = "full_attn_idxs";
  const std::string legal =
      fmt::format("a list of layers from 0 to {} without at least one", m.num_layers - 1);
  std::vector<std::int64_t> layers = listed_layers(config, key, legal, m.num_layers);
  if (std::ssize(layers) == m.num_layers) config.wrong(key, legal);
  return layers;
}

void read_lfm2_layers(const Config& config, const char* mlp_hidden_key, ModelSpec& m) {
  read_llama(config,
             {.activations = {Activation::swiglu},
              .rope_theta = 1e6,
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

}  // namespace

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

}  // namespace echelon
