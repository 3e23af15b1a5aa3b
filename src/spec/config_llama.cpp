#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "spec/config_llama.h"
#include "spec/config_rope.h"
#include "spec/config_window.h"

namespace echelon {

Activation activation_of(const Config& config, const char* key, const std::vector<Activation>& legal) {
  constexpr std::pair<const char*, Activation> names[] = {{"silu", Activation::swiglu},
                                                          {"swish", Activation::swiglu},
                                                          {"gelu_pytorch_tanh", Activation::geglu},
                                                          {"gelu_new", Activation::geglu},
                                                          {"gelu_fast", Activation::geglu},
                                                          {"gelu_pytorch_tanh", Activation::gelu},
                                                          {"gelu_new", Activation::gelu},
                                                          {"gelu_fast", Activation::gelu},
                                                          {"gelu", Activation::gelu_erf},
                                                          {"relu", Activation::relu},
                                                          {"relu2", Activation::relu2},
                                                          {"xielu", Activation::xielu}};
  if (!config.has(key)) return legal.front();
  const std::string given = config.text_or(key, "");
  std::vector<std::string> supported;
  for (const auto& [name, activation] : names) {
    if (std::find(legal.begin(), legal.end(), activation) == legal.end()) continue;
    if (name == given) return activation;
    supported.emplace_back(name);
  }
  config.wrong(key, fmt::format("{}", fmt::join(supported, " or ")));
}

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
  m.activation = defaults.gelu_is_tanh && config.text_or(defaults.activation_key, "") == "gelu"
                     ? Activation::geglu
                     : activation_of(config, defaults.activation_key, defaults.activations);
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

std::vector<std::int64_t> attention_layers(const Config& config, const std::vector<std::string>& attention,
                                           const std::vector<std::string>& other, std::int64_t num_layers) {
  const auto is_of = [](const Json& type, const std::vector<std::string>& names) {
    return std::ranges::any_of(names, [&](const std::string& name) { return type == name; });
  };
  const auto legal = [](const std::vector<std::string>& names) {
    return names.size() > 1 ? fmt::format("{} ({})", names[0], names[1]) : names[0];
  };
  const Json& types = one_for_each_layer(config, "layer_types", num_layers);
  std::vector<std::int64_t> layers;
  for (std::int64_t layer = 0; layer < num_layers; ++layer) {
    const Json& type = types[static_cast<std::size_t>(layer)];
    if (is_of(type, attention))
      layers.push_back(layer);
    else if (!is_of(type, other))
      config.wrong("layer_types", fmt::format("{} and {}", legal(attention), legal(other)));
  }
  return layers;
}

void read_granite_factors(const Config& config, ModelSpec& m) {
  m.scales.embedding = config.real_or("embedding_multiplier", 1);
  const double attention = config.real_or("attention_multiplier", 1);
  if (attention == 0) config.wrong("attention_multiplier", "a number other than 0");
  m.scales.attention = attention == 1 / std::sqrt(static_cast<double>(m.head_dim)) ? 0 : attention;
  m.scales.residual = config.real_or("residual_multiplier", 1);
  m.scales.logits_divisor = config.real_or("logits_scaling", 1);
}

double read_cap(const Config& config, const char* key, double otherwise) {
  if (config.names(key) && !config.has(key)) return 0;
  const double cap = config.real_or(key, otherwise);
  if (!(cap > 0)) config.wrong(key, "null or a number above 0");
  return cap;
}

}  // namespace echelon
