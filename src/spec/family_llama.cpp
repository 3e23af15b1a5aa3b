// Llama: RoPE, RMSNorm or LayerNorm, SwiGLU or an activation without a gate, biases where they are asked for
// (Qwen2's of queries, keys and values; of attention's output; of MLPs), grouped-query attention (Qwen3's
// with norms of heads, gpt-oss's with sinks), attention and MLP one after the other or of the same input
// (Cohere), weights stored (out, in); in place of MLPs the experts of Mixtral, DeepSeek or gpt-oss; in place
// of attention, in some layers, Mamba-2's mixer, a gated DeltaNet or LFM2's short convolution; or layers of
// one part each (Nemotron-H).
#include <fmt/core.h>

#include <cmath>
#include <initializer_list>

#include "spec/block_builder.h"
#include "spec/families.h"

namespace echelon {
namespace {

ParamSpec llama_table(const ModelSpec& m) { return embedding_table("model.embed_tokens.weight", m); }

struct SwigluNames {
  const char *gate, *up, *down;
};
constexpr SwigluNames llama_names{"gate_proj.weight", "up_proj.weight", "down_proj.weight"};
constexpr SwigluNames mixtral_names{"w1.weight", "w3.weight", "w2.weight"};
constexpr SwigluNames starcoder2_names{"", "c_fc.weight", "c_proj.weight"};

// gate, up and down, or up and down, of what is `hidden` wide.
std::vector<ParamSpec> mlp_matrices(const ModelSpec& m, const std::string& at, const SwigluNames& names,
                                    std::int64_t width, bool gated, std::int64_t hidden) {
  std::vector<ParamSpec> list;
  if (gated) list.push_back(cut_rows(at + names.gate, width, hidden, 1, m.init_std));
  list.push_back(cut_rows(at + names.up, width, hidden, 1, m.init_std));
  list.push_back(cut_columns(at + names.down, hidden, width, 1, residual_std(m)));
  return list;
}

// Of the one that all tokens share.
std::vector<ParamSpec> shared_expert(const ModelSpec& m, const std::string& home) {
  const char* const shared = m.shared_gate ? "shared_expert." : "shared_experts.";
  return mlp_matrices(m, home + shared, llama_names, m.shared_width(), is_gated(m.expert_activation()),
                      m.hidden);
}

// The router, the experts one after another, the one that all tokens share, where it reads what these do, and
// what it is weighed by.
std::vector<ParamSpec> experts(const ModelSpec& m, const std::string& at) {
  const bool mixtral = m.experts == Experts::mixtral;
  const std::string home = at + (mixtral ? "block_sparse_moe." : "mlp.");
  const char* const router = m.experts == Experts::gpt_oss ? "router.weight" : "gate.weight";
  std::vector<ParamSpec> list{whole_matrix(home + router, m.num_experts, m.hidden, m.init_std)};
  for (int expert = 0; expert < m.num_experts; ++expert)
    for (ParamSpec& p :
         mlp_matrices(m, fmt::format("{}experts.{}.", home, expert), mixtral ? mixtral_names : llama_names,
                      m.expert_hidden, is_gated(m.expert_activation()), m.expert_width())) {
      p.expert = expert;
      list.push_back(std::move(p));
    }
  if (m.num_shared_experts > 0 && m.expert_latent == 0)
    for (ParamSpec& p : shared_expert(m, home)) list.push_back(std::move(p));
  if (m.shared_gate)
    list.push_back(whole_matrix(home + "shared_expert_gate.weight", 1, m.hidden, m.init_std));
  return list;
}

// In the order of the matrices. Those of the second products are cut over tp by what they are added to, each
// column of which one rank adds to its part of the sum.
std::vector<ParamSpec> expert_biases(const ModelSpec& m, const std::string& at) {
  if (m.experts != Experts::gpt_oss) return {};
  const std::string home = at + "mlp.";
  std::vector<ParamSpec> list{whole_bias(home + "router.bias", m.num_experts)};
  for (int expert = 0; expert < m.num_experts; ++expert)
    for (const auto& [name, width] : {std::pair{"gate_proj.bias", m.expert_hidden},
                                      {"up_proj.bias", m.expert_hidden},
                                      {"down_proj.bias", m.hidden}}) {
      list.push_back(cut_bias(fmt::format("{}experts.{}.{}", home, expert, name), width, {{width, 1}}));
      list.back().expert = expert;
    }
  return list;
}

std::vector<ParamSpec> sinks(const ModelSpec& m, const std::string& at) {
  if (!m.attention_sinks) return {};
  ParamSpec of_heads = cut_bias(at + "sinks", m.num_heads, {{m.num_heads, 1}});
  of_heads.init = Init::normal;
  of_heads.init_std = m.init_std;
  return {of_heads};
}

// What is compressed is whole on every tp rank; heads are cut where they are made of it again.
int latent_attention_in(BlockBuilder& b, const ModelSpec& m, int x, const std::string& at) {
  const std::int64_t C = m.hidden, D = m.head_dim, H = m.num_heads;
  std::vector<ParamSpec> down, norms, up;
  int queries = -1;
  if (m.q_rank > 0) {
    down.push_back(whole_matrix(at + "q_a_proj.weight", m.q_rank, C, m.init_std));
    norms.push_back(norm_weight(at + "q_a_layernorm.weight", m.q_rank));
    up.push_back(cut_rows(at + "q_b_proj.weight", H * D, m.q_rank, D, m.init_std));
  } else {
    queries = b.columns("attention_in", x, {cut_rows(at + "q_proj.weight", H * D, C, D, m.init_std)});
  }
  down.push_back(whole_matrix(at + "kv_a_proj.weight", m.kv_rank, C, m.init_std));
  down.push_back(whole_matrix(at + "k_rope_proj.weight", m.rotary_dim, C, m.init_std));
  norms.push_back(norm_weight(at + "kv_a_layernorm.weight", m.kv_rank));
  const std::int64_t key_and_value = D - m.rotary_dim + m.value_head_dim;
  up.push_back(cut_rows(at + "kv_b_proj.weight", H * key_and_value, m.kv_rank, key_and_value, m.init_std));
  const std::vector<std::int64_t> one_each(norms.size(), 1);
  const int compressed = b.compressed("latent_in", x, std::move(down));
  return b.latent(b.head_norm("latent_norm", compressed, std::move(norms), one_each), queries, std::move(up));
}

int qk_norm(BlockBuilder& b, const ModelSpec& m, int qkv, const std::string& at) {
  std::vector<ParamSpec> weights;
  if (m.norm_kind != NormKind::rms_plain)
    weights = {head_norm_weight(at + "q_norm.weight", m.head_dim),
               head_norm_weight(at + "k_norm.weight", m.head_dim)};
  return b.head_norm("qk_norm", qkv, std::move(weights), {m.num_heads, m.num_kv_heads});
}

int attention_in(BlockBuilder& b, const ModelSpec& m, int x, const std::string& at) {
  if (m.latent_attention()) return latent_attention_in(b, m, x, at);
  const std::int64_t C = m.hidden, D = m.head_dim, Q = m.attention_width(), K = m.kv_width();
  std::vector<ParamSpec> biases;
  if (m.qkv_bias)
    biases = {cut_bias(at + "q_proj.bias", Q, {{Q, D}}), repeated(cut_bias(at + "k_proj.bias", K, {{K, D}})),
              repeated(cut_bias(at + "v_proj.bias", K, {{K, D}}))};
  const int qkv = b.columns("attention_in", x,
                            {cut_rows(at + "q_proj.weight", Q, C, D, m.init_std),
                             repeated(cut_rows(at + "k_proj.weight", K, C, D, m.init_std)),
                             repeated(cut_rows(at + "v_proj.weight", K, C, D, m.init_std))},
                            std::move(biases));
  if (!m.qk_norm || m.qk_norm_turned) return qkv;
  if (m.qk_norm_whole)
    return b.head_norm(
        "qk_norm", qkv,
        {cut_norm_weight(at + "q_norm.weight", Q, D), repeated(cut_norm_weight(at + "k_norm.weight", K, D))},
        {1, 1});
  return qk_norm(b, m, qkv, at);
}

// Of three runs of channels, each with a unit that tp cuts, or that it repeats: weights, and biases where it
// has them, up to 1 / sqrt(kernel) as torch's Conv1d begins with.
struct Channels {
  const char* name;
  std::int64_t width, unit;
  bool repeats = false;
};
void begin_as_convolution(ParamSpec& spec, std::int64_t kernel) {
  spec.multiplies = false;
  spec.init = Init::uniform;
  spec.init_std = 1 / std::sqrt(3 * static_cast<double>(kernel));
}
void convolution(const ModelSpec& m, const std::string& at, std::initializer_list<Channels> runs,
                 std::vector<ParamSpec>& taps, std::vector<ParamSpec>& biases) {
  const StateSpaceSpec& s = m.state_space;
  for (const auto& [name, width, unit, repeats] : runs) {
    taps.push_back(cut_rows(fmt::format("{}conv1d.{}.weight", at, name), width, s.kernel, unit, 0));
    taps.back().pieces.front().repeats = repeats;
    begin_as_convolution(taps.back(), s.kernel);
    if (!s.conv_bias) continue;
    biases.push_back(cut_bias(fmt::format("{}conv1d.{}.bias", at, name), width, {{width, unit, repeats}}));
    begin_as_convolution(biases.back(), s.kernel);
  }
}

// A gated DeltaNet: z, values, keys, queries, decays and betas, values, keys and queries convolved, the delta
// rule, the norm of each head that it makes. What belongs to a head of keys is held by all tp ranks that have
// heads of values of it.
int delta_net(BlockBuilder& b, const ModelSpec& m, int x, const std::string& at) {
  const StateSpaceSpec& s = m.state_space;
  const std::int64_t W = s.width(), G = s.groups * s.state, P = s.head_dim;
  const auto projection = [&](const char* name, std::int64_t rows, std::int64_t unit) {
    return cut_rows(at + "in_proj." + name + ".weight", rows, m.hidden, unit, m.init_std);
  };
  const int mixed = b.columns(
      "delta_in", x,
      {projection("z", W, P), projection("v", W, P), repeated(projection("k", G, s.state)),
       repeated(projection("q", G, s.state)), projection("a", s.heads, 1), projection("b", s.heads, 1)});
  std::vector<ParamSpec> taps, of_heads;
  convolution(m, at, {{"v", W, P}, {"k", G, s.state, true}, {"q", G, s.state, true}}, taps, of_heads);
  for (const auto& [name, init] : {std::pair{"dt_bias", Init::step}, {"A_log", Init::rate}}) {
    of_heads.push_back(cut_bias(at + name, s.heads, {{s.heads, 1}}));
    of_heads.back().init = init;
  }
  of_heads.push_back(head_norm_weight(at + "norm.weight", P));
  return b.rows("delta_out", b.state_space(mixed, std::move(taps), std::move(of_heads)),
                cut_columns(at + "out_proj.weight", m.hidden, W, P, residual_std(m)));
}

// Mamba-2's mixer: z, x, B, C and dt, x, B and C convolved, the scan, a norm of each group's channels that it
// makes. What belongs to a group is held by all tp ranks that have heads of it.
int state_space(BlockBuilder& b, const ModelSpec& m, int x, const std::string& at) {
  const StateSpaceSpec& s = m.state_space;
  const std::int64_t W = s.width(), G = s.groups * s.state, P = s.head_dim;
  const auto projection = [&](const char* name, std::int64_t rows, std::int64_t unit) {
    return cut_rows(at + "in_proj." + name + ".weight", rows, m.hidden, unit, m.init_std);
  };
  const std::vector<ParamSpec> in{projection("z", W, P), projection("x", W, P),
                                  repeated(projection("b", G, s.state)),
                                  repeated(projection("c", G, s.state)), projection("dt", s.heads, 1)};
  const auto& factors = m.scales.state_space;
  const int mixed =
      b.scale("state_scale", b.columns("state_in", x, in), in, {factors.begin(), factors.end()});
  std::vector<ParamSpec> taps, biases;
  convolution(m, at, {{"x", W, P}, {"b", G, s.state, true}, {"c", G, s.state, true}}, taps, biases);
  const auto of_heads = [&](const char* name, Init init) {
    biases.push_back(cut_bias(at + name, s.heads, {{s.heads, 1}}));
    biases.back().init = init;
  };
  of_heads("dt_bias", Init::step);
  of_heads("A_log", Init::rate);
  of_heads("D", Init::ones);
  int y = b.state_space(mixed, std::move(taps), std::move(biases));
  if (s.norm) y = b.head_norm("state_norm", y, {cut_norm_weight(at + "norm.weight", W, P)}, {s.groups});
  return b.rows("state_out", y, cut_columns(at + "out_proj.weight", m.hidden, W, P, residual_std(m)));
}

// LFM2's gated short convolution: B, C and x of each channel, which is cut by itself.
int short_conv(BlockBuilder& b, const ModelSpec& m, int x, const std::string& at) {
  const std::int64_t C = m.hidden;
  const auto projection = [&](const char* name) {
    return cut_rows(at + "in_proj." + name + ".weight", C, C, 1, m.init_std);
  };
  const int bcx = b.columns("conv_in", x, {projection("b"), projection("c"), projection("x")});
  ParamSpec taps = cut_rows(at + "conv.weight", C, m.short_conv.kernel, 1, 0);
  begin_as_convolution(taps, m.short_conv.kernel);
  return b.rows("conv_out", b.short_conv(bcx, std::move(taps)),
                cut_columns(at + "out_proj.weight", C, C, 1, residual_std(m)));
}

// Of the residual stream.
int norm(BlockBuilder& b, const ModelSpec& m, const char* name, int x, const std::string& parameter) {
  if (m.norm_kind == NormKind::rms || m.norm_kind == NormKind::rms_plain)
    return b.rms_norm(name, x, parameter, m.norm_kind);
  return b.layer_norm(name, x, parameter, m.norm_kind);
}

// What a layer adds to the residual stream.
int residual(BlockBuilder& b, const ModelSpec& m, int which, int x, int y, std::vector<ParamSpec> biases = {},
             double factor = 1) {
  if (const double scale = m.scales.residual * factor; scale != 1)
    y = b.sum(fmt::format("scaled{}", which), y, scale);
  return b.residual(fmt::format("residual{}", which), x, y, std::move(biases));
}

int attention(BlockBuilder& b, const ModelSpec& m, std::int64_t layer, int x, const std::string& at) {
  int y = attention_in(b, m, x, at + "self_attn.");
  if (m.is_turned(layer)) y = b.rope(y, m.window.in(layer));
  if (m.qk_norm_turned) y = qk_norm(b, m, y, at + "self_attn.");
  y = b.attention(y, m.window.in(layer), sinks(m, at + "self_attn."));
  if (m.attended_width() < m.attention_width()) y = b.narrow(y);
  if (m.attention_gate) {
    const std::string gate = at + "self_attn.gate_proj.";
    const std::int64_t width = m.attention_width();
    std::vector<ParamSpec> biases;
    if (m.qkv_bias) biases = {cut_bias(gate + "bias", width, {{width, m.head_dim}})};
    y = b.gate(y,
               b.columns("gate_in", x, {cut_rows(gate + "weight", width, m.hidden, m.head_dim, m.init_std)},
                         std::move(biases)));
  }
  return b.rows("attention_out", y,
                cut_columns(at + "self_attn.o_proj.weight", m.hidden, m.attended_width(),
                            m.attended_width() / m.num_heads, residual_std(m)));
}

// An activation, with the numbers that it learns, and the products around it: the sum over the ranks.
int mlp(BlockBuilder& b, const std::string& name, int x, Activation activation, std::vector<ParamSpec> in,
        std::vector<ParamSpec> biases = {}, double gate_scale = 1, std::vector<ParamSpec> numbers = {}) {
  ParamSpec down = std::move(in.back());
  in.pop_back();
  int hidden = b.columns(name + "_in", x, in, std::move(biases));
  if (gate_scale != 1) hidden = b.scale(name + "_scale", hidden, in, {gate_scale, 1});
  return b.rows(name + "_out", b.activation(hidden, activation, std::move(numbers)), std::move(down));
}

// Those of xielu, before softplus.
std::vector<ParamSpec> xielu_numbers(const std::string& at) {
  const auto before = [](double value) { return std::log(std::expm1(value)); };
  return {whole_number(at + "alpha_p", before(Xielu::begin)),
          whole_number(at + "alpha_n", before(Xielu::begin - Xielu::beta))};
}

int dense_mlp(BlockBuilder& b, const ModelSpec& m, int x, const std::string& at,
              std::vector<ParamSpec>& out_biases) {
  const bool starcoder2 = m.activation == Activation::gelu, gated = is_gated(m.activation);
  std::vector<ParamSpec> biases;
  if (m.mlp_bias) {
    if (gated) biases.push_back(cut_bias(at + "mlp.gate_proj.bias", m.mlp_hidden, {{m.mlp_hidden, 1}}));
    const auto bias = [&](const char* named, const char* of_starcoder2) {
      return fmt::format("{}mlp.{}.bias", at, starcoder2 ? of_starcoder2 : named);
    };
    biases.push_back(cut_bias(bias("up_proj", "c_fc"), m.mlp_hidden, {{m.mlp_hidden, 1}}));
    out_biases.push_back(whole_bias(bias("down_proj", "c_proj"), m.hidden));
  }
  return mlp(
      b, "mlp", x, m.activation,
      mlp_matrices(m, at + "mlp.", starcoder2 ? starcoder2_names : llama_names, m.mlp_hidden, gated,
                   m.hidden),
      std::move(biases), m.scales.mlp_gate,
      m.activation == Activation::xielu ? xielu_numbers(at + "mlp.act_fn.") : std::vector<ParamSpec>());
}

// The residual stream x with what experts make of y. Where tokens are narrower on their way to the routed
// ones (LatentMoE of Nemotron 3), the shared one is an MLP beside them.
int add_experts(BlockBuilder& b, const ModelSpec& m, int which, int x, int y, const std::string& at) {
  if (m.expert_latent == 0) {
    int sum = b.experts(y, -1, experts(m, at), expert_biases(m, at));
    if (m.norm_place != NormPlace::before)
      sum = b.rms_norm("mlp_norm", sum, at + "post_feedforward_layernorm");
    return residual(b, m, which, x, sum);
  }
  const std::string home = at + "mlp.";
  const auto projection = [&](const char* name, std::int64_t rows, std::int64_t cols, double std) {
    return std::vector{whole_matrix(home + name + ".weight", rows, cols, std)};
  };
  const int sent =
      b.compressed("routed_in", y, projection("fc1_latent_proj", m.expert_latent, m.hidden, m.init_std));
  const int sum = b.sum("routed_sum", b.experts(y, sent, experts(m, at)), 1);
  const int routed = b.compressed("routed_out", sum,
                                  projection("fc2_latent_proj", m.hidden, m.expert_latent, residual_std(m)));
  x = residual(b, m, which, x, routed);
  if (m.num_shared_experts == 0) return x;
  return residual(b, m, which + 1, x, mlp(b, "shared", y, m.expert_activation(), shared_expert(m, home)));
}

// x + part(norm(x)).
int one_part(BlockBuilder& b, const ModelSpec& m, std::int64_t layer, int x, const std::string& at) {
  const int y = norm(b, m, "norm1", x, at + "input_layernorm");
  if (m.has_experts(layer)) return add_experts(b, m, 1, x, y, at);
  if (m.has_state_space(layer)) return residual(b, m, 1, x, state_space(b, m, y, at + "mamba."));
  std::vector<ParamSpec> biases;
  if (m.has_mlp(layer)) {
    const int made = dense_mlp(b, m, y, at, biases);
    return residual(b, m, 1, x, made, std::move(biases));
  }
  if (m.attention_out_bias) biases = {whole_bias(at + "self_attn.o_proj.bias", m.hidden)};
  return residual(b, m, 1, x, attention(b, m, layer, y, at), std::move(biases));
}

// x + attention(norm(x)) + state space(norm(x)), and an MLP of that.
int side_by_side(BlockBuilder& b, const ModelSpec& m, std::int64_t layer, int x, const std::string& at) {
  const int y = norm(b, m, "norm1", x, at + "input_layernorm");
  const int attended = attention(b, m, layer, y, at);
  x = residual(b, m, 1, x, attended, {}, m.scales.attention_out);
  x = residual(b, m, 2, x, state_space(b, m, y, at + "mamba."), {}, m.scales.state_space_out);
  std::vector<ParamSpec> biases;
  const int made = dense_mlp(b, m, norm(b, m, "norm2", x, at + "post_attention_layernorm"), at, biases);
  return residual(b, m, 3, x, made, std::move(biases), m.scales.mlp_out);
}

// Returns what it hands on.
int layer_ops(BlockBuilder& b, const ModelSpec& m, std::int64_t layer, int x) {
  const std::string at = fmt::format("model.layers.{}.", layer);
  if (!m.layer_pattern.empty()) return one_part(b, m, layer, x, at);
  if (m.state_space.beside_attention) return side_by_side(b, m, layer, x, at);
  const bool before = m.norm_place != NormPlace::after, after = m.norm_place != NormPlace::before;
  const int first = before ? norm(b, m, "norm1", x, at + "input_layernorm") : x;
  // Placed before attention, so that the backward pass reaches it after the products of both branches.
  const int beside = m.parallel_norms ? norm(b, m, "norm2", x, at + "post_attention_layernorm") : first;
  const bool attends = m.has_attention(layer);
  int y = attends                    ? attention(b, m, layer, first, at)
          : m.has_short_conv(layer)  ? short_conv(b, m, first, at + "conv.")
          : m.state_space.is_delta() ? delta_net(b, m, first, at + "linear_attn.")
                                     : state_space(b, m, first, at + "mamba.");
  if (after) y = b.rms_norm("attention_norm", y, at + "post_attention_layernorm");
  std::vector<ParamSpec> out_bias;
  if (m.attention_out_bias && attends) out_bias = {whole_bias(at + "self_attn.o_proj.bias", m.hidden)};
  const int middle = residual(b, m, 1, x, y, std::move(out_bias));
  if (m.parallel_residual)
    y = beside;
  else if (before)
    y = norm(b, m, "norm2", middle, at + (after ? "pre_feedforward_layernorm" : "post_attention_layernorm"));
  else
    y = middle;
  if (m.has_experts(layer)) return add_experts(b, m, 2, middle, y, at);
  std::vector<ParamSpec> out_biases;
  y = dense_mlp(b, m, y, at, out_biases);
  if (after) y = b.rms_norm("mlp_norm", y, at + "post_feedforward_layernorm");
  return residual(b, m, 2, middle, y, std::move(out_biases));
}

// Of what the output matrix reads and of the next token (DeepSeek-V3's section 2.2): a layer more, and the
// model's own embedding and output matrix.
void predict_one_more(BlockBuilder& b, const ModelSpec& m, int x) {
  const std::string at = fmt::format("model.layers.{}.", m.num_layers);
  const int next = b.rms_norm("enorm", b.next_embedding(llama_table(m), m.scales.embedding), at + "enorm"),
            here = b.rms_norm("hnorm", x, at + "hnorm");
  const int joined = b.compressed("eh_proj", b.join("joined", next, here),
                                  {whole_matrix(at + "eh_proj.weight", m.hidden, 2 * m.hidden, m.init_std)});
  const int y = layer_ops(b, m, m.num_layers, joined);
  b.next_loss(b.rms_norm("next_norm", y, at + "shared_head.norm"), m.mtp_weight);
}

}  // namespace

BlockProgram Llama::embedding(const ModelSpec& m) {
  BlockBuilder b(m);
  int x = b.embedding(llama_table(m), m.scales.embedding);
  if (m.learned_positions)
    x = b.positions(
        x, whole_matrix("model.embed_positions.weight", m.position_offset + m.max_seq, m.hidden, m.init_std),
        m.position_offset);
  return b.finish(m.embedding_norm ? norm(b, m, "embedding_norm", x, "model.embedding_norm") : x);
}

BlockProgram Llama::layer(const ModelSpec& m, std::int64_t layer) {
  BlockBuilder b(m);
  return b.finish(layer_ops(b, m, layer, b.input("x")));
}

BlockProgram Llama::head(const ModelSpec& m) {
  BlockBuilder b(m);
  const int y = norm(b, m, "norm", b.input("x"), "model.norm"), loss = b.loss(y, llama_table(m));
  if (m.num_mtp_layers > 0) predict_one_more(b, m, y);
  return b.finish(loss);
}

}  // namespace echelon
