// A transformer as data: sizes, family, and the list of its parameters.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "spec/activation.h"
#include "spec/fine_tuning.h"
#include "spec/param_spec.h"
#include "spec/rope.h"
#include "spec/routing.h"

namespace echelon {

// gpt2: learned positions, LayerNorm, GELU (tanh form) or another activation without a gate, biases, fused
// c_attn, weights stored (in, out).
// llama: RoPE, RMSNorm, SwiGLU, no biases, grouped-query attention, weights stored (out, in).
// neox: RoPE on part of each head, LayerNorm, GELU (erf form) or another activation without a gate, biases,
// weights stored (out, in).
enum class Family { gpt2, llama, neox };
template <>
inline constexpr std::array choice_names<Family>{"gpt2", "llama", "neox"};

// Where a model's file says none.
constexpr Activation usual_activation(Family family) {
  return family == Family::gpt2   ? Activation::gelu
         : family == Family::neox ? Activation::gelu_erf
                                  : Activation::swiglu;
}

// Mixtures of experts, in place of a llama's MLPs: a router sends each token to a few of many experts
// (Shazeer et al. 2017).
// mixtral: in every layer; parameters are named as in transformers' Mixtral.
// deepseek: after num_dense_layers ordinary layers, optionally with shared experts that see all tokens; named
// as in DeepSeek-V3.
// gpt_oss: in every layer; router and experts have biases and use clamped_swiglu.
enum class Experts { none, mixtral, deepseek, gpt_oss };
template <>
inline constexpr std::array choice_names<Experts>{"none", "mixtral", "deepseek", "gpt-oss"};

// Sliding-window attention (Beltagy et al. 2020, https://arxiv.org/abs/2004.05150): a query sees its own
// position and the size - 1 before it. It applies in all layers, in all but one of every `full_every` (the
// last of them, or the first if full_first), or in all but full_layers.
struct WindowSpec {
  std::int64_t size = 0;        // 0: no window
  std::int64_t full_every = 0;  // 0: no such period
  bool full_first = false;
  std::vector<std::int64_t> full_layers = {};  // rising
  bool in_all() const { return size > 0 && full_every == 0 && full_layers.empty(); }
  bool in(std::int64_t layer) const {
    if (!full_layers.empty())
      return size > 0 && !std::binary_search(full_layers.begin(), full_layers.end(), layer);
    return size > 0 && (full_every == 0 || (layer + (full_first ? 0 : 1)) % full_every != 0);
  }
  bool operator==(const WindowSpec&) const = default;
};

// Where a layer has its norms: before attention and before the MLP, after each (OLMo 2,
// https://arxiv.org/abs/2501.00656), or both (Gemma 3, https://arxiv.org/abs/2503.19786).
enum class NormPlace { before, after, both };
template <>
inline constexpr std::array choice_names<NormPlace>{"before", "after", "both"};

// The norms of a llama's layers. RMSNorm with weights, or without (nanochat), and then its per-head norms
// have none either; LayerNorm with weights and biases, with weights alone (Cohere), or with neither (OLMo,
// https://arxiv.org/abs/2402.00838).
enum class NormKind { rms, layer, layer_weight, layer_plain, rms_plain };
template <>
inline constexpr std::array choice_names<NormKind>{"rms", "layer", "layer-weight", "layer-plain",
                                                   "rms-plain"};

// Constant factors in the model (Granite).
struct ScaleSpec {
  double embedding = 1;
  double attention = 0;  // multiplies q.k before the softmax; 0: 1 / sqrt(head_dim)
  double residual = 1;   // multiplies what a layer adds to the residual stream
  double logits_divisor = 1;
  // For layers with attention and a state space side by side (Falcon-H1): factors of what attention, the
  // state space and the MLP add; of the MLP's gate before its activation; and of the state space's inputs z,
  // x, B, C and dt.
  double attention_out = 1, state_space_out = 1, mlp_out = 1, mlp_gate = 1;
  std::array<double, 5> state_space{1, 1, 1, 1, 1};
  bool operator==(const ScaleSpec&) const = default;
};

// Soft caps: x becomes cap tanh(x / cap) (Gemma 2, https://arxiv.org/abs/2408.00118). 0: no cap.
struct CapSpec {
  double attention = 0;  // on scores, before the mask and the softmax
  double logits = 0;
  bool operator==(const CapSpec&) const = default;
};

// How a token updates the state: as in Mamba-2 (Dao & Gu 2024, https://arxiv.org/abs/2405.21060), or by the
// gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464), which first removes what the state
// holds for the token's key.
enum class StateRule { mamba2, gated_delta };
template <>
inline constexpr std::array choice_names<StateRule>{"mamba2", "gated-delta"};

// A state space in place of attention in some layers: heads of channels, each channel with a state of `state`
// numbers. Brackets give the keys of Hugging Face configurations. With the delta rule, heads are value heads,
// groups are key and query heads, and state is the width of a key head.
struct StateSpaceSpec {
  std::int64_t heads = 0;     // 0: every layer has attention [mamba_n_heads]
  std::int64_t head_dim = 0;  // [mamba_d_head]
  std::int64_t groups = 1;    // heads of a group share B, C and the norm [mamba_n_groups]
  std::int64_t state = 128;   // [mamba_d_state]
  std::int64_t kernel = 4;    // width of the convolution, in positions [mamba_d_conv]
  bool conv_bias = true;      // [mamba_conv_bias]
  // Positions of a chunk of the scan; it changes the cost, not the function [mamba_chunk_size].
  std::int64_t chunk = 64;
  // The layers with attention instead, rising; unused with ModelSpec::layer_pattern [attn_layer_indices].
  std::vector<std::int64_t> attention_layers = {};
  StateRule rule = StateRule::mamba2;
  bool norm = true;  // of the output of each group of heads [mamba_rms_norm]
  // Every layer has attention and a state space side by side: both read one norm's output, and their outputs
  // are added (Falcon-H1, https://arxiv.org/abs/2507.22448).
  bool beside_attention = false;

