#include "spec/model_spec.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "spec/block.h"

namespace echelon {

namespace {

// Token ids and most indices are 32 bit; the bound on the whole keeps byte counts inside 63 bits.
constexpr std::int64_t largest_size = 2147483647, largest_num_layers = 1000000;
constexpr double largest_num_parameters = 1e17;

void check_size(const ModelSpec& m, const char* field, std::int64_t value, std::int64_t largest) {
  if (value < 1 || value > largest) {
    refuse("model {}: {} = {} is not legal: give a whole number from 1 to {}", m.name, field, value, largest);
  }
}

void check_positive(const ModelSpec& m, const char* field, double value) {
  if (!(value > 0) || !std::isfinite(value)) {
    refuse("model {}: {} = {} is not legal: give a number above 0", m.name, field, value);
  }
}

enum class Counted { all, multiplying, active };

std::int64_t count(const ModelSpec& m, const std::vector<ParamSpec>& list, Counted counted) {
  std::int64_t sum = 0;
  for (const ParamSpec& p : list) {
    const bool idle = p.expert >= m.experts_per_token;  // experts are alike: the first k stand for any k
    if (counted == Counted::all || (p.multiplies && (counted == Counted::multiplying || !idle)))
      sum += p.numel();
  }
  return sum;
}

// One block stands for all that are alike.
std::int64_t count_all(const ModelSpec& m, Counted counted) {
  std::int64_t sum = count(m, embedding_parameters(m), counted) + count(m, head_parameters(m), counted);
  for (const LayerKind& kind : layer_kinds(m))
    sum += kind.count * count(m, block_parameters(m, kind.layer), counted);
  // One more token is predicted by the same output matrix.
  if (counted != Counted::all) sum += m.num_mtp_layers * output_matrix(m).numel();
  return sum;
}

void check_listed_layers(const ModelSpec& m, const char* field, const std::vector<std::int64_t>& layers) {
  std::int64_t last = -1;
  for (const std::int64_t layer : layers) {
    if (layer <= last || layer >= m.num_layers)
      refuse("model {}: {} are not layers from 0 to {} in rising order; give such ones", m.name, field,
             m.num_layers - 1);
    last = layer;
  }
}

// What stands beside a state space is told here, and what cannot.
void check_state_space(const ModelSpec& m) {
  const StateSpaceSpec& s = m.state_space;
  if (s.heads == 0) {
    if (s != StateSpaceSpec{})
      refuse(
          "model {}: ssm_head_dim, ssm_groups ... are legal beside ssm_heads alone, and attention_layers "
          "beside it or short_conv; give ssm_heads above 0",
          m.name);
    return;
  }
  check_size(m, "ssm_heads", s.heads, largest_size);
  check_size(m, "ssm_head_dim", s.head_dim, largest_size);
  check_size(m, "ssm_groups", s.groups, s.heads);
  if (s.heads % s.groups != 0)
    refuse("model {}: ssm_groups = {} does not divide ssm_heads = {}; give a divisor of {}", m.name, s.groups,
           s.heads, s.heads);
  check_size(m, "ssm_state", s.state, largest_size);
  if (s.is_delta() && s.state == 1)  // of such a key the delta rule keeps the sign alone
    refuse("model {}: ssm_state = 1 is not legal with ssm_rule = \"gated-delta\"; give 2 or more", m.name);
  check_size(m, "ssm_kernel", s.kernel, 64);
  check_size(m, "ssm_chunk", s.chunk, 4096);
  check_listed_layers(m, "attention_layers", s.attention_layers);
  if (s.beside_attention &&
      (!s.attention_layers.empty() || s.is_delta() || !m.layer_pattern.empty() || m.experts != Experts::none))
    refuse(
        "model {}: ssm_beside_attention = true is legal without attention_layers, layer_pattern, experts and "
        "ssm_rule = \"gated-delta\" alone; give false, or none of these",
        m.name);
  if (!s.norm && s.is_delta())
    refuse("model {}: ssm_norm = false is not legal with ssm_rule = \"gated-delta\"; give true", m.name);
  if (m.num_state_space_layers() == 0 && m.layer_pattern.empty())
    refuse("model {}: all layers are attention_layers; leave out ssm_heads, or one of them", m.name);
  const auto refuse_beside = [&m](bool chosen, const char* what, const char* legal) {
    if (chosen)
      refuse("model {}: {} is not legal beside layers with a state space (ssm_heads = {}); give {}", m.name,
             what, m.state_space.heads, legal);
  };
  refuse_beside(m.family != Family::llama, "a family other than llama", "family = \"llama\"");
  refuse_beside(m.experts != Experts::none && m.experts != Experts::deepseek, "another kind of experts",
                "experts = \"deepseek\"");
  refuse_beside(m.num_dense_layers > 0, "num_dense_layers", "0: all layers have experts, or a layer_pattern");
  refuse_beside(s.is_delta() && !m.layer_pattern.empty(), "layer_pattern with ssm_rule = \"gated-delta\"",
                "no pattern");
  refuse_beside(m.norm_kind != NormKind::rms, "norm_kind", "\"rms\"");
  refuse_beside(m.norm_place != NormPlace::before, "norm_place", "\"before\"");
  refuse_beside(m.parallel_residual, "parallel_residual = true", "false");
  refuse_beside(m.latent_attention(), "latent attention (kv_rank)", "0");
  refuse_beside(m.window.size > 0, "a window", "0");
  refuse_beside(m.norms_less_one && !s.is_delta(), "norms_less_one = true", "false");
  refuse_beside(m.num_mtp_layers > 0, "num_mtp_layers", "0");
}

// The same of short convolutions.
void check_short_conv(const ModelSpec& m) {
  const ShortConvSpec& s = m.short_conv;
  if (s.kernel == 0) {
    if (!s.attention_layers.empty())
      refuse(
          "model {}: attention_layers are legal beside ssm_heads or short_conv alone; give short_conv above "
          "0",
          m.name);
    return;
  }
  constexpr std::int64_t most_positions = 64;
  if (s.kernel < 2 || s.kernel > most_positions)
    refuse("model {}: short_conv = {} is not legal: give a whole number from 2 to {}, or 0", m.name, s.kernel,
           most_positions);
  check_listed_layers(m, "attention_layers", s.attention_layers);
  if (m.num_short_conv_layers() == 0)
    refuse("model {}: all layers are attention_layers; leave out short_conv, or one of them", m.name);
  const auto refuse_beside = [&m](bool chosen, const char* what, const char* legal) {
    if (chosen)
      refuse("model {}: {} is not legal beside layers with a short convolution (short_conv = {}); give {}",
             m.name, what, m.short_conv.kernel, legal);
  };
  refuse_beside(m.family != Family::llama, "a family other than llama", "family = \"llama\"");
  refuse_beside(m.state_space.heads > 0, "a state space (ssm_heads)", "0");
  refuse_beside(!m.layer_pattern.empty(), "layer_pattern", "no pattern");
  refuse_beside(m.experts != Experts::none && m.experts != Experts::deepseek, "another kind of experts",
                "experts = \"deepseek\"");
  refuse_beside(m.norm_kind != NormKind::rms, "norm_kind", "\"rms\"");
  refuse_beside(m.norm_place != NormPlace::before, "norm_place", "\"before\"");
  refuse_beside(m.parallel_residual, "parallel_residual = true", "false");
  refuse_beside(m.latent_attention(), "latent attention (kv_rank)", "0");
  refuse_beside(m.window.size > 0, "a window", "0");
  refuse_beside(m.norms_less_one, "norms_less_one = true", "false");
  refuse_beside(m.num_mtp_layers > 0, "num_mtp_layers", "0");
}

// Letters, and what they stand for.
struct PatternLetter {
  LayerPart part;
  char letter;
  const char* name;
};
constexpr PatternLetter pattern_letters[] = {{LayerPart::attention, '*', "layer with attention"},
                                             {LayerPart::mlp, '-', "layer with an MLP"},
                                             {LayerPart::state_space, 'M', "layer with a state space"},
                                             {LayerPart::experts, 'E', "layer with experts"}};
// '\0' for what no pattern has.
char letter_of(LayerPart part) {
  const auto* const found = std::find_if(std::begin(pattern_letters), std::end(pattern_letters),
                                         [part](const PatternLetter& one) { return one.part == part; });
  return found == std::end(pattern_letters) ? '\0' : found->letter;
}

// What stands beside layers of one part each, and what cannot.
void check_layer_pattern(const ModelSpec& m) {
  const std::string& pattern = m.layer_pattern;
  if (pattern.empty()) return;
  if (const auto at = pattern.find_first_not_of("M*-E"); at != std::string::npos)  // which may be part of one
    refuse(
        "model {}: letter {} of layer_pattern is not legal: give M (a state space), * (attention), - (an "
        "MLP) or E (experts)",
        m.name, at + 1);
  if (std::ssize(pattern) != m.num_layers)
    refuse("model {}: layer_pattern has {} letters, and num_layers = {}; give a letter for each layer",
           m.name, pattern.size(), m.num_layers);
  const bool states = m.num_state_space_layers() > 0, routed = m.num_expert_layers() > 0;
  if (states != (m.state_space.heads > 0))
    refuse("model {}: layer_pattern has {} layer with a state space (M), and ssm_heads = {}; give {}", m.name,
           states ? "a" : "no", m.state_space.heads, states ? "ssm_heads above 0" : "0");
  if (routed != (m.experts != Experts::none))
    refuse("model {}: layer_pattern has {} layer with experts (E), and experts = \"{}\"; give {}", m.name,
           routed ? "a" : "no", name_of(m.experts), routed ? "experts = \"deepseek\"" : "none");
  const auto refuse_beside = [&m](bool chosen, const char* what, const char* legal) {
    if (chosen) refuse("model {}: {} is not legal beside layer_pattern; give {}", m.name, what, legal);
  };
  refuse_beside(m.family != Family::llama, "a family other than llama", "family = \"llama\"");
  refuse_beside(!m.state_space.attention_layers.empty(), "attention_layers", "none: the pattern has them");
  refuse_beside(m.num_dense_layers > 0, "num_dense_layers", "0: the pattern has them");
  refuse_beside(m.experts != Experts::none && m.experts != Experts::deepseek, "another kind of experts",
                "experts = \"deepseek\"");
  refuse_beside(m.norm_place != NormPlace::before, "norm_place", "\"before\"");
  refuse_beside(m.parallel_residual, "parallel_residual = true", "false");
  refuse_beside(m.window.size > 0, "a window", "0");
  refuse_beside(m.latent_attention(), "latent attention (kv_rank)", "0");
  refuse_beside(m.num_mtp_layers > 0, "num_mtp_layers", "0");
}

void check_experts(const ModelSpec& m) {
  if (m.expert_latent != 0 && m.experts != Experts::deepseek)
    refuse("model {}: expert_latent = {} is legal with experts = \"deepseek\" alone; give 0", m.name,
           m.expert_latent);
  if (m.experts == Experts::none) return;
  if (m.family != Family::llama)
    refuse("model {}: experts are not legal for the {} family; give family = \"llama\"", m.name,
           name_of(m.family));
  constexpr std::int64_t most_experts = 4096;
  check_size(m, "num_experts", m.num_experts, most_experts);
  check_size(m, "experts_per_token", m.experts_per_token, m.num_experts);
  check_size(m, "expert_hidden", m.expert_hidden, largest_size);
  if (m.num_shared_experts < 0 || m.num_shared_experts > most_experts)
    refuse("model {}: num_shared_experts = {} is not legal: give a whole number from 0 to {}", m.name,
           m.num_shared_experts, most_experts);
  if (m.shared_hidden != 0) check_size(m, "shared_hidden", m.shared_hidden, largest_size);
  if (m.expert_latent != 0) check_size(m, "expert_latent", m.expert_latent, largest_size);
  if (m.expert_latent != 0 && m.shared_gate)
    refuse("model {}: shared_gate = true is not legal beside expert_latent = {}; give false, or 0", m.name,
           m.expert_latent);
  if (m.activation != Activation::swiglu &&
      !(m.activation == Activation::relu2 && m.experts == Experts::deepseek))
    refuse(
        "model {}: activation = \"{}\" is not legal with experts = \"{}\"; give \"swiglu\", or \"relu2\" "
        "with experts = \"deepseek\"",
        m.name, name_of(m.activation), name_of(m.experts));
  if (m.num_shared_experts == 0 && (m.shared_hidden > 0 || m.shared_gate))
    refuse("model {}: {} is not legal without experts that all tokens share; give num_shared_experts = 1",
           m.name,
           m.shared_gate ? std::string("shared_gate = true")
                         : fmt::format("shared_hidden = {}", m.shared_hidden));
  if (m.num_dense_layers < 0 || m.num_dense_layers >= m.num_layers)
    refuse("model {}: num_dense_layers = {} is not legal: give a whole number from 0 to {}", m.name,
           m.num_dense_layers, m.num_layers - 1);
  if (m.experts != Experts::deepseek && (m.num_shared_experts > 0 || m.num_dense_layers > 0))
    refuse(
        "model {}: num_shared_experts = {} and num_dense_layers = {}: experts as in {} have neither; "
        "give 0, or experts = \"deepseek\"",
        m.name, m.num_shared_experts, m.num_dense_layers, name_of(m.experts));
  check_positive(m, "swiglu_alpha", m.clamp.alpha);
  check_positive(m, "swiglu_limit", m.clamp.limit);
  if (m.experts != Experts::gpt_oss && !(m.clamp == SwigluClamp{}))
    refuse(
        "model {}: swiglu_alpha = {} and swiglu_limit = {}: experts as in {} have neither; "
        "give experts = \"gpt-oss\"",
        m.name, m.clamp.alpha, m.clamp.limit, name_of(m.experts));
}

// What only a llama's attention has, of heads that are projected straight from the input.
void check_attention(const ModelSpec& m) {
  for (const auto& [field, chosen] : {std::pair{"attention_sinks", m.attention_sinks},
                                      {"attention_out_bias", m.attention_out_bias},
                                      {"attention_gate", m.attention_gate}}) {
    if (!chosen) continue;
    if (m.family != Family::llama)
      refuse("model {}: {} = true is not legal for the {} family; give false, or family = \"llama\"", m.name,
             field, name_of(m.family));
    if (m.latent_attention())
      refuse("model {}: {} = true is not legal with latent attention (kv_rank = {}); give false", m.name,
             field, m.kv_rank);
  }
  if (m.mlp_bias && m.family != Family::llama)
    refuse("model {}: mlp_bias = true is not legal for the {} family; give false, or family = \"llama\"",
           m.name, name_of(m.family));
  if (m.mlp_bias && m.experts != Experts::none)
    refuse("model {}: mlp_bias = true is not legal with experts = \"{}\"; give false", m.name,
           name_of(m.experts));
  if (m.family != Family::llama && m.activation != Activation::gelu && m.activation != Activation::gelu_erf &&
      m.activation != Activation::relu)
    refuse(
        "model {}: activation = \"{}\" is not legal for the {} family; give \"gelu\", \"gelu_erf\" or "
        "\"relu\"",
        m.name, name_of(m.activation), name_of(m.family));
  if (m.mlp_bias && m.activation == Activation::xielu)
    refuse("model {}: mlp_bias = true is not legal with activation = \"xielu\"; give false", m.name);
  // They are added with the residual stream.
  for (const auto& [field, chosen] :
       {std::pair{"attention_out_bias", m.attention_out_bias}, {"mlp_bias", m.mlp_bias}}) {
    if (!chosen) continue;
    if (m.norm_place != NormPlace::before)
      refuse("model {}: {} = true is not legal with norm_place = \"{}\"; give \"before\"", m.name, field,
             name_of(m.norm_place));
    if (m.scales.residual != 1)
      refuse("model {}: {} = true is not legal with residual_scale = {}; give 1", m.name, field,
             m.scales.residual);
  }
}

// How a llama's layers are put together, and how its files are.
void check_layers(const ModelSpec& m) {
  const bool llama = m.family == Family::llama, layer_norm = m.norm_kind != NormKind::rms;
  if (layer_norm && !llama)
    refuse("model {}: norm_kind = \"{}\" is not legal for the {} family, which has LayerNorm; give \"rms\"",
           m.name, name_of(m.norm_kind), name_of(m.family));
  if (m.embedding_norm && (!llama || m.num_mtp_layers > 0))
    refuse(
        "model {}: embedding_norm = true is not legal for the {} family with num_mtp_layers = {}; give "
        "false, or "
        "family = \"llama\" and 0",
        m.name, name_of(m.family), m.num_mtp_layers);
  if (m.learned_positions && (!llama || m.latent_attention() || m.qk_norm_turned || m.num_mtp_layers > 0))
    refuse(
        "model {}: learned_positions = true is not legal for the {} family, with latent attention, "
        "qk_norm_turned or "
        "num_mtp_layers above 0; give false",
        m.name, name_of(m.family));
  if (m.position_offset < 0 || m.position_offset > largest_size ||
      (m.position_offset > 0 && !m.learned_positions))
    refuse(
        "model {}: position_offset = {} is not legal: give 0, or a number of rows with learned_positions = "
        "true",
        m.name, m.position_offset);
  const RopeSpec& r = m.rope;
  const bool turns = m.rotary_dim > 0 || m.qk_norm_turned || m.interleaved_rope || r.unturned_every > 0 ||
                     r.local_theta > 0 || r.query_growth != 0 || r.scaling != RopeScaling::none;
  if (m.alibi && (!llama || m.latent_attention() || m.learned_positions || m.caps.attention > 0 || turns))
    refuse(
        "model {}: alibi = true is not legal for the {} family, with latent attention, attention_cap or "
        "positions of another kind (learned_positions, rotary_dim, qk_norm_turned, interleaved_rope, "
        "unturned_every, rope_scaling, rope_local_theta); give false, or family = \"llama\" without these",
        m.name, name_of(m.family));
  if (m.norm_kind == NormKind::rms_plain && (m.qk_norm_whole || m.latent_attention() || m.norms_less_one))
    refuse(
        "model {}: norm_kind = \"rms-plain\" is not legal with qk_norm_whole, norms_less_one or latent "
        "attention; "
        "give \"rms\"",
        m.name);
  if (layer_norm && m.norm_place != NormPlace::before)
    refuse("model {}: norm_kind = \"{}\" is not legal with norm_place = \"{}\"; give \"before\"", m.name,
           name_of(m.norm_kind), name_of(m.norm_place));
  if (m.parallel_residual && m.family == Family::gpt2)
    refuse("model {}: parallel_residual = true is not legal for the gpt2 family; give false", m.name);
  if (m.parallel_residual && llama && (m.norm_place != NormPlace::before || m.expert_latent > 0))
    refuse(
        "model {}: parallel_residual = true is not legal with norm_place = \"{}\" or expert_latent = {}; give "
        "false, or \"before\" and 0",
        m.name, name_of(m.norm_place), m.expert_latent);
  if (m.parallel_norms && (!llama || !m.parallel_residual || m.experts != Experts::none))
    refuse(
        "model {}: parallel_norms = true is legal for the llama family with parallel_residual = true and "
        "without experts alone; give false",
        m.name);
  for (const auto& [field, chosen] :
       {std::pair{"interleaved_rope", m.interleaved_rope}, {"fused_mlp", m.fused_mlp}}) {
    if (!chosen) continue;
    if (!llama)
      refuse("model {}: {} = true is not legal for the {} family; give false", m.name, field,
             name_of(m.family));
    if (m.latent_attention())
      refuse("model {}: {} = true is not legal with latent attention; give false", m.name, field);
  }
  if (m.fused_mlp && m.fused_projections)
    refuse("model {}: fused_mlp = true is not legal with fused_projections; give false", m.name);
  const bool other_experts = m.experts != Experts::none && m.experts != Experts::deepseek;
  if (m.fused_mlp && (other_experts || m.shared_gate || !is_gated(m.activation) || m.mlp_bias))
    refuse(
        "model {}: fused_mlp = true is not legal with experts other than deepseek's, shared_gate, biases or "
        "without a gate; give false",
        m.name);
}

void check_router(const ModelSpec& m) {
  if (m.experts == Experts::none) return;
  const RouterSpec& r = m.router;
  check_positive(m, "routed_scale", r.scale);
  if (r.epsilon != 0) check_positive(m, "router_epsilon", r.epsilon);
  if (r.epsilon != 0 && !r.normalise)
    refuse("model {}: router_epsilon = {} is not legal with normalise_weights = false; give 0", m.name,
           r.epsilon);
  if (r.groups < 1 || m.num_experts % r.groups != 0)
    refuse("model {}: router_groups = {} does not divide num_experts = {}; give a divisor", m.name, r.groups,
           m.num_experts);
  const std::int64_t size = m.num_experts / r.groups, least = (m.experts_per_token + size - 1) / size;
  if (r.most_groups < least || r.most_groups > r.groups)
    refuse(
        "model {}: router_most_groups = {} is not legal: {} experts of a token are in groups of {}; give a "
        "whole number from {} to {}",
        m.name, r.most_groups, m.experts_per_token, size, least, r.groups);
  if (r.group_best < 0 || r.group_best > size)
    refuse("model {}: router_group_best = {} is not legal: a group has {} experts; give 0 to {}", m.name,
           r.group_best, size, size);
}

void check_latent_attention(const ModelSpec& m) {
  if (m.kv_rank == 0 && m.q_rank == 0 && m.value_head_dim == 0) return;
  if (m.family != Family::llama)
    refuse("model {}: kv_rank = {} is not legal for the {} family", m.name, m.kv_rank, name_of(m.family));
  check_size(m, "kv_rank", m.kv_rank, largest_size);
  if (m.q_rank != 0) check_size(m, "q_rank", m.q_rank, largest_size);
  check_size(m, "rotary_dim", m.rotary_dim, m.head_dim);
  if (m.rotary_dim % 2 != 0)
    refuse(
        "model {}: rotary_dim = {} is odd; rotary positions turn pairs of channels, so give an even number",
        m.name, m.rotary_dim);
  check_size(m, "value_head_dim", m.value_head_dim, largest_size);
  if (m.num_kv_heads != m.num_heads)
    refuse(
        "model {}: num_kv_heads = {} is not legal with latent attention, whose heads all have their own "
        "keys and values; give {}",
        m.name, m.num_kv_heads, m.num_heads);
}

void check_prediction(const ModelSpec& m) {
  if (m.num_mtp_layers < 0 || m.num_mtp_layers > 1)
    refuse("model {}: num_mtp_layers = {} is not legal: give 1 to predict one more token, or 0", m.name,
           m.num_mtp_layers);
  check_positive(m, "mtp_weight", m.mtp_weight);
  if (m.num_mtp_layers == 0) return;
  if (m.family != Family::llama)
    refuse("model {}: num_mtp_layers = 1 is not legal for the {} family; give 0, or family = \"llama\"",
           m.name, name_of(m.family));
  if (m.output_bias)
    refuse("model {}: num_mtp_layers = 1 is not legal with output_bias = true; give 0, or false", m.name);
  if (!(m.tuning == FineTuning{}))
    refuse("model {}: num_mtp_layers = 1 is not legal with parts frozen, or adapters; give 0", m.name);
}

void check_rope(const ModelSpec& m) {
  const RopeSpec& r = m.rope;
  ScaleSpec scales = m.scales;
  if (m.latent_attention()) scales.attention = 0;  // DeepSeek's is larger where its positions are scaled
  const bool other = !(m.window == WindowSpec{}) || !(scales == ScaleSpec{}) || m.fused_projections ||
                     m.norms_less_one || m.norm_place != NormPlace::before || !(m.caps == CapSpec{});
  if (m.family == Family::gpt2) {
    RopeSpec plain;
    plain.theta = r.theta;
    if (!(r == plain) || (m.rotary_dim != 0 && m.kv_rank == 0) || other)
      refuse(
          "model {}: scaled, partial or missing rotary positions, a window, scales, caps, norm_place and "
          "fused_projections are "
          "not legal for the gpt2 family; give family = \"llama\"",
          m.name);
    return;
  }
  if (m.family == Family::neox &&
      (r.unturned_every != 0 || r.local_theta != 0 || r.query_growth != 0 || other))
    refuse(
        "model {}: unturned_every, rope_local_theta, rope_query_growth, a window, scales, caps, norm_place "
        "and fused_projections are not legal for the neox family; give family = \"llama\"",
        m.name);
  if (!m.latent_attention() && (m.rotary_dim < 0 || m.rotary_dim > m.head_dim || m.rotary_dim % 2 != 0))
    refuse("model {}: rotary_dim = {} is not legal: give an even number up to head_dim = {}, or 0 for all",
           m.name, m.rotary_dim, m.head_dim);
  if (r.unturned_every < 0 || r.unturned_every > largest_num_layers)
    refuse("model {}: unturned_every = {} is not legal: give a whole number from 0 to {}", m.name,
           r.unturned_every, largest_num_layers);
  if (m.window.size < 0 || m.window.size > largest_size)
    refuse("model {}: window = {} is not legal: give a whole number from 0 to {}", m.name, m.window.size,
           largest_size);
  if (m.window.full_every < 0 || m.window.full_every > largest_num_layers ||
      (m.window.size == 0 && m.window.full_every > 0))
    refuse("model {}: window_full_every = {} is not legal: give a whole number from 0 to {}, beside a window",
           m.name, m.window.full_every, largest_num_layers);
  if (m.window.full_first && m.window.full_every == 0)
    refuse("model {}: window_full_first = true is not legal without window_full_every; give false", m.name);
  check_listed_layers(m, "window_full_layers", m.window.full_layers);
  if (!m.window.full_layers.empty() && (m.window.size == 0 || m.window.full_every > 0))
    refuse(
        "model {}: window_full_layers are not legal without a window, or with window_full_every = {}; give "
        "none",
        m.name, m.window.full_every);
  if (m.latent_attention() && (r.unturned_every > 0 || other))
    refuse(
        "model {}: unturned_every, window, scales other than attention_scale, caps, norm_place and "
        "fused_projections are not legal with latent attention (kv_rank = {})",
        m.name, m.kv_rank);
  if (m.fused_projections && m.experts != Experts::none)
    refuse("model {}: fused_projections = true is not legal with experts; give false", m.name);
  if (r.scaling == RopeScaling::none) return;
  check_positive(m, "rope_factor", r.factor);
  if (r.scaling == RopeScaling::linear) return;
  check_size(m, "rope_original_length", r.original_length, largest_size);
  if (r.scaling == RopeScaling::dynamic) {
    if (r.factor < 1)
      refuse("model {}: rope_factor = {} is not legal with dynamic: give a number of at least 1", m.name,
             r.factor);
    if (m.turned_width() < 4)
      refuse(
          "model {}: rope_scaling = \"dynamic\" is not legal where {} of each head are turned: give 4 or "
          "more",
          m.name, m.turned_width());
    return;
  }
  if (r.scaling == RopeScaling::llama3) {
    check_positive(m, "rope_low_frequency", r.low_frequency);
    if (!(r.high_frequency > r.low_frequency) || !std::isfinite(r.high_frequency))
      refuse("model {}: rope_high_frequency = {} is not legal: give a number above rope_low_frequency = {}",
             m.name, r.high_frequency, r.low_frequency);
    return;
  }
  check_positive(m, "rope_attention_factor", r.attention_factor);
  if (r.scaling == RopeScaling::yarn) {
    check_positive(m, "rope_beta_slow", r.beta_slow);
    check_positive(m, "rope_beta_fast", r.beta_fast);
    if (r.query_growth != 0) check_positive(m, "rope_query_growth", r.query_growth);
    if (r.query_growth != 0 && r.unturned_every > 0)
      refuse(
          "model {}: rope_query_growth = {} is not legal with unturned_every = {}: queries grow "
          "where they are turned; give 0",
          m.name, r.query_growth, r.unturned_every);
    if (!(r.theta > 1))
      refuse("model {}: rope_theta = {} is not legal with yarn: give a number above 1", m.name, r.theta);
    return;
  }
  for (const auto& [field, factors] :
       {std::pair{"rope_short_factors", &r.short_factors}, {"rope_long_factors", &r.long_factors}}) {
    if (std::ssize(*factors) != m.turned_width() / 2)
      refuse("model {}: {} has {} numbers: give one for each of the {} pairs of a head that are turned",
             m.name, field, factors->size(), m.turned_width() / 2);
    for (const double factor : *factors) check_positive(m, field, factor);
  }
}

void check_scales(const ModelSpec& m) {
  check_positive(m, "embedding_scale", m.scales.embedding);
  check_positive(m, "residual_scale", m.scales.residual);
  check_positive(m, "logits_divisor", m.scales.logits_divisor);
  if (m.scales.attention != 0) check_positive(m, "attention_scale", m.scales.attention);
  ScaleSpec plain = m.scales;
  plain.attention_out = plain.state_space_out = plain.mlp_out = plain.mlp_gate = 1;
  plain.state_space = {1, 1, 1, 1, 1};
  if (!(plain == m.scales) && !m.state_space.beside_attention)
    refuse(
        "model {}: attention_out_scale, ssm_out_scale, mlp_out_scale, mlp_gate_scale and ssm_scales are "
        "legal beside ssm_beside_attention = true alone; give 1",
        m.name);
  if (m.state_space.beside_attention &&
      (m.qkv_bias || m.attention_out_bias || m.mlp_bias || m.scales.residual != 1 || !is_gated(m.activation)))
    refuse(
        "model {}: qkv_bias, attention_out_bias, mlp_bias, residual_scale and an activation without a gate "
        "are not legal beside ssm_beside_attention = true; give false, false, false, 1 and \"swiglu\"",
        m.name);
  check_positive(m, "attention_out_scale", m.scales.attention_out);
  check_positive(m, "ssm_out_scale", m.scales.state_space_out);
  check_positive(m, "mlp_out_scale", m.scales.mlp_out);
  check_positive(m, "mlp_gate_scale", m.scales.mlp_gate);
  for (const double scale : m.scales.state_space) check_positive(m, "ssm_scales", scale);
  if (m.caps.attention != 0) check_positive(m, "attention_cap", m.caps.attention);
  // exp(-2 cap) is then a normal number of every dtype: the backward pass takes logits from their
  // exponentials.
  constexpr double largest_logits_cap = 40;
  if (!(m.caps.logits >= 0) || m.caps.logits > largest_logits_cap)
    refuse("model {}: logits_cap = {} is not legal: give a number above 0 and up to {}, or 0 for none",
           m.name, m.caps.logits, largest_logits_cap);
  if (m.qk_norm_whole && !m.qk_norm)
    refuse(
        "model {}: qk_norm_whole = true is not legal without norms of queries and keys; give qk_norm = true",
        m.name);
  if (m.qk_norm_turned && (!m.qk_norm || m.qk_norm_whole))
    refuse(
        "model {}: qk_norm_turned = true is legal beside qk_norm = true without qk_norm_whole alone; give "
        "false",
        m.name);
  if (m.norm_place != NormPlace::before && m.expert_latent > 0)
    refuse("model {}: norm_place = \"{}\" is not legal beside expert_latent = {}; give \"before\", or 0",
           m.name, name_of(m.norm_place), m.expert_latent);
  if (m.rope.local_theta != 0) check_positive(m, "rope_local_theta", m.rope.local_theta);
}

}  // namespace

void validate(const ModelSpec& m) {
  check_size(m, "num_layers", m.num_layers, largest_num_layers);
  check_size(m, "hidden", m.hidden, largest_size);
  check_size(m, "num_heads", m.num_heads, largest_size);
  check_size(m, "num_kv_heads", m.num_kv_heads, largest_size);
  check_size(m, "head_dim", m.head_dim, largest_size);
  check_size(m, "mlp_hidden", m.mlp_hidden, largest_size);
  check_size(m, "vocab", m.vocab, largest_size);
  check_size(m, "max_seq", m.max_seq, largest_size);
  check_positive(m, "norm_eps", m.norm_eps);
  check_positive(m, "rope_theta", m.rope.theta);
  check_rope(m);
  check_scales(m);
  check_positive(m, "init_std", m.init_std);
  if (m.num_heads % m.num_kv_heads != 0) {
    refuse("model {}: num_kv_heads = {} does not divide num_heads = {}; give a divisor of {}", m.name,
           m.num_kv_heads, m.num_heads, m.num_heads);
  }
  if (m.family != Family::llama) {
    if (m.num_kv_heads != m.num_heads) {
      refuse(
          "model {}: num_kv_heads = {} is not legal for the {} family, whose heads all have their own keys "
          "and values; give {}",
          m.name, m.num_kv_heads, name_of(m.family), m.num_heads);
    }
    if (m.attention_width() != m.hidden) {
      refuse("model {}: num_heads x head_dim = {} x {} = {}; the {} family needs hidden = {}", m.name,
             m.num_heads, m.head_dim, m.attention_width(), name_of(m.family), m.hidden);
    }
  }
  if (!m.has_position_table() && !m.alibi && m.head_dim % 2 != 0) {
    refuse("model {}: head_dim = {} is odd; rotary positions turn pairs of channels, so give an even number",
           m.name, m.head_dim);
  }
  check_experts(m);
  check_router(m);
  check_latent_attention(m);
  check_attention(m);
  check_layers(m);
  check_prediction(m);
  check_layer_pattern(m);
  check_short_conv(m);
  check_state_space(m);
  const auto real = [](std::int64_t size) { return static_cast<double>(size); };
  const double experts =
      real(m.num_experts) * real(m.expert_hidden) + real(m.shared_width()) + real(m.num_experts);
  const double latent = real(m.q_rank + m.kv_rank + m.rotary_dim);
  const double block =
      real(m.hidden) * (4 * real(m.attention_width()) + 3 * real(m.mlp_hidden) + 3 * experts + latent) +
      3 * real(m.expert_latent) * (real(m.hidden) + experts) +
      latent * real(m.num_heads) * real(m.head_dim + m.value_head_dim) +
      real(m.hidden) *
          (3 * real(m.state_space.width()) + 2 * real(m.state_space.groups) * real(m.state_space.state)) +
      (m.short_conv.kernel > 0 ? real(m.hidden) * real(4 * m.hidden + m.short_conv.kernel) : 0);
  const double total = real(m.num_layers + m.num_mtp_layers) * block +
                       real(m.num_mtp_layers) * 2 * real(m.hidden) * real(m.hidden) +
                       2 * real(m.hidden) * (real(m.vocab) + real(m.max_seq));
  if (total > largest_num_parameters) {
    refuse("model {}: its sizes make some {:.1e} parameters; at most {:.0e} can be counted", m.name, total,
           largest_num_parameters);
  }
}

std::vector<ParamSpec> embedding_parameters(const ModelSpec& m) { return embedding_program(m).parameters(); }

std::vector<ParamSpec> block_parameters(const ModelSpec& m, std::int64_t layer) {
  return layer_program(m, layer).parameters();
}

std::vector<ParamSpec> head_parameters(const ModelSpec& m) { return head_program(m).parameters(); }

ParamSpec output_matrix(const ModelSpec& m) { return head_program(m).find(OpKind::loss)->weights.front(); }

std::vector<ParamSpec> output_bias(const ModelSpec& m) { return head_program(m).find(OpKind::loss)->biases; }

std::vector<std::vector<ParamSpec>> parameter_groups(const ModelSpec& m) {
  std::vector<std::vector<ParamSpec>> groups;
  groups.reserve(static_cast<std::size_t>(m.num_layers) + 2);
  groups.push_back(embedding_parameters(m));
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer) groups.push_back(block_parameters(m, layer));
  groups.push_back(head_parameters(m));
  return groups;
}

