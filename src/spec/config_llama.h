// What config.json says of layers of a Llama's kind, which most types have.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "spec/config_json.h"
#include "spec/model_spec.h"

namespace echelon {

// What a type has where its files name nothing, and which of the choices it has.
struct LlamaDefaults {
  Activation activation = Activation::swiglu;
  bool windowed = false;  // where sliding_window is named
  bool typed = false;     // its layers are of the kinds that layer_types says
  double rope_theta = 10000.0, norm_eps = 1e-6;
  bool tied = false;
  std::optional<bool> biased = {};  // all of attention; without a value its family has no such choice
  bool gelu_is_tanh = false;        // its files say "gelu" and mean that
  bool mlp_biased = false;          // where mlp_bias says so; its family has the choice
  const char* norm_eps_key = "rms_norm_eps";
  const char* bias_key = "attention_bias";
  const char* mlp_hidden_key = "intermediate_size";
  std::optional<double> rotary_part = {};  // without a value its family turns whole heads
  bool rotary_part_on_top = true;          // beside rope_parameters too
  bool dropped = false;                    // its dropout is left out
  std::int64_t head_dim = 0;               // which other keys say; 0: as usual
  bool mixed = false;                      // layer_types say which layers have attention
};

// Sizes, biases, positions and windows. What else a type has its own reader adds.
void read_llama(const Config& config, const LlamaDefaults& defaults, ModelSpec& m);

// Of a `mixed` type: the layers whose layer_types are `attention`, where others are `other`; older names
// stand behind newer ones.
std::vector<std::int64_t> attention_layers(const Config& config, const std::vector<std::string>& attention,
                                           const std::vector<std::string>& other, std::int64_t num_layers);

// Granite's.
void read_granite_factors(const Config& config, ModelSpec& m);

// A limit of scores or logits; null: none.
double read_cap(const Config& config, const char* key, double otherwise);

}  // namespace echelon
