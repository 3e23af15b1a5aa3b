// Types whose layers have LayerNorm, with weights or without: the first GPTs, and relatives of Llama.
#include "spec/config_llama.h"
#include "spec/config_rope.h"
#include "spec/config_window.h"
#include "spec/model_type_readers.h"

namespace echelon {

namespace {

// Of what logit_scale multiplies logits with: transformers has the divisor's inverse.
void read_logit_scale(const Config& config, ModelSpec& m) {
  const double scale = config.real_or("logit_scale", 0.0625);
  if (!(scale > 0)) config.wrong("logit_scale", "a number above 0");
  m.scales.logits_divisor = 1 / scale;
}

}  // namespace

// Of MLPs that are two products; GELU's tanh form where none is named.
static const std::vector<Activation> without_gate{Activation::gelu, Activation::gelu_erf, Activation::relu};

// What several types call otherwise.
struct SizeKeys {
  const char *layers, *hidden, *heads;
};
// What these have besides in common. MLPs are four times as wide as layers, unless their reader says
// otherwise.
static void read_sizes(const Config& config, const SizeKeys& keys, ModelSpec& m) {
  m.num_layers = config.integer(keys.layers);
  m.hidden = config.integer(keys.hidden);
  m.num_heads = m.num_kv_heads = config.integer(keys.heads);
  m.head_dim = even_head_dim(config, keys.heads, keys.hidden);
  m.mlp_hidden = 4 * m.hidden;
  m.vocab = config.integer("vocab_size");
  m.tied_embedding = config.boolean_or("tie_word_embeddings", true);
  m.norm_eps = config.real_or("layer_norm_epsilon", 1e-5);
}
constexpr SizeKeys usual_keys{"num_hidden_layers", "hidden_size", "num_attention_heads"};

// What GPT-2's configuration says, and that of the same layers with another attention.
static void read_gpt2_sizes(const Config& config, ModelSpec& m) {
  read_sizes(config, {"n_layer", "n_embd", "n_head"}, m);
  m.mlp_hidden = config.integer_or("n_inner", m.mlp_hidden);
  m.max_seq = config.integer("n_positions");
  m.activation = activation_of(config, "activation_function", without_gate);
  config.only_boolean("scale_attn_weights", true);
  config.only_boolean("add_cross_attention", false);
}

void read_gpt2(const Config& config, ModelSpec& m) {
  m.family = Family::gpt2;
  read_gpt2_sizes(config, m);
  config.only_boolean("scale_attn_by_inverse_layer_idx", false);
}

// What GPT-2's relatives whose weights are (out, in) have: learned positions, LayerNorm, no gate.
static void with_positions(ModelSpec& m) {
  m.family = Family::llama;
  m.norm_kind = NormKind::layer;
  m.learned_positions = true;
  m.num_kv_heads = m.num_heads;
  m.attention_out_bias = m.mlp_bias = true;
}

// StarCoder's first: GPT-2's layers with one head of keys and values.
void read_gpt_bigcode(const Config& config, ModelSpec& m) {
  read_gpt2_sizes(config, m);
  with_positions(m);
  config.only_boolean("multi_query", true);
  m.num_kv_heads = 1;
  m.qkv_bias = true;
}

// Scores that nothing divides, and a window in some layers.
void read_gpt_neo(const Config& config, ModelSpec& m) {
  read_sizes(config, {"num_layers", "hidden_size", "num_heads"}, m);
  with_positions(m);
  if (m.head_dim > 1) m.scales.attention = 1;
  m.mlp_hidden = config.integer_or("intermediate_size", m.mlp_hidden);
  m.max_seq = config.integer("max_position_embeddings");
  m.activation = activation_of(config, "activation_function", without_gate);
  // Lists of types, each repeated so many times.
  const char* const key = "attention_types";
  const char* const legal = "a list like [[[\"global\", \"local\"], n]] that makes num_layers";
  std::vector<bool> local;
  for (const Json& run : config.required(key)) {
    const bool is_run = run.is_array() && run.size() == 2 && run[0].is_array() && run[1].is_number_unsigned();
    if (!is_run) config.wrong(key, legal);
    const auto times = run[1].get<std::uint64_t>();
    for (std::uint64_t i = 0; i < times; ++i)
      for (const Json& type : run[0]) {
        const bool known = type == "global" || type == "local";
        if (!known || std::ssize(local) == m.num_layers) config.wrong(key, legal);
        local.push_back(type == "local");
      }
  }
  if (std::ssize(local) != m.num_layers) config.wrong(key, legal);
  if (config.has("attention_layers")) {  // which transformers would take in place of what the types say
    Json same = Json::array();
    for (const bool one : local) same.push_back(one ? "local" : "global");
    if (config.required("attention_layers") != same)
      config.wrong("attention_layers", "none, or the list that attention_types makes,");
  }
  const std::int64_t size = config.integer_or("window_size", 256);
  if (size < m.max_seq) m.window = window_of(local, size);
}

// Its table of positions has two rows before the first.
void read_opt(const Config& config, ModelSpec& m) {
  m.num_layers = config.integer("num_hidden_layers");
  m.hidden = config.integer("hidden_size");
  m.num_heads = config.integer("num_attention_heads");
  with_positions(m);
  m.qkv_bias = true;
  m.position_offset = 2;
  m.head_dim = even_head_dim(config, "num_attention_heads", "hidden_size");
  m.mlp_hidden = config.integer("ffn_dim");
  m.vocab = config.integer("vocab_size");
  m.max_seq = config.integer("max_position_embeddings");
  m.tied_embedding = config.boolean_or("tie_word_embeddings", true);
  m.norm_eps = 1e-5;  // a configuration says nothing of it
  m.activation = activation_of(config, "activation_function",
                               {Activation::relu, Activation::gelu, Activation::gelu_erf});
  config.only_boolean("do_layer_norm_before", true);
  config.only_boolean("_remove_final_layer_norm", false);
  config.only_boolean("enable_bias", true);
  config.only_boolean("layer_norm_elementwise_affine", true);
  if (config.integer_or("word_embed_proj_dim", m.hidden) != m.hidden)
    config.wrong("word_embed_proj_dim", fmt::format("hidden_size = {}", m.hidden));
}

// Its positions have names of their own beside rope_scaling, and the usual ones in it and in rope_parameters.
void read_neox(const Config& config, ModelSpec& m) {
  m.family = Family::neox;
  m.num_layers = config.integer("num_hidden_layers");
  m.hidden = config.integer("hidden_size");
  m.num_heads = config.integer("num_attention_heads");
  m.num_kv_heads = m.num_heads;
  m.head_dim = even_head_dim(config, "num_attention_heads", "hidden_size");
  if (config.integer_or("head_dim", m.head_dim) != m.head_dim)  // transformers would turn a part of that
    config.wrong("head_dim", fmt::format("{}, as hidden_size and num_attention_heads make it,", m.head_dim));
  m.mlp_hidden = config.integer("intermediate_size");
  m.vocab = config.integer("vocab_size");
  m.max_seq = config.integer("max_position_embeddings");
  m.tied_embedding = config.boolean_or("tie_word_embeddings", false);
  m.norm_eps = config.real_or("layer_norm_eps", 1e-5);
  m.parallel_residual = config.boolean_or("use_parallel_residual", true);
  Json usual = config.object();
  usual["rope_theta"] = config.real_or("rotary_emb_base", 1e4);
  usual["partial_rotary_factor"] = config.real_or("rotary_pct", 0.25);
  read_rope(config.with(usual), 1e4, 0.25, true, m);
  m.activation =
      activation_of(config, "hidden_act", {Activation::gelu_erf, Activation::gelu, Activation::relu});
  config.only_boolean("attention_bias", true);
  config.only_real("hidden_dropout", 0.0);
  config.only_real("attention_dropout", 0.0);
}

// The first OLMo: norms without weights.
void read_olmo(const Config& config, ModelSpec& m) {
  constexpr double eps = 1e-5;  // whatever a configuration says
  m.norm_kind = NormKind::layer_plain;
  read_llama(config, {.biased = false}, m);
  m.norm_eps = eps;
  config.only_null("clip_qkv");
}

// Biases of all projections, or of none.
void read_starcoder2(const Config& config, ModelSpec& m) {
  m.norm_kind = NormKind::layer;
  read_llama(config,
             {.activations = {Activation::gelu},
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
             {.activations = {Activation::relu2},
              .norm_eps = 1e-5,
              .biased = false,
              .mlp_biased = true,
              .norm_eps_key = "norm_eps",
              .rotary_part = 0.5},
             m);
}

// Jais 2: LayerNorm, squared ReLUs, biases of all projections.
void read_jais2(const Config& config, ModelSpec& m) {
  m.norm_kind = NormKind::layer;
  read_llama(config,
             {.activations = {Activation::relu2},
              .norm_eps = 1e-5,
              .biased = true,
              .mlp_biased = true,
              .norm_eps_key = "layer_norm_eps"},
             m);
  m.mlp_bias = config.boolean_or("mlp_bias", true);
}

// Phi-1 to Phi-2: attention and MLP of the same norm, biases everywhere. Dropout is left out: Phi-2's files
// carry it from their training.
void read_phi(const Config& config, ModelSpec& m) {
  m.norm_kind = NormKind::layer;
  read_llama(config,
             {.activations = without_gate,
              .norm_eps = 1e-5,
              .norm_eps_key = "layer_norm_eps",
              .rotary_part = 0.5,
              .dropped = true},
             m);
  m.parallel_residual = m.qkv_bias = m.attention_out_bias = m.mlp_bias = m.output_bias = true;
  config.only_boolean("qk_layernorm", false);
}

// Attention and MLP of the same norm, and biases of the MLP and of the output matrix alone.
void read_gptj(const Config& config, ModelSpec& m) {
  read_gpt2_sizes(config, m);
  m.family = Family::llama;
  m.norm_kind = NormKind::layer;
  m.tied_embedding = config.boolean_or("tie_word_embeddings", false);
  m.parallel_residual = m.interleaved_rope = m.mlp_bias = m.output_bias = true;
  const char* const key = "rotary_dim";
  if (config.names(key) && !config.has(key)) config.wrong(key, "a whole number");
  const std::int64_t turned = config.integer_or(key, 64);
  if (turned > m.head_dim || turned % 2 != 0)
    refuse("{}: {} = {} is not supported: only an even number up to {}, the width of a head, is",
           config.where(), key, turned, m.head_dim);
  m.rotary_dim = turned == m.head_dim ? 0 : turned;
}

// A GPT-J whose files have queries, keys and values as one matrix.
void read_codegen(const Config& config, ModelSpec& m) {
  read_gptj(config, m);
  m.fused_projections = true;
  if (m.hidden % 4 != 0) config.wrong("n_embd", "a multiple of 4, the parts that its files are made of,");
}

// Falcon: of 7B one head of keys and values; of 40B several, and a norm for attention and one for the MLP;
// of 11B several, and one norm for both.
void read_falcon(const Config& config, ModelSpec& m) {
  m.family = Family::llama;
  m.norm_kind = NormKind::layer;
  m.activation = Activation::gelu_erf;
  read_sizes(config, usual_keys, m);
  m.mlp_hidden = config.integer_or("ffn_hidden_size", m.mlp_hidden);
  m.max_seq = config.integer_or("max_position_embeddings", 2048);
  m.qkv_bias = m.attention_out_bias = m.mlp_bias = config.boolean_or("bias", false);
  read_rope(config, 1e4, {}, true, m);
  const bool grouped = config.boolean_or("new_decoder_architecture", false),
             one_head = !grouped && config.boolean_or("multi_query", true);
  const std::int64_t kv_heads = config.integer_or("num_kv_heads", m.num_heads),
                     norms = config.integer_or("num_ln_in_parallel_attn", grouped ? 2 : 1);
  m.num_kv_heads = one_head ? 1 : kv_heads;
  m.parallel_residual = config.boolean_or("parallel_attn", true);
  m.parallel_norms = norms == 2;
  if (!grouped && !one_head && kv_heads != m.num_heads)
    config.wrong("num_kv_heads", fmt::format("{}, as num_attention_heads,", m.num_heads));
  if (grouped) config.only_boolean("parallel_attn", true);
  if (norms > (grouped ? 2 : 1)) config.wrong("num_ln_in_parallel_attn", grouped ? "1 or 2" : "1");
  config.only_boolean("alibi", false);
  config.only_text("activation", "gelu", {"gelu"});
  config.only_real("hidden_dropout", 0.0);
  config.only_real("attention_dropout", 0.0);
}

// ALiBi in place of positions, and a norm of the embedding. Sequences may be as long as they like; what they
// were in training is kept beside.
void read_bloom(const Config& config, ModelSpec& m) {
  m.family = Family::llama;
  m.norm_kind = NormKind::layer;
  m.activation = Activation::gelu;
  read_sizes(config, usual_keys, m);
  m.max_seq = config.integer_or("seq_length", 2048);
  m.alibi = m.embedding_norm = m.qkv_bias = m.attention_out_bias = m.mlp_bias = true;
  config.only_boolean("apply_residual_connection_post_layernorm", false);
  config.only_real("hidden_dropout", 0.0);
  config.only_real("attention_dropout", 0.0);
}

// ALiBi, LayerNorm without biases, and no biases at all. Whatever a configuration says of learned positions,
// transformers has none.
void read_mpt(const Config& config, ModelSpec& m) {
  m.family = Family::llama;
  m.norm_kind = NormKind::layer_weight;
  m.activation = Activation::gelu_erf;
  read_sizes(config, {"n_layers", "d_model", "n_heads"}, m);
  m.max_seq = config.integer_or("max_seq_len", 2048);
  m.alibi = true;
  config.only_real("expansion_ratio", 4);
  config.only_boolean("no_bias", true);
  config.only_null("logit_scale");
  config.only_real("resid_pdrop", 0.0);
  config.only_real("emb_pdrop", 0.0);
  const char* const key = "attn_config";
  if (!config.has(key)) return;
  if (!config.required(key).is_object()) config.wrong(key, "an object");
  const Config attention(config.required(key), config.where());
  attention.only_text("attn_type", "multihead_attention", {"multihead_attention"});
  attention.only_boolean("alibi", true);
  attention.only_real("alibi_bias_max", 8);
  attention.only_null("clip_qkv");
  attention.only_boolean("qk_ln", false);
  attention.only_boolean("prefix_lm", false);
  attention.only_boolean("attn_uses_sequence_id", false);
  attention.only_real("attn_pdrop", 0.0);
  m.scales.attention = attention.real_or("softmax_scale", 0);
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

// Command-R7B and Command A.
void read_cohere2(const Config& config, ModelSpec& m) {
  read_cohere(config, true, 1e4, m);
  read_turned_windows(config, m);
}

}  // namespace echelon