std::vector<ParamSpec> all_parameters(const ModelSpec& m) {
  std::vector<ParamSpec> list;
  for (std::vector<ParamSpec>& group : parameter_groups(m))
    std::move(group.begin(), group.end(), std::back_inserter(list));
  return list;
}

std::int64_t num_parameters(const ModelSpec& m) { return count_all(m, Counted::all); }

std::int64_t num_multiplying_parameters(const ModelSpec& m) { return count_all(m, Counted::multiplying); }

std::int64_t num_trained_parameters(const ModelSpec& m) {
  if (m.tuning == FineTuning{}) return num_parameters(m);
  std::int64_t sum = 0;
  for (const ParamSpec& spec : all_parameters(m)) sum += spec.frozen ? 0 : spec.numel();
  return sum;
}

std::int64_t num_active_parameters(const ModelSpec& m) { return count_all(m, Counted::active); }

bool ModelSpec::has(LayerPart part, std::int64_t layer) const {
  if (!layer_pattern.empty())
    return layer < std::ssize(layer_pattern) &&
           layer_pattern[static_cast<std::size_t>(layer)] == letter_of(part);
  const bool routed = experts != Experts::none && layer >= num_dense_layers;
  if (part == LayerPart::experts || part == LayerPart::mlp) return routed == (part == LayerPart::experts);
  if (state_space.heads > 0 && state_space.beside_attention)
    return part == LayerPart::attention || part == LayerPart::state_space;
  const bool convolves = short_conv.kernel > 0;
  const std::vector<std::int64_t>& attending =
      convolves ? short_conv.attention_layers : state_space.attention_layers;
  if (!mixes_channels() || std::binary_search(attending.begin(), attending.end(), layer))
    return part == LayerPart::attention;
  return part == (convolves ? LayerPart::short_conv : LayerPart::state_space);
}

