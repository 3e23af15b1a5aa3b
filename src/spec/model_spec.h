// A transformer as data: sizes, family, and the list of its parameters.
#pragma once

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

// gpt2: learned positions, LayerNorm, GELU (tanh form), biases, fused c_attn, weights stored (in, out).
// llama: RoPE, RMSNorm, SwiGLU, no biases, grouped-query attention, weights stored (out, in).
// neox: RoPE of a part of each head, LayerNorm, GELU (erf form), biases, weights stored (out, in).
enum class Family { gpt2, llama, neox };
template <>
inline constexpr std::array choice_names<Family>{"gpt2", "llama", "neox"};

// In place of a llama's MLPs: a router sends each token to a few of many experts (Shazeer et al. 2017).
// mixtral: in every layer, parameters named as transformers' Mixtral.
// deepseek: after num_dense_layers ordinary layers, beside experts that all tokens share; names of
// DeepSeek-V3.
// gpt_oss: in every layer, router and experts with biases, clamped_swiglu.
enum class Experts { none, mixtral, deepseek, gpt_oss };
template <>
inline constexpr std::array choice_names<Experts>{"none", "mixtral", "deepseek", "gpt-oss"};

// Which keys a query sees: with a size those of its own and the size - 1 positions before it (Beltagy et al.
// 2020, https://arxiv.org/abs/2004.05150), in all layers, or in all but one of each full_every, the last of them or the first.
struct WindowSpec {
  std::int64_t size = 0;  // 0: every key up to its own
  std::int64_t full_every = 0;
  bool full_first = false;
  bool in(std::int64_t layer) const {
    return size > 0 && (full_every == 0 || (layer + (full_first ? 0 : 1)) % full_every != 0);
  }
  bool operator==(const WindowSpec&) const = default;
};

// Where a layer has its norms: before attention and before the MLP, behind each (OLMo 2,
// https://arxiv.org/abs/2501.00656), or both (Gemma 3, https://arxiv.org/abs/2503.19786).
enum class NormPlace { before, after, both };
template <>
inline constexpr std::array choice_names<NormPlace>{"before", "after", "both"};

// What a llama's layers are normalised by: RMSNorm, with weights or without, which its norms of heads then
// lack too (nanochat); LayerNorm with weights and biases, with weights alone (Cohere), or with neither (OLMo,
// https://arxiv.org/abs/2402.00838).
enum class NormKind { rms, layer, layer_weight, layer_plain, rms_plain };
template <>
inline constexpr std::array choice_names<NormKind>{"rms", "layer", "layer-weight", "layer-plain",
                                                   "rms-plain"};

// Factors that a model is built with (Granite).
struct ScaleSpec {
  double embedding = 1;
  double attention = 0;  // of q.k before the softmax; 0: 1 / sqrt(head_dim)
  double residual = 1;   // of what a layer adds to the residual stream
  double logits_divisor = 1;
  // Of layers with attention and a state space side by side (Falcon-H1): of what each of them and the MLP
  // adds; of the MLP's gate before its activation; of what a state space is given, z, x, B, C and dt.
  double attention_out = 1, state_space_out = 1, mlp_out = 1, mlp_gate = 1;
  std::array<double, 5> state_space{1, 1, 1, 1, 1};
  bool operator==(const ScaleSpec&) const = default;
};

// Soft caps: x becomes cap tanh(x / cap) (Gemma 2, https://arxiv.org/abs/2408.00118). 0: none.
struct CapSpec {
  double attention = 0;  // of scores, before the mask and the softmax
  double logits = 0;
  bool operator==(const CapSpec&) const = default;
};

// How a state takes in what a token has: as Mamba-2's does (Dao & Gu 2024, https://arxiv.org/abs/2405.21060),
// or by the gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464), which takes out first what
// it has for the token's key.
enum class StateRule { mamba2, gated_delta };
template <>
inline constexpr std::array choice_names<StateRule>{"mamba2", "gated-delta"};

