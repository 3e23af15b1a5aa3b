// Types with the gated delta rule in place of attention in some layers.
#include "spec/config_experts.h"
#include "spec/config_llama.h"
#include "spec/model_type_readers.h"

namespace echelon {

// Qwen3-Next's and Qwen3.5's layers: those of the gated delta rule, and gated attention in each fourth or
// where layer_types say so. The three kinds of positions that a Qwen3.5 turns by are one in a text.
void read_delta_rule(const Config& config, ModelSpec& m) {
  m.norms_less_one = m.qk_norm = m.attention_gate = true;
  read_llama(config,
             {.activations = {Activation::swiglu}, .biased = false, .rotary_part = 0.25, .mixed = true}, m);
  StateSpaceSpec& s = m.state_space;
  s.rule = StateRule::gated_delta;
  s.heads = config.integer_or("linear_num_value_heads", 32);
  s.head_dim = config.integer_or("linear_value_head_dim", 128);
  s.groups = config.integer_or("linear_num_key_heads", 16);
  s.state = config.integer_or("linear_key_head_dim", 128);
  s.kernel = config.integer_or("linear_conv_kernel_dim", 4);
  s.conv_bias = false;
  if (config.has("layer_types")) {
    s.attention_layers = attention_layers(config, {"full_attention"}, {"linear_attention"}, m.num_layers);
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

// Qwen3.5's mixtures: Qwen3-Next's layers, all of them with experts.
void read_qwen3_5_moe(const Config& config, ModelSpec& m) {
  Json whole = config.object();
  whole.emplace("intermediate_size", config.integer("moe_intermediate_size"));  // of no layer
  for (const char* other : {"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"}) whole.erase(other);
  read_qwen3_next(config.with(whole), m);
}

}  // namespace echelon