  std::int64_t width() const { return heads * head_dim; }
  std::int64_t mixed_width() const { return width() + 2 * groups * state; }  // columns that are convolved
  bool is_delta() const { return rule == StateRule::gated_delta; }
  // Columns of the input projection: z, the convolved columns, and one or two numbers for each head.
  std::int64_t projected_width() const { return width() + mixed_width() + (is_delta() ? 2 : 1) * heads; }
  bool operator==(const StateSpaceSpec&) const = default;
};

// A gated depthwise convolution over a few positions, in place of attention in some layers (LFM2,
// https://arxiv.org/abs/2511.23404).
struct ShortConvSpec {
  std::int64_t kernel = 0;  // width in positions, the token's own included; 0: no such layers [conv_L_cache]
  std::vector<std::int64_t> attention_layers = {};  // with attention, rising [layer_types]
  bool operator==(const ShortConvSpec&) const = default;
};

// The parts that a layer adds to the residual stream. Most layers have two: attention, a state space or a
// short convolution; then an MLP or experts.
enum class LayerPart { attention, state_space, short_conv, mlp, experts };

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
  // Rows of the learned position table; without one, the longest sequence that may be trained.
  std::int64_t max_seq = 0;
  bool tied_embedding = true;   // the output layer uses the token embedding's matrix
  double norm_eps = 1e-5;
  RopeSpec rope;
  WindowSpec window;
  ScaleSpec scales;
  CapSpec caps;
  NormKind norm_kind = NormKind::rms;
  NormPlace norm_place = NormPlace::before;
  // A llama with a learned position table instead of rotary positions (GPT-Neo): each token's row is added to
  // its embedding. `position_offset` rows of the table come before position 0 (2 in OPT).
  bool learned_positions = false;
  std::int64_t position_offset = 0;
  // ALiBi in place of positions: each score falls with the distance of its key (Press et al. 2022,
  // https://arxiv.org/abs/2108.12409; BLOOM).
  bool alibi = false;
  bool embedding_norm = false;  // the embedding's output is normalised (nanochat)
  double init_std = 0.02;
  // Layers of one part each, x + part(norm(x)) (Nemotron-H, https://arxiv.org/abs/2504.03624), as a letter
  // for each layer: M a state space, * attention, - an MLP, E experts [hybrid_override_pattern]. Empty:
  // layers have two parts.
  std::string layer_pattern;
  // The activation of MLPs, which has no gate in gpt2 and neox. A llama's MLPs without a gate have no
  // gate_proj; those with gelu use StarCoder2's names. `deepseek` experts may have relu2 (Nemotron 3).
  Activation activation = Activation::swiglu;
  bool qkv_bias = false;            // of a llama's query, key, value and gate projections (Qwen2)
  bool attention_out_bias = false;  // of attention's output projection (gpt-oss)
  bool mlp_bias = false;            // of all projections of a llama's dense MLPs
  bool output_bias = false;         // of the output matrix, tied or not: added to each token's logits (GPT-J)
  // Attention sinks: each head has a learned number that enters the softmax like a key's score but has no
  // value (gpt-oss, https://arxiv.org/abs/2508.10925; Xiao et al. 2023, https://arxiv.org/abs/2309.17453).
  bool attention_sinks = false;
  // Gated attention: the output of attention is multiplied elementwise by a sigmoid of a gate that is
  // projected beside the queries (Qwen3-Next; Qiu et al. 2025, https://arxiv.org/abs/2505.06708).
  bool attention_gate = false;
  bool qk_norm = false;         // RMSNorm of each head of queries and keys, before the rotation (Qwen3)
  bool qk_norm_whole = false;   // one norm over all query heads, one over all key heads (OLMo 2)
  bool qk_norm_turned = false;  // of each head, after the rotation (Hunyuan)

