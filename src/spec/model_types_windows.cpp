// Types with a window in some layers, and an MLP in every one; and the first Gemma, which has none.
#include <algorithm>
#include <cmath>

#include "spec/config_llama.h"
#include "spec/config_rope.h"
#include "spec/config_window.h"
#include "spec/model_type_readers.h"

namespace echelon {

namespace {

// Sinks, and a window in all layers but the first of each four, by default. Thetas may be told layer by
// layer, of which 0 would leave positions out.
void read_granite_windows(const Config& config, ModelSpec& m) {
  m.attention_sinks = true;
  if (config.has("layer_types"))
    read_window(config, false, true, m);
  else
    m.window = {config.integer("sliding_window"), 4, true};
  const char* const key = "layer_rope_theta";
  if (!config.has(key)) return;
  const std::vector<double> thetas = numbers(config, key);
  if (std::ssize(thetas) != m.num_layers ||
      std::any_of(thetas.begin(), thetas.end(),
                  [&thetas](double theta) { return theta == 0 || theta != thetas.front(); }))
    config.wrong(key, "a list of the same number above 0 for each layer");
  m.rope.theta = thetas.front();
}

// What Gemma 2 and 3 share; the window in all layers but each n-th, by default where layer_types is missing.
void read_gemma(const Config& config, double theta, std::int64_t full_every, ModelSpec& m) {
  m.norm_place = NormPlace::both;
  m.norms_less_one = true;
  read_llama(config,
             {.activations = {Activation::geglu},
              .typed = true,
              .rope_theta = theta,
              .tied = true,
              .activation_key = "hidden_activation"},
             m);
  if (!config.has("layer_types")) m.window = {config.integer("sliding_window"), full_every};
  m.scales.embedding = std::sqrt(static_cast<double>(m.hidden));
  const std::int64_t scalar = config.integer("query_pre_attn_scalar");
  if (scalar != m.head_dim) m.scales.attention = 1 / std::sqrt(static_cast<double>(scalar));
  config.only_boolean("use_bidirectional_attention", false);
}

}  // namespace

// The first Gemma: norms before alone, no window. "gelu" is what its first files call the tanh form.
void read_gemma1(const Config& config, ModelSpec& m) {
  m.norms_less_one = true;
  read_llama(config,
             {.activations = {Activation::geglu}, .tied = true, .biased = false, .gelu_is_tanh = true}, m);
  m.scales.embedding = std::sqrt(static_cast<double>(m.hidden));
  config.only_boolean("use_bidirectional_attention", false);
}

void read_gemma2(const Config& config, ModelSpec& m) {
  read_gemma(config, 1e4, 2, m);
  m.caps = {read_cap(config, "attn_logit_softcapping", 50), read_cap(config, "final_logit_softcapping", 30)};
}

// VaultGemma: a Gemma 2 without norms behind attention and MLP.
void read_vaultgemma(const Config& config, ModelSpec& m) {
  read_gemma2(config, m);
  m.norm_place = NormPlace::before;
}

// Its text alone. Layers with a window have positions of their own; without layer_types each sixth has none.
void read_gemma3(const Config& config, ModelSpec& m) {
  m.qk_norm = true;
  m.rope.local_theta = config.real_or("rope_local_base_freq", 1e4);
  read_gemma(config, 1e6, config.integer_or("sliding_window_pattern", 6), m);
  config.only_null("attn_logit_softcapping");
  config.only_null("final_logit_softcapping");
}

// With a window in some layers (Ministral-8B): all of them where layer_types is missing.
void read_ministral(const Config& config, ModelSpec& m) {
  read_llama(config, {.windowed = true, .typed = true}, m);
}

// OLMo 2 with a window in all layers but each fourth, by default; positions are scaled where there is none.
void read_olmo3(const Config& config, ModelSpec& m) {
  constexpr double theta = 500000;
  if (!config.has("rope_parameters"))
    config.only_real("rope_theta", theta);  // transformers would take another one in layers without a window
  m.rope.local_theta = config.real_or("rope_theta", theta);
  read_llama(config, {.typed = true, .rope_theta = theta, .norm_eps = 1e-5}, m);
  if (!config.has("layer_types")) m.window = {config.integer("sliding_window"), 4};
  m.norm_place = NormPlace::after;
  m.qk_norm = m.qk_norm_whole = true;
}

// EXAONE 4: norms behind attention and MLP, and of heads. Without a window all layers have positions.
void read_exaone4(const Config& config, ModelSpec& m) {
  read_llama(config, {.typed = true, .norm_eps = 1e-5}, m);
  m.norm_place = NormPlace::after;
  m.qk_norm = true;
  if (config.has("sliding_window")) read_turned_windows(config, m);
}

// Code World Model: a Llama with a window in all layers but the first of each four, by default.
void read_cwm(const Config& config, ModelSpec& m) {
  read_llama(config, {.typed = true, .rope_theta = 1e6, .norm_eps = 1e-5}, m);
  if (!config.has("layer_types")) m.window = {config.integer("sliding_window"), 4, true};
}

// Granite's factors, windows and sinks.
void read_granite_swa(const Config& config, ModelSpec& m) {
  read_llama(config, {.typed = true, .norm_eps = 1e-5, .tied = true, .dropped = true, .mixed = true}, m);
  read_granite_factors(config, m);
  read_granite_windows(config, m);
}

}  // namespace echelon
