// A transformer as data: sizes, family, and the list of its parameters.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/param_spec.h"

namespace echelon {

// gpt2: learned positions, LayerNorm, GELU (tanh form), biases, fused c_attn, weights stored (in, out).
// llama: RoPE, RMSNorm, SwiGLU, no biases, grouped-query attention, weights stored (out, in).
enum class Family { gpt2, llama };

struct ModelSpec {
  std::string name;
  Family family = Family::llama;
  std::int64_t num_layers = 0;
  std::int64_t hidden = 0;     // C
  std::int64_t num_heads = 0;  // H
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;    // D; H * D may differ from C
  std::int64_t mlp_hidden = 0;  // F
  std::int64_t vocab = 0;       // V
  std::int64_t max_seq = 0;     // rows of the learned position table; the longest trained sequence otherwise
  bool tied_embedding = true;   // the output layer uses the token embedding's matrix
  double norm_eps = 1e-5;
  double rope_theta = 10000.0;
  double init_std = 0.02;

  std::int64_t attention_width() const { return num_heads * head_dim; }
  std::int64_t kv_width() const { return num_kv_heads * head_dim; }
};

// Throws RequestError naming the field unless the sizes make a model.
void validate(const ModelSpec& model);

// A preset's name, a Hugging Face directory (with config.json), or a TOML file. RequestError otherwise,
// listing the presets.
ModelSpec load_model(const std::string& name_or_path);
std::vector<std::string> model_preset_names();
ModelSpec model_from_toml(const std::string& text, const std::string& where);
ModelSpec model_from_hugging_face(const std::string& config_json, const std::string& where);
std::string to_toml(const ModelSpec& model);  // model_from_toml(to_toml(m)) == m

// Parameters of one part of the model. Names are those that transformers saves.
std::vector<ParamSpec> embedding_parameters(const ModelSpec& model);
std::vector<ParamSpec> block_parameters(const ModelSpec& model, std::int64_t layer);
std::vector<ParamSpec> head_parameters(
    const ModelSpec& model);  // final norm; the output matrix when it is untied
std::vector<ParamSpec> all_parameters(const ModelSpec& model);  // the three above, in model order

std::int64_t num_parameters(const ModelSpec& model);
// Parameters that multiply activations, the output matrix included whether tied or not (N of 6N).
std::int64_t num_multiplying_parameters(const ModelSpec& model);
// Training FLOPs of one token, forward and backward, causal attention, nothing recomputed: 6N + 12 L (H D) T
// / 2.
double model_flops_per_token(const ModelSpec& model, std::int64_t seq_len);

}  // namespace echelon