// In place of attention in some layers: heads of channels, each channel with a state of so many numbers. In
// brackets the names of Hugging Face's configurations. Of the delta rule heads are those of values, groups
// heads of keys and queries, and state is the width of one of these.
struct StateSpaceSpec {
  std::int64_t heads = 0;     // 0: every layer has attention [mamba_n_heads]
  std::int64_t head_dim = 0;  // [mamba_d_head]
  std::int64_t groups = 1;    // of heads with one B, one C and one norm [mamba_n_groups]
  std::int64_t state = 128;   // [mamba_d_state]
  std::int64_t kernel = 4;    // positions that the convolution sees [mamba_d_conv]
  bool conv_bias = true;      // [mamba_conv_bias]
  // Positions whose weights for each other are computed at once: a matter of cost [mamba_chunk_size].
  std::int64_t chunk = 64;
  // The others, rising, where layers have an MLP too (ModelSpec::layer_pattern) [attn_layer_indices].
  std::vector<std::int64_t> attention_layers = {};
  StateRule rule = StateRule::mamba2;
  bool norm = true;  // of what a group of heads makes [mamba_rms_norm]
  // Every layer has attention and a state space, both of one norm, and adds what both make (Falcon-H1,
  // https://arxiv.org/abs/2507.22448).
  bool beside_attention = false;

  std::int64_t width() const { return heads * head_dim; }
  std::int64_t mixed_width() const { return width() + 2 * groups * state; }  // that is convolved
  bool is_delta() const { return rule == StateRule::gated_delta; }
  // Columns that are projected: z, what is convolved, and a number or two of each head.
  std::int64_t projected_width() const { return width() + mixed_width() + (is_delta() ? 2 : 1) * heads; }
  bool operator==(const StateSpaceSpec&) const = default;
};

// In place of attention in some layers: a gated convolution of each channel over a few positions (LFM2,
// https://arxiv.org/abs/2511.23404).
struct ShortConvSpec {
  std::int64_t kernel = 0;  // positions that it sees, a token's own among them; 0: none [conv_L_cache]
  std::vector<std::int64_t> attention_layers = {};  // the others, rising [layer_types]
  bool operator==(const ShortConvSpec&) const = default;
};

