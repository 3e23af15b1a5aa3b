#include "spec/model_spec.h"

#include <cmath>
#include <utility>

#include "base/error.h"

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

ParamSpec norm(std::string name, std::int64_t width, Init init) {
  ParamSpec p;
  p.name = std::move(name);
  p.shape = {width};
  p.init = init;
  p.decay = false;
  p.multiplies = false;
  p.rows_are_sequence_sharded = true;
  return p;
}

ParamSpec matrix(std::string name, std::int64_t rows, std::int64_t cols, int shard_dim,
                 std::vector<Piece> pieces, double std) {
  ParamSpec p;
  p.name = std::move(name);
  p.shape = {rows, cols};
  p.shard_dim = shard_dim;
  p.pieces = std::move(pieces);
  p.init_std = std;
  return p;
}

// Of a column-parallel linear: cut as its outputs are.
ParamSpec cut_bias(std::string name, std::int64_t width, std::vector<Piece> pieces) {
  ParamSpec p = norm(std::move(name), width, Init::zeros);
  p.shard_dim = 0;
  p.pieces = std::move(pieces);
  p.rows_are_sequence_sharded = false;
  return p;
}

// Of a row-parallel linear: added once, after the sum over the group.
ParamSpec whole_bias(std::string name, std::int64_t width) {
  return norm(std::move(name), width, Init::zeros);
}

void add_layer_norm(std::vector<ParamSpec>& list, const std::string& name, std::int64_t width) {
  list.push_back(norm(name + ".weight", width, Init::ones));
  list.push_back(norm(name + ".bias", width, Init::zeros));
}

// Residual outputs start smaller so that the variance of the residual stream does not grow with depth
// (GPT-2).
double residual_std(const ModelSpec& m) {
  return m.init_std / std::sqrt(2.0 * static_cast<double>(m.num_layers));
}

std::vector<ParamSpec> gpt2_block(const ModelSpec& m, const std::string& prefix) {
  const std::int64_t C = m.hidden, F = m.mlp_hidden, D = m.head_dim;
  const std::vector<Piece> qkv{{C, D}, {C, D}, {C, D}};
  std::vector<ParamSpec> list;
  add_layer_norm(list, prefix + "ln_1", C);
  list.push_back(matrix(prefix + "attn.c_attn.weight", C, 3 * C, 1, qkv, m.init_std));
  list.push_back(cut_bias(prefix + "attn.c_attn.bias", 3 * C, qkv));
  list.push_back(matrix(prefix + "attn.c_proj.weight", C, C, 0, {{C, D}}, residual_std(m)));
  list.push_back(whole_bias(prefix + "attn.c_proj.bias", C));
  add_layer_norm(list, prefix + "ln_2", C);
  list.push_back(matrix(prefix + "mlp.c_fc.weight", C, F, 1, {{F, 1}}, m.init_std));
  list.push_back(cut_bias(prefix + "mlp.c_fc.bias", F, {{F, 1}}));
  list.push_back(matrix(prefix + "mlp.c_proj.weight", F, C, 0, {{F, 1}}, residual_std(m)));
  list.push_back(whole_bias(prefix + "mlp.c_proj.bias", C));
  return list;
}

std::vector<ParamSpec> llama_block(const ModelSpec& m, const std::string& prefix) {
  const std::int64_t C = m.hidden, F = m.mlp_hidden, D = m.head_dim, Q = m.attention_width(),
                     K = m.kv_width();
  std::vector<ParamSpec> list;
  list.push_back(norm(prefix + "input_layernorm.weight", C, Init::ones));
  list.push_back(matrix(prefix + "self_attn.q_proj.weight", Q, C, 0, {{Q, D}}, m.init_std));
  list.push_back(matrix(prefix + "self_attn.k_proj.weight", K, C, 0, {{K, D}}, m.init_std));
  list.push_back(matrix(prefix + "self_attn.v_proj.weight", K, C, 0, {{K, D}}, m.init_std));
  list.push_back(matrix(prefix + "self_attn.o_proj.weight", C, Q, 1, {{Q, D}}, residual_std(m)));
  list.push_back(norm(prefix + "post_attention_layernorm.weight", C, Init::ones));
  list.push_back(matrix(prefix + "mlp.gate_proj.weight", F, C, 0, {{F, 1}}, m.init_std));
  list.push_back(matrix(prefix + "mlp.up_proj.weight", F, C, 0, {{F, 1}}, m.init_std));
  list.push_back(matrix(prefix + "mlp.down_proj.weight", C, F, 1, {{F, 1}}, residual_std(m)));
  return list;
}

