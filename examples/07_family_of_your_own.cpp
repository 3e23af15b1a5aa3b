// A family of one's own: its layer as data, from which parameters, what is kept and what is made again
// follow.
#include <fmt/core.h>

#include "spec/block_builder.h"
#include "spec/block_passes.h"
#include "spec/families.h"

using namespace echelon;

namespace {

// A Llama whose layer is attention alone.
BlockProgram attention_only(const ModelSpec& m, std::int64_t layer) {
  const std::int64_t C = m.hidden, D = m.head_dim, H = m.num_heads * D, K = m.num_kv_heads * D;
  const std::string at = fmt::format("model.layers.{}.", layer);
  const auto projection = [&](const char* name, std::int64_t rows) {
    return cut_rows(at + "self_attn." + name + "_proj.weight", rows, C, D, m.init_std);
  };
  BlockBuilder b(m);
  const int x = b.input("x");
  int y = b.rms_norm("norm", x, at + "input_layernorm.weight");
  y = b.columns("attention_in", y, {projection("q", H), projection("k", K), projection("v", K)});
  y = b.attention(b.rope(y));
  y = b.rows("attention_out", y, cut_columns(at + "self_attn.o_proj.weight", C, H, D, m.init_std));
  return b.finish(b.residual("residual", x, y));
}

}  // namespace

int main() {
  const ModelSpec model = load_model("llama-tiny");
  const BlockProgram mine = attention_only(model, 0), whole = layer_program(model, 0);
  std::int64_t parameters = 0;
  for (const ParamSpec& p : mine.parameters()) parameters += p.numel();
  const std::int64_t C = model.hidden, D = model.head_dim;
  const std::int64_t expected = C + 2 * C * D * (model.num_heads + model.num_kv_heads);
  fmt::print("{} parameters in {} ops, of {} in a Llama's layer\n", parameters, mine.ops.size(), whole.ops.size());
  if (parameters != expected) return 1;

  // What there is between the passes: where everything is made again, the block's input and its output alone.
  const auto kept = [&](const Recompute& recompute) {
    const BlockPasses passes = block_passes(mine, recompute);
    int values = 0;
    for (const bool keeps : passes.forward.keeps) values += keeps;
    return values;
  };
  const int all = kept(Recompute::none), none = kept(Recompute::full);
  fmt::print("{} values kept, {} where all is made again\n", all, none);
  return none < all ? 0 : 1;
}
