// Types with Mamba-2's state space, in place of attention in some layers or beside it in all.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "spec/config_experts.h"
#include "spec/config_llama.h"
#include "spec/model_type_readers.h"

namespace echelon {

namespace {

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
  s.state = config.integer("mamba_d_state");
  read_mamba_convolution(config, s);
}

// So many numbers above 0, or ones where there is no list.
std::vector<double> multipliers(const Config& config, const char* key, std::size_t count) {
  if (!config.has(key)) return std::vector<double>(count, 1.0);
  std::vector<double> values = numbers(config, key);
  if (values.size() != count) config.wrong(key, fmt::format("a list of {} numbers", count));
  return values;
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

}  // namespace

void read_bamba(const Config& config, ModelSpec& m) {
  const char* const key = "attn_layer_indices";
  read_llama(config,
             {.activations = {Activation::swiglu},  // a convolution's too
              .norm_eps = 1e-5,
              .biased = false,
              .mlp_biased = true,
              .rotary_part = 0.5,
              .rotary_part_on_top = false},
             m);
  config.only_real("z_loss_coefficient", 0.0);
  std::vector<std::int64_t> layers;
  if (config.has(key))
    layers = listed_layers(config, key, fmt::format("a list of layers from 0 to {}", m.num_layers - 1),
                           m.num_layers);
  // A model that has no state space is one of Llama's kind here, whose weights have other names.
  if (std::ssize(layers) == m.num_layers) config.wrong(key, "a list that lacks at least one layer");
  read_state_space(config, std::move(layers), m);
}

// Falcon-H1: attention and a state space side by side in every layer. What multiplies attention's input, its
// keys and its output is one factor of scores and one of what it makes.
void read_falcon_h1(const Config& config, ModelSpec& m) {
  read_llama(config, {.activations = {Activation::swiglu}, .norm_eps = 1e-5}, m);
  StateSpaceSpec& s = m.state_space;
  s.beside_attention = true;
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
  if (in * in * keys == 0)
    config.wrong(keys == 0 ? "key_multiplier" : "attention_in_multiplier", "a number other than 0");
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

// Granite 4's: the MLP of each layer is the shared one, beside routed experts or without. In some all layers
// have attention.
void read_granite_hybrid(const Config& config, ModelSpec& m) {
  m.fused_mlp = true;
  read_llama(config, {.activations = {Activation::swiglu}, .biased = false, .dropped = true, .mixed = true},
             m);
  config.required("num_local_experts");  // transformers would take 8
  m.mlp_hidden = config.integer("shared_intermediate_size");
  read_granite_factors(config, m);
  if (config.required("num_local_experts") != 0) read_granite_experts(config, m.mlp_hidden, m);
  if (config.text_or("position_embedding_type", "nope") == "rope")
    m.rope.unturned_every = 0;
  else
    m.rope.unturned_every = 1;
  config.only_text("position_embedding_type", "nope", {"nope", "rope"});
  read_state_space(
      config,
      attention_layers(config, {"full_attention", "attention"}, {"linear_attention", "mamba"}, m.num_layers),
      m);
}

// Mamba-2 alone: each layer a state space. A configuration says no longest sequence, as a state has none.
void read_mamba2(const Config& config, ModelSpec& m) {
  constexpr std::int64_t any_length = std::int64_t{1} << 20;
  m.family = Family::llama;
  m.num_layers = config.integer("num_hidden_layers");
  if (m.num_layers > 100000) config.wrong("num_hidden_layers", "at most 100000");
  m.layer_pattern.assign(static_cast<std::size_t>(m.num_layers), 'M');
  m.hidden = config.integer("hidden_size");
  m.num_heads = m.num_kv_heads = 1;  // of no layer
  m.head_dim = m.mlp_hidden = m.hidden;
  m.vocab = config.integer("vocab_size");
  m.max_seq = config.integer_or("max_position_embeddings", any_length);
  m.tied_embedding = config.boolean_or("tie_word_embeddings", false);
  m.norm_eps = config.real_or("layer_norm_epsilon", 1e-5);
  m.rope.unturned_every = 1;
  StateSpaceSpec& s = m.state_space;
  s.heads = config.integer("num_heads");
  s.head_dim = config.integer("head_dim");
  if (config.integer_or("expand", 2) * m.hidden != s.heads * s.head_dim)
    config.wrong("num_heads", fmt::format("expand x hidden_size / head_dim = {} / {}",
                                          config.integer_or("expand", 2) * m.hidden, s.head_dim));
  s.groups = config.integer("n_groups");
  s.state = config.integer_or("state_size", 128);
  s.kernel = config.integer_or("conv_kernel", 4);
  s.conv_bias = config.boolean_or("use_conv_bias", true);
  s.chunk = config.integer_or("chunk_size", 256);
  config.only_text("hidden_act", "silu", {"silu", "swish"});
  config.only_boolean("use_bias", false);
  config.only_boolean("rms_norm", true);
  read_step_limit(config);  // norm_before_gate is heeded by nobody: the gate is first
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
  m.num_kv_heads = config.integer_or("num_key_value_heads", m.num_heads);
  m.head_dim = config.integer_or(one_of(config, "attention_head_dim", "head_dim"), 128);  // older files' name
  m.mlp_hidden = config.integer("intermediate_size");
  m.vocab = config.integer("vocab_size");
  m.max_seq = config.integer("max_position_embeddings");
  config.only_boolean("tie_word_embeddings", false);  // transformers has an output matrix, whatever it says
  m.tied_embedding = false;
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
  s.state = config.integer("ssm_state_size");
  s.kernel = config.integer_or(one_of(config, "conv_kernel", "mamba_d_conv"), 4);
  s.conv_bias = config.boolean_or(one_of(config, "use_conv_bias", "mamba_conv_bias"), true);
  s.chunk = config.integer_or(one_of(config, "chunk_size", "mamba_chunk_size"), 128);
  config.only_text("mamba_hidden_act", "silu", {"silu", "swish"});
  config.only_boolean("use_bias", false);
  config.only_boolean("mamba_proj_bias", false);
  read_step_limit(config, one_of(config, "time_step_limit", "mamba_dt_limit"));
}

}  // namespace echelon
