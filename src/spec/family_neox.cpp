// GPT-NeoX (Black et al. 2022, https://arxiv.org/abs/2204.06745) and Pythia: rotary positions of a part of
// each head, LayerNorm, an activation without a gate, biases, weights stored (out, in); attention and MLP one
// after the other, or both of the same input. Files have queries, keys and values as one matrix, head by head
// (checkpoint/hugging_face_tensors.cpp).
#include <fmt/core.h>

#include "spec/block_builder.h"
#include "spec/families.h"

namespace echelon {

static ParamSpec neox_table(const ModelSpec& m) { return embedding_table("gpt_neox.embed_in.weight", m); }

BlockProgram Neox::embedding(const ModelSpec& m) {
  BlockBuilder b(m);
  return b.finish(b.embedding(neox_table(m)));
}

BlockProgram Neox::layer(const ModelSpec& m, std::int64_t layer) {
  const std::int64_t C = m.hidden, F = m.mlp_hidden, D = m.head_dim;
  const std::string at = fmt::format("gpt_neox.layers.{}.", layer);
  const auto projection = [&](const char* name) {
    return cut_rows(at + "attention." + name + "_proj.weight", C, C, D, m.init_std);
  };
  const auto bias = [&](const char* name) {
    return cut_bias(at + "attention." + name + "_proj.bias", C, {{C, D}});
  };
  BlockBuilder b(m);
  const int x = b.input("x");
  int attention = b.layer_norm("norm1", x, at + "input_layernorm"), mlp = x;
  // Ahead of attention: a norm's gradient is added to what the products of both branches have read by then.
  if (m.parallel_residual) mlp = b.layer_norm("norm2", x, at + "post_attention_layernorm");
  attention = b.columns("attention_in", attention, {projection("q"), projection("k"), projection("v")},
                        {bias("q"), bias("k"), bias("v")});
  attention = b.attention(b.rope(attention));
  attention = b.rows("attention_out", attention,
                     cut_columns(at + "attention.dense.weight", C, C, D, residual_std(m)));
  const auto add_attention = [&] {
    return b.residual("residual1", x, attention, {whole_bias(at + "attention.dense.bias", C)});
  };
  int middle = -1;
  if (!m.parallel_residual) {
    middle = add_attention();
    mlp = b.layer_norm("norm2", middle, at + "post_attention_layernorm");
  }
  mlp = b.columns("mlp_in", mlp, {cut_rows(at + "mlp.dense_h_to_4h.weight", F, C, 1, m.init_std)},
                  {cut_bias(at + "mlp.dense_h_to_4h.bias", F, {{F, 1}})});
  mlp = b.activation(mlp, m.activation);
  mlp = b.rows("mlp_out", mlp, cut_columns(at + "mlp.dense_4h_to_h.weight", C, F, 1, residual_std(m)));
  if (m.parallel_residual) middle = add_attention();
  return b.finish(b.residual("residual2", middle, mlp, {whole_bias(at + "mlp.dense_4h_to_h.bias", C)}));
}

BlockProgram Neox::head(const ModelSpec& m) {
  BlockBuilder b(m);
  const int y = b.layer_norm("norm", b.input("x"), "gpt_neox.final_layer_norm");
  return b.finish(b.loss(y, neox_table(m), "embed_out.weight"));
}

}  // namespace echelon