// What a layer adds to the residual stream: mostly two of them, attention, a state space or a short
// convolution, and then an MLP or experts.
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
  std::int64_t max_seq = 0;     // rows of the learned position table; the longest trained sequence otherwise
  bool tied_embedding = true;   // the output layer uses the token embedding's matrix
  double norm_eps = 1e-5;
  RopeSpec rope;
  WindowSpec window;
  ScaleSpec scales;
  CapSpec caps;
  NormKind norm_kind = NormKind::rms;
  NormPlace norm_place = NormPlace::before;
  // To what a llama's first layer is given a row of a learned table is added, of each token's position, and
  // nothing is turned (GPT-Neo); the table has so many rows before that of position 0 (OPT's 2).
  bool learned_positions = false;
  std::int64_t position_offset = 0;
  bool embedding_norm = false;  // what the first layer is given is normalised as well (nanochat)
  double init_std = 0.02;
  // Where a llama's layers have one part each, x + part(norm(x)) (Nemotron-H,
  // https://arxiv.org/abs/2504.03624), a letter for each layer: M a state space, * attention, - an MLP,
  // E experts [hybrid_override_pattern]. Empty: layers have two.
  std::string layer_pattern;
  // Of a llama's MLPs. Without a gate they have no gate_proj, and those of gelu StarCoder2's names. Experts
  // as in deepseek may have relu2 (Nemotron 3).
  Activation activation = Activation::swiglu;
  bool qkv_bias = false;            // of a llama's query, key and value projections (Qwen2)
  bool attention_out_bias = false;  // of what attention hands to the residual stream (gpt-oss)
  bool mlp_bias = false;            // of all projections of a llama's dense MLPs
  // Each head of a llama has a number that takes part in its softmax as a key's score does, and has no value
  // (gpt-oss, https://arxiv.org/abs/2508.10925; Xiao et al. 2023, https://arxiv.org/abs/2309.17453).
  bool attention_sinks = false;
  // What a llama's attention makes is multiplied by a sigmoid of as many numbers that are projected beside
  // queries (Qwen3-Next; Qiu et al. 2025, https://arxiv.org/abs/2505.06708).
  bool attention_gate = false;
  bool qk_norm = false;         // RMSNorm of each head of its queries and keys before they are turned (Qwen3)
  bool qk_norm_whole = false;   // of all queries together, and of all keys, instead of each head (OLMo 2)
  bool qk_norm_turned = false;  // of each head, behind the rotation (Hunyuan)

  // The MLP reads what attention reads, instead of what it made of it: a neox's by a norm of its own, a
  // llama's by the same (Cohere).
  bool parallel_residual = false;
  // Files of Hugging Face have queries, keys and values as one matrix, and gate and up (Phi-3); the latter
  // alone (GLM); the two elements of a head that are turned together side by side (GLM, Cohere, ERNIE), those
  // of latent attention always.
  bool fused_projections = false;
  bool fused_mlp = false;
  bool interleaved_rope = false;
  // They have the weights of norms less 1 (Gemma).
  bool norms_less_one = false;

  // Mixture of experts; in brackets the names of Hugging Face's configurations.
  Experts experts = Experts::none;
  std::int64_t num_experts = 0;         // E, those with a router [num_local_experts, n_routed_experts]
  std::int64_t experts_per_token = 0;   // k [num_experts_per_tok]
  std::int64_t expert_hidden = 0;       // F of one expert [intermediate_size, moe_intermediate_size]
  std::int64_t num_shared_experts = 0;  // all tokens; as one MLP [n_shared_experts]
  std::int64_t shared_hidden = 0;       // F of one of these; 0: expert_hidden
  // What tokens are projected to before they are sent to their experts, whose sum is projected back; the
  // router and shared experts read all of hidden. 0: hidden [moe_latent_size].
  std::int64_t expert_latent = 0;
  // What they make of a token is multiplied by a sigmoid of the token's product with a vector (Qwen2-MoE,
  // https://arxiv.org/abs/2407.10671).
  bool shared_gate = false;
  std::int64_t num_dense_layers = 0;  // the first ones [first_k_dense_replace]
  RouterSpec router;
  SwigluClamp clamp;  // of gpt_oss's experts [swiglu_alpha, swiglu_limit]
  // Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434) where kv_rank > 0: head_dim
  // is that of queries and keys.
  std::int64_t kv_rank = 0;         // [kv_lora_rank]
  std::int64_t q_rank = 0;          // 0: queries straight from the input [q_lora_rank]
  std::int64_t rotary_dim = 0;      // of head_dim turned by position; 0: all [qk_rope_head_dim]
  std::int64_t value_head_dim = 0;  // [v_head_dim]

  // Multi-token prediction (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2): a module behind the
  // last layer that predicts the token after the next one, 0 or 1 of them [num_nextn_predict_layers], and by
  // how much its loss is weighed against that of the model.
  std::int64_t num_mtp_layers = 0;
  double mtp_weight = 0.3;

  StateSpaceSpec state_space;
  ShortConvSpec short_conv;

  FineTuning tuning;  // what of it is trained

  // Which layers have which parts, and how many do. The module that predicts one more token counts as the
  // layer behind the last.
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
  // Whether some layer takes in a channel of a whole sequence at a time, other than by attention.
  bool mixes_channels() const { return state_space.heads > 0 || short_conv.kernel > 0; }
  std::int64_t num_mlp_layers() const { return num_layers_with(LayerPart::mlp); }
  std::int64_t num_expert_layers() const { return num_layers_with(LayerPart::experts); }
  // Of two kinds of layers the second: with a state space, or in a model without them one with experts; where
  // layers have one part each, either. With a short convolution where all layers have the same behind it.
  bool is_other(std::int64_t layer) const {
    if (short_conv.kernel > 0 && (experts == Experts::none || num_dense_layers == 0))
      return has_short_conv(layer);
    return has_state_space(layer) ||
           (has_experts(layer) && (state_space.heads == 0 || !layer_pattern.empty()));
  }
  std::int64_t parts_per_layer() const { return layer_pattern.empty() ? 2 : 1; }
  // Those with experts, that of the module among them.
  std::vector<std::int64_t> routed_layers() const;
  std::int64_t num_routed_layers() const {
    return num_expert_layers() + (experts == Experts::none ? 0 : num_mtp_layers);
  }
  Activation expert_activation() const {
    return experts == Experts::gpt_oss       ? Activation::clamped_swiglu
           : activation == Activation::relu2 ? Activation::relu2
                                             : Activation::swiglu;
  }
  // Matrices of one expert: gate, up and down, or the latter two.
  std::int64_t matrices_per_expert() const { return is_gated(expert_activation()) ? 3 : 2; }
  // Of what travels to experts and back.
  std::int64_t expert_width() const { return expert_latent > 0 ? expert_latent : hidden; }
  std::int64_t shared_width() const {
    return num_shared_experts * (shared_hidden > 0 ? shared_hidden : expert_hidden);
  }
  bool latent_attention() const { return kv_rank > 0; }
  // Of norms of heads, and of what latent attention compresses: DeepSeek's have one of their own.
  double head_norm_eps() const { return latent_attention() ? 1e-6 : norm_eps; }
  // Width of what attention hands to its output matrix.
  std::int64_t attended_width() const { return num_heads * (latent_attention() ? value_head_dim : head_dim); }

  std::int64_t turned_width() const { return rotary_dim > 0 ? rotary_dim : head_dim; }
  // Positions are rows of a table, which ends.
  bool has_position_table() const { return family == Family::gpt2 || learned_positions; }
  bool is_turned(std::int64_t layer) const {
    return !has_position_table() && (rope.unturned_every == 0 || (layer + 1) % rope.unturned_every != 0);
  }
  // Keys that a query of a sequence sees in the mean over positions and layers; half the sequence where no
  // layer has a window.
  double mean_keys(std::int64_t seq_len) const;
  // The layers that have a window, over all.
  double windowed_part() const;

  std::int64_t attention_width() const { return num_heads * head_dim; }
  std::int64_t kv_width() const { return num_kv_heads * head_dim; }
};