  // Attention and MLP in parallel: the MLP reads the layer's input instead of attention's result. In a neox
  // it has a norm of its own; in a llama both share one (Cohere), or have one each with parallel_norms
  // (Falcon 40B).
  bool parallel_residual = false;
  bool parallel_norms = false;
  // How Hugging Face's files store the weights. fused_projections: queries, keys and values as one matrix
  // (CodeGen), and gate and up as another (Phi-3). fused_mlp: only gate and up (GLM). interleaved_rope: the
  // two elements of a rotary pair are neighbours (GLM, Cohere, ERNIE); with latent attention they always are.
  bool fused_projections = false;
  bool fused_mlp = false;
  bool interleaved_rope = false;
  // These files store norm weights minus 1 (Gemma).
  bool norms_less_one = false;

  // Mixture of experts. Brackets give the keys of Hugging Face configurations.
  Experts experts = Experts::none;
  std::int64_t num_experts = 0;         // E, routed experts only [num_local_experts, n_routed_experts]
  std::int64_t experts_per_token = 0;   // k [num_experts_per_tok]
  std::int64_t expert_hidden = 0;       // F of one expert [intermediate_size, moe_intermediate_size]
  std::int64_t num_shared_experts = 0;  // see all tokens; stored as one MLP [n_shared_experts]
  std::int64_t shared_hidden = 0;       // F of one shared expert; 0: expert_hidden
  // Tokens are projected to this width before they go to routed experts, and the sum of the experts' outputs
  // is projected back. The router and shared experts read all of `hidden`. 0: no projection
  // [moe_latent_size].
  std::int64_t expert_latent = 0;
  // The shared experts' output is multiplied by a sigmoid of the token's product with a vector (Qwen2-MoE,
  // https://arxiv.org/abs/2407.10671).
  bool shared_gate = false;
  std::int64_t num_dense_layers = 0;  // first layers that have an MLP instead [first_k_dense_replace]
  RouterSpec router;
  SwigluClamp clamp;  // of gpt_oss experts [swiglu_alpha, swiglu_limit]
  // Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434) if kv_rank > 0. head_dim is
  // then the width of queries and keys.
  std::int64_t kv_rank = 0;         // [kv_lora_rank]
  std::int64_t q_rank = 0;          // 0: queries are projected from the input directly [q_lora_rank]
  std::int64_t rotary_dim = 0;      // part of head_dim that is rotated; 0: all [qk_rope_head_dim]
  std::int64_t value_head_dim = 0;  // [v_head_dim]

  // Multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2): the number of
  // modules after the last layer, 0 or 1, that predict the token after the next one
  // [num_nextn_predict_layers], and the weight of their loss relative to the model's.
  std::int64_t num_mtp_layers = 0;
  double mtp_weight = 0.3;

  StateSpaceSpec state_space;
  ShortConvSpec short_conv;

  FineTuning tuning;  // which parameters are trained

  // Which layers have which parts, and how many layers do. The multi-token prediction module counts as layer
  // num_layers.
  bool has(LayerPart part, std::int64_t layer) const;
  bool has_attention(std::int64_t layer) const { return has(LayerPart::attention, layer); }
  bool has_state_space(std::int64_t layer) const { return has(LayerPart::state_space, layer); }
  bool has_short_conv(std::int64_t layer) const { return has(LayerPart::short_conv, layer); }
  bool has_mlp(std::int64_t layer) const { return has(LayerPart::mlp, layer); }
  bool has_experts(std::int64_t layer) const { return has(LayerPart::experts, layer); }
  std::int64_t num_layers_with(LayerPart part) const;
  std::int64_t num_attention_layers() const { return num_layers_with(LayerPart::attention); }
  std::int64_t num_state_space_layers() const { return num_layers_with(LayerPart::state_space); }
  std::int64_t num_short_conv_layers() const { return num_layers_with(LayerPart::short_conv); }
  // Whether some layer mixes positions channel by channel, by a state space or a short convolution.
  bool mixes_channels() const { return state_space.heads > 0 || short_conv.kernel > 0; }
  std::int64_t num_mlp_layers() const { return num_layers_with(LayerPart::mlp); }
  std::int64_t num_expert_layers() const { return num_layers_with(LayerPart::experts); }
  // Whether the layer is of the second of the model's two kinds: with a state space, or in a model without
  // state spaces, with experts. Where layers have one part each, either makes it the second kind. With short
  // convolutions: those layers, if all layers have the same MLP or experts.
  bool is_other(std::int64_t layer) const {
    if (short_conv.kernel > 0 && (experts == Experts::none || num_dense_layers == 0))
      return has_short_conv(layer);
    return has_state_space(layer) ||
           (has_experts(layer) && (state_space.heads == 0 || !layer_pattern.empty()));
  }
  std::int64_t parts_per_layer() const { return layer_pattern.empty() ? 2 : 1; }
  // The layers with experts, the multi-token prediction module's included.
  std::vector<std::int64_t> routed_layers() const;
  std::int64_t num_routed_layers() const {
    return num_expert_layers() + (experts == Experts::none ? 0 : num_mtp_layers);
  }
  Activation expert_activation() const {
    return experts == Experts::gpt_oss       ? Activation::clamped_swiglu
           : activation == Activation::relu2 ? Activation::relu2
                                             : Activation::swiglu;
  }
  // The matrices of one expert: gate, up and down (3), or up and down (2).
  std::int64_t matrices_per_expert() const { return is_gated(expert_activation()) ? 3 : 2; }
  // The width of the rows that travel to experts and back.
  std::int64_t expert_width() const { return expert_latent > 0 ? expert_latent : hidden; }
  std::int64_t shared_width() const {
    return num_shared_experts * (shared_hidden > 0 ? shared_hidden : expert_hidden);
  }
  bool latent_attention() const { return kv_rank > 0; }
  // Of per-head norms, and of the norms of latent attention's compressed forms: DeepSeek has a constant for
  // these.
  double head_norm_eps() const { return latent_attention() ? 1e-6 : norm_eps; }
  // The input width of attention's output matrix.
  std::int64_t attended_width() const { return num_heads * (latent_attention() ? value_head_dim : head_dim); }