std::int64_t ModelSpec::num_layers_with(LayerPart part) const {
  if (!layer_pattern.empty()) return std::count(layer_pattern.begin(), layer_pattern.end(), letter_of(part));
  const std::int64_t routed = experts == Experts::none ? 0 : num_layers - num_dense_layers,
                     scans =
                         state_space.heads == 0 ? 0 : num_layers - std::ssize(state_space.attention_layers),
                     convolves =
                         short_conv.kernel == 0 ? 0 : num_layers - std::ssize(short_conv.attention_layers);
  switch (part) {
    case LayerPart::attention:
      return state_space.beside_attention ? num_layers : num_layers - scans - convolves;
    case LayerPart::state_space:
      return scans;
    case LayerPart::short_conv:
      return convolves;
    case LayerPart::mlp:
      return num_layers - routed;
    case LayerPart::experts:
      return routed;
  }
  return 0;
}

std::vector<std::int64_t> ModelSpec::routed_layers() const {
  std::vector<std::int64_t> layers;
  for (std::int64_t layer = 0; layer < num_layers + num_mtp_layers; ++layer)
    if (has_experts(layer)) layers.push_back(layer);
  return layers;
}

static std::vector<LayerKind> kinds_of_pattern(const ModelSpec& m) {
  std::vector<LayerKind> kinds;
  for (const auto& [part, letter, name] : pattern_letters)
    if (const auto first = m.layer_pattern.find(letter); first != std::string::npos)
      kinds.push_back({static_cast<std::int64_t>(first), m.num_layers_with(part), name});
  if (kinds.size() == 1) kinds.front().name = "layer";
  return kinds;
}

