// Reads Llama-like layers from config.json; most model types have them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "spec/config_json.h"
#include "spec/model_spec.h"

namespace echelon {

// The defaults of a model type where its files do not say, and which of the optional features it has.
struct LlamaDefaults {
  // Those that it may have, named by activation_key; the first where that is missing.
  std::vector<Activation> activations = {Activation::swiglu, Activation::geglu};
  bool windowed = false;  // has a window if sliding_window is given
  bool typed = false;     // layer_types decides each layer's kind
  double rope_theta = 10000.0, norm_eps = 1e-6;
  bool tied = false;
  std::optional<bool> biased = {};  // all of attention; empty: its family has no such choice
  bool gelu_is_tanh = false;        // "gelu" in its files means the tanh form
  bool mlp_biased = false;          // MLPs have biases if mlp_bias says so, a choice of its family
  const char* norm_eps_key = "rms_norm_eps";
  const char* bias_key = "attention_bias";
  const char* activation_key = "hidden_act";
  const char* mlp_hidden_key = "intermediate_size";
  std::optional<double> rotary_part = {};  // empty: its family rotates whole heads
  bool rotary_part_on_top = true;          // also read at top level, beside rope_parameters
  bool dropped = false;                    // its dropout is ignored
  std::int64_t head_dim = 0;               // given by other keys; 0: as usual
  bool mixed = false;                      // layer_types says which layers have attention
};

// The activation that `key` names, which has to be one of these; the first where there is no key.
Activation activation_of(const Config& config, const char* key, const std::vector<Activation>& legal);

// Reads sizes, biases, positions and windows. The type's own reader adds the rest.
void read_llama(const Config& config, const LlamaDefaults& defaults, ModelSpec& m);

// The attention layers of a `mixed` type: those whose layer_types are `attention`, where all others must be
// `other`. Each list has newer names before older ones.
std::vector<std::int64_t> attention_layers(const Config& config, const std::vector<std::string>& attention,
                                           const std::vector<std::string>& other, std::int64_t num_layers);

// Granite's scale factors.
void read_granite_factors(const Config& config, ModelSpec& m);

// A soft cap of scores or logits; null: none.
double read_cap(const Config& config, const char* key, double otherwise);

}  // namespace echelon