// Layers that are alike but for their number, and one of them; last those with experts.
struct LayerKind {
  std::int64_t layer = 0, count = 0;
  const char* name = "layer";
};
std::vector<LayerKind> layer_kinds(const ModelSpec& model);

// Throws RequestError naming the field unless the sizes make a model.
void validate(const ModelSpec& model);

// A preset's name, a Hugging Face directory (with config.json), or a TOML file. RequestError otherwise,
// listing the presets.
ModelSpec load_model(const std::string& name_or_path);
std::vector<std::string> model_preset_names();
ModelSpec model_from_toml(const std::string& text, const std::string& where);
ModelSpec model_from_hugging_face(const std::string& config_json, const std::string& where);
std::string to_toml(const ModelSpec& model);  // model_from_toml(to_toml(m)) == m

// A field that two models do not have alike, by its name in TOML; a value is empty where a model has no such
// field.
struct FieldDifference {
  std::string field, first, second;
};
std::vector<FieldDifference> differences(const ModelSpec& first, const ModelSpec& second);

// Parameters of one part of the model. Names are those that transformers saves.
std::vector<ParamSpec> embedding_parameters(const ModelSpec& model);
std::vector<ParamSpec> block_parameters(const ModelSpec& model, std::int64_t layer);
std::vector<ParamSpec> head_parameters(
    const ModelSpec& model);                      // final norm; the output matrix when it is untied
ParamSpec output_matrix(const ModelSpec& model);  // tied or not
// The three above, in model order: those of the embedding, of each block and of the head.
std::vector<std::vector<ParamSpec>> parameter_groups(const ModelSpec& model);
std::vector<ParamSpec> all_parameters(const ModelSpec& model);  // the same in one list

std::int64_t num_parameters(const ModelSpec& model);
// Parameters that multiply activations, the output matrix included whether tied or not (N of 6N).
std::int64_t num_multiplying_parameters(const ModelSpec& model);
// Those that one token meets: k experts of each layer that has them, and all shared ones.
std::int64_t num_active_parameters(const ModelSpec& model);
// Those that training changes.
std::int64_t num_trained_parameters(const ModelSpec& model);
// Training FLOPs of one token, forward and backward, causal attention, nothing recomputed: 6N + 12 L (H D) T
// / 2, N those of num_active_parameters(), 4 for each that is frozen, 2 below what is trained. A layer with a
// state space of N numbers a channel has 12 N of each channel instead, and its convolution's; so does a short
// convolution. Where values are narrower than keys (latent attention) the mean of both stands for D.
double model_flops_per_token(const ModelSpec& model, std::int64_t seq_len);
// The same where a token sees so many keys on average.
double flops_per_token_seeing(const ModelSpec& model, double mean_keys);

}  // namespace echelon