// Attention or a short convolution, and behind each an MLP or experts.
static std::vector<LayerKind> kinds_with_short_conv(const ModelSpec& m) {
  struct Kind {
    bool convolves, routed;
    const char* name;
  };
  const bool mixed = m.experts != Experts::none && m.num_dense_layers > 0;
  std::vector<LayerKind> kinds;
  for (const auto& [convolves, routed, name] :
       {Kind{false, false, mixed ? "layer with attention and an MLP" : "layer with attention"},
        {true, false, mixed ? "layer with a convolution and an MLP" : "layer with a convolution"},
        {false, true, mixed ? "layer with attention and experts" : "layer with attention"},
        {true, true, mixed ? "layer with a convolution and experts" : "layer with a convolution"}}) {
    LayerKind kind{0, 0, name};
    for (std::int64_t layer = m.num_layers; layer-- > 0;)
      if (m.has_short_conv(layer) == convolves && m.has_experts(layer) == routed)
        kind.layer = layer, ++kind.count;
    if (kind.count > 0) kinds.push_back(kind);
  }
  if (kinds.size() == 1) kinds.front().name = "layer";
  return kinds;
}

std::vector<LayerKind> layer_kinds(const ModelSpec& m) {
  if (!m.layer_pattern.empty()) return kinds_of_pattern(m);
  if (m.short_conv.kernel > 0) return kinds_with_short_conv(m);
  // Beside a state space all layers have experts, or none.
  const std::int64_t states = m.num_state_space_layers(), experts = states > 0 ? 0 : m.num_expert_layers(),
                     dense = m.num_layers - experts - states;
  std::vector<LayerKind> kinds;
  std::int64_t first = 0;
  if (states > 0 && dense > 0) first = m.state_space.attention_layers.front();
  if (dense > 0)
    kinds.push_back({first, dense,
                     experts > 0  ? "layer without experts"
                     : states > 0 ? "layer with attention"
                                  : "layer"});
  first = 0;
  while (states > 0 && !m.has_state_space(first)) ++first;
  if (states > 0) kinds.push_back({first, states, dense > 0 ? "layer with a state space" : "layer"});
  if (experts > 0) kinds.push_back({m.num_layers - 1, experts, dense > 0 ? "layer with experts" : "layer"});
  return kinds;
}