std::int64_t count(const std::vector<ParamSpec>& list, bool multiplying_only) {
  std::int64_t sum = 0;
  for (const ParamSpec& p : list) {
    if (p.multiplies || !multiplying_only) sum += p.numel();
  }
  return sum;
}

// Blocks are alike, so one stands for all.
std::int64_t count_all(const ModelSpec& m, bool multiplying_only) {
  return count(embedding_parameters(m), multiplying_only) +
         m.num_layers * count(block_parameters(m, 0), multiplying_only) +
         count(head_parameters(m), multiplying_only);
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
  check_positive(m, "rope_theta", m.rope_theta);
  check_positive(m, "init_std", m.init_std);
  if (m.num_heads % m.num_kv_heads != 0) {
    refuse("model {}: num_kv_heads = {} does not divide num_heads = {}; give a divisor of {}", m.name,
           m.num_kv_heads, m.num_heads, m.num_heads);
  }
  if (m.family == Family::gpt2) {
    if (m.num_kv_heads != m.num_heads) {
      refuse(
          "model {}: num_kv_heads = {} is not legal for the gpt2 family, whose heads all have their own keys "
          "and "
          "values; give {}",
          m.name, m.num_kv_heads, m.num_heads);
    }
    if (m.attention_width() != m.hidden) {
      refuse("model {}: num_heads x head_dim = {} x {} = {}; the gpt2 family needs hidden = {}", m.name,
             m.num_heads, m.head_dim, m.attention_width(), m.hidden);
    }
  } else if (m.head_dim % 2 != 0) {
    refuse("model {}: head_dim = {} is odd; rotary positions turn pairs of channels, so give an even number",
           m.name, m.head_dim);
  }
  const auto real = [](std::int64_t size) { return static_cast<double>(size); };
  const double block = real(m.hidden) * (4 * real(m.attention_width()) + 3 * real(m.mlp_hidden));
  const double total = real(m.num_layers) * block + 2 * real(m.hidden) * (real(m.vocab) + real(m.max_seq));
  if (total > largest_num_parameters) {
    refuse("model {}: its sizes make some {:.1e} parameters; at most {:.0e} can be counted", m.name, total,
           largest_num_parameters);
  }
}

std::vector<ParamSpec> embedding_parameters(const ModelSpec& m) {
  const bool gpt2 = m.family == Family::gpt2;
  std::vector<ParamSpec> list;
  list.push_back(matrix(gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight", m.vocab, m.hidden, 0,
                        {{m.vocab, 1}}, m.init_std));
  list.back().multiplies = m.tied_embedding;  // as the output matrix; the lookup is no product
  if (gpt2) {
    list.push_back(matrix("transformer.wpe.weight", m.max_seq, m.hidden, -1, {}, m.init_std));
    list.back().multiplies = false;
    list.back().rows_are_sequence_sharded = true;
  }
  return list;
}

std::vector<ParamSpec> block_parameters(const ModelSpec& m, std::int64_t layer) {
  if (m.family == Family::gpt2) return gpt2_block(m, fmt::format("transformer.h.{}.", layer));
  return llama_block(m, fmt::format("model.layers.{}.", layer));
}

std::vector<ParamSpec> head_parameters(const ModelSpec& m) {
  std::vector<ParamSpec> list;
  if (m.family == Family::gpt2) {
    add_layer_norm(list, "transformer.ln_f", m.hidden);
  } else {
    list.push_back(norm("model.norm.weight", m.hidden, Init::ones));
  }
  if (!m.tied_embedding) {
    list.push_back(matrix("lm_head.weight", m.vocab, m.hidden, 0, {{m.vocab, 1}}, m.init_std));
  }
  return list;
}

std::vector<ParamSpec> all_parameters(const ModelSpec& m) {
  std::vector<ParamSpec> list = embedding_parameters(m);
  const auto append = [&list](std::vector<ParamSpec> part) {
    for (ParamSpec& p : part) list.push_back(std::move(p));
  };
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer) append(block_parameters(m, layer));
  append(head_parameters(m));
  return list;
}

std::int64_t num_parameters(const ModelSpec& m) { return count_all(m, false); }

std::int64_t num_multiplying_parameters(const ModelSpec& m) { return count_all(m, true); }

double model_flops_per_token(const ModelSpec& m, std::int64_t seq_len) {
  const double attention = 12.0 * static_cast<double>(m.num_layers) *
                           static_cast<double>(m.attention_width()) * static_cast<double>(seq_len) / 2.0;
  return 6.0 * static_cast<double>(num_multiplying_parameters(m)) + attention;
}

}  // namespace echelon
