// GPT-2: learned positions, LayerNorm, an activation without a gate, biases, one matrix for queries, keys and
// values, weights stored (in, out).
#include <fmt/core.h>

#include "spec/block_builder.h"
#include "spec/families.h"

namespace echelon {

static ParamSpec gpt2_table(const ModelSpec& m) { return embedding_table("transformer.wte.weight", m); }

BlockProgram Gpt2::embedding(const ModelSpec& m) {
  BlockBuilder b(m);
  const int x = b.embedding(gpt2_table(m));
  return b.finish(b.positions(x, whole_matrix("transformer.wpe.weight", m.max_seq, m.hidden, m.init_std)));
}

BlockProgram Gpt2::layer(const ModelSpec& m, std::int64_t layer) {
  const std::int64_t C = m.hidden, F = m.mlp_hidden, D = m.head_dim;
  const std::vector<Piece> qkv{{C, D}, {C, D}, {C, D}};
  const std::string at = fmt::format("transformer.h.{}.", layer);
  BlockBuilder b(m);
  const int x = b.input("x");
  int y = b.layer_norm("norm1", x, at + "ln_1");
  y = b.columns("attention_in", y, {matrix(at + "attn.c_attn.weight", C, 3 * C, 1, qkv, m.init_std)},
                {cut_bias(at + "attn.c_attn.bias", 3 * C, qkv)});
  y = b.attention(y);
  y = b.rows("attention_out", y, matrix(at + "attn.c_proj.weight", C, C, 0, {{C, D}}, residual_std(m)));
  const int middle = b.residual("residual1", x, y, {whole_bias(at + "attn.c_proj.bias", C)});
  y = b.layer_norm("norm2", middle, at + "ln_2");
  y = b.columns("mlp_in", y, {matrix(at + "mlp.c_fc.weight", C, F, 1, {{F, 1}}, m.init_std)},
                {cut_bias(at + "mlp.c_fc.bias", F, {{F, 1}})});
  y = b.activation(y, m.activation);
  y = b.rows("mlp_out", y, matrix(at + "mlp.c_proj.weight", F, C, 0, {{F, 1}}, residual_std(m)));
  return b.finish(b.residual("residual2", middle, y, {whole_bias(at + "mlp.c_proj.bias", C)}));
}

BlockProgram Gpt2::head(const ModelSpec& m) {
  BlockBuilder b(m);
  const int y = b.layer_norm("norm", b.input("x"), "transformer.ln_f");
  return b.finish(b.loss(y, gpt2_table(m)));
}

}  // namespace echelon