double ModelSpec::mean_keys(std::int64_t seq_len) const {
  const double length = static_cast<double>(seq_len), all = length / 2;
  if (window.size == 0 || window.size >= seq_len) return all;
  const double size = static_cast<double>(window.size), seen = size - size * size / (2 * length);
  const double part = windowed_part();
  return part * seen + (1 - part) * all;
}

double ModelSpec::windowed_part() const {
  if (window.size == 0) return 0;
  std::int64_t windowed = 0;
  for (std::int64_t layer = 0; layer < num_layers; ++layer) windowed += window.in(layer);
  return static_cast<double>(windowed) / static_cast<double>(num_layers);
}

double model_flops_per_token(const ModelSpec& m, std::int64_t seq_len) {
  return flops_per_token_seeing(m, m.mean_keys(seq_len));
}

double flops_per_token_seeing(const ModelSpec& m, double mean_keys) {
  const double widths = static_cast<double>(m.attention_width() + m.attended_width());
  const std::int64_t states = m.num_state_space_layers();
  // Of each state-space layer a channel's state is written and read once for a token, by the delta rule read
  // twice, and the channels that are convolved are.
  const StateSpaceSpec& s = m.state_space;
  const double scans =
      3.0 * static_cast<double>(states) *
          static_cast<double>((s.is_delta() ? 6 : 4) * s.width() * s.state + 2 * s.mixed_width() * s.kernel) +
      6.0 * static_cast<double>(m.num_short_conv_layers()) *
          static_cast<double>(m.hidden * m.short_conv.kernel);
  const double attention =
      6.0 * static_cast<double>(m.num_attention_layers() + m.num_mtp_layers) * widths * mean_keys + scans;
  double left_out = 0;
  if (!(m.tuning == FineTuning{})) {
    const std::int64_t idle = idle_blocks(m) - 1;  // layers
    const auto leave_out = [&](const std::vector<ParamSpec>& list, double products) {
      for (const ParamSpec& p : list)
        if (p.frozen && p.multiplies && p.expert < m.experts_per_token)
          left_out += 2.0 * products * static_cast<double>(p.numel());
    };
    leave_out(embedding_parameters(m), 1);
    leave_out(head_parameters(m), 1);
    for (std::int64_t layer = 0; layer < m.num_layers; ++layer)
      leave_out(block_parameters(m, layer), layer < idle ? 2 : 1);
    // Two of the three passes through attention.
    left_out += 2.0 / 3.0 * attention * static_cast<double>(std::max<std::int64_t>(0, idle)) /
                static_cast<double>(m.num_layers);
  }
  return 6.0 * static_cast<double>(num_active_parameters(m)) - left_out + attention;
}

}  // namespace echelon