  std::int64_t turned_width() const { return rotary_dim > 0 ? rotary_dim : head_dim; }
  // Positions are rows of a learned table, so sequences cannot be longer than it.
  bool has_position_table() const { return family == Family::gpt2 || learned_positions; }
  bool is_turned(std::int64_t layer) const {
    return !has_position_table() && !alibi &&
           (rope.unturned_every == 0 || (layer + 1) % rope.unturned_every != 0);
  }
  // Keys that a query sees, averaged over positions and layers: half the sequence if no layer has a window.
  double mean_keys(std::int64_t seq_len) const;
  // The fraction of layers that have a window.
  double windowed_part() const;

  std::int64_t attention_width() const { return num_heads * head_dim; }
  std::int64_t kv_width() const { return num_kv_heads * head_dim; }
};

// A kind of layer: the index of one such layer, and how many there are. The kind with experts comes last.
struct LayerKind {
  std::int64_t layer = 0, count = 0;
  const char* name = "layer";
};
std::vector<LayerKind> layer_kinds(const ModelSpec& model);

// RequestError naming the field unless the sizes describe a model.
void validate(const ModelSpec& model);

// Loads a preset by name, a Hugging Face directory (with config.json), or a TOML file. RequestError listing
// the presets otherwise.
ModelSpec load_model(const std::string& name_or_path);
std::vector<std::string> model_preset_names();
ModelSpec model_from_toml(const std::string& text, const std::string& where);
ModelSpec model_from_hugging_face(const std::string& config_json, const std::string& where);
std::string to_toml(const ModelSpec& model);  // model_from_toml(to_toml(m)) == m

// A field in which two models differ, by its TOML name. A value is empty if that model has no such field.
struct FieldDifference {
  std::string field, first, second;
};
std::vector<FieldDifference> differences(const ModelSpec& first, const ModelSpec& second);

// The parameters of one block, with the names under which transformers saves them.
std::vector<ParamSpec> embedding_parameters(const ModelSpec& model);
std::vector<ParamSpec> block_parameters(const ModelSpec& model, std::int64_t layer);
// The head's: the final norm, the output matrix if it is untied, and its bias if it has one.
std::vector<ParamSpec> head_parameters(const ModelSpec& model);
ParamSpec output_matrix(const ModelSpec& model);  // tied or not
// Its bias, which is cut as it is; empty if there is none.
std::vector<ParamSpec> output_bias(const ModelSpec& model);
// The three above in model order: embedding, each block, head.
std::vector<std::vector<ParamSpec>> parameter_groups(const ModelSpec& model);
std::vector<ParamSpec> all_parameters(const ModelSpec& model);  // the same in one list

std::int64_t num_parameters(const ModelSpec& model);
// Parameters that multiply activations, the output matrix included whether tied or not (the N of 6N).
std::int64_t num_multiplying_parameters(const ModelSpec& model);
// Parameters that one token uses: k experts of each layer that has them, and all shared ones.
std::int64_t num_active_parameters(const ModelSpec& model);
// Parameters that training changes.
std::int64_t num_trained_parameters(const ModelSpec& model);
// Training FLOPs of one token, forward and backward, with causal attention and nothing recomputed: 6N + 12 L
// (H D) K, where N is num_active_parameters() and K is mean_keys(seq_len), T / 2 without windows. A frozen
// parameter counts 4 instead of 6, and 2 if no gradient passes it. For a layer with a state space of N
// numbers a channel, 12 N a channel (18 N with the delta rule) and its convolution's FLOPs replace
// attention's; so does a short convolution's. Where values are narrower than keys (latent attention), D is
// the mean of both.
double model_flops_per_token(const ModelSpec& model, std::int64_t seq_len);
// The same with `mean_keys` keys for each query on average.
double flops_per_token_seeing(const ModelSpec& model, double mean_keys);

}  // namespace echelon
