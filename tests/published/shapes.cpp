#include "published/shapes.h"
#include "workloads.h"

#include <fmt/format.h>

#include <algorithm>

namespace echelon::published {

ModelSpec gpt(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t ffn,
              std::int64_t vocab, std::int64_t seq_len) {
  ModelSpec m;
  m.name = fmt::format("gpt {}x{}", layers, hidden);
  m.family = Family::gpt2;
  m.activation = usual_activation(m.family);
  m.num_layers = layers;
  m.hidden = hidden;
  m.num_heads = m.num_kv_heads = heads;
  m.head_dim = hidden / heads;
  m.mlp_hidden = ffn;
  m.vocab = vocab;
  m.max_seq = seq_len;
  m.tied_embedding = true;
  return m;
}

ModelSpec llama(std::string name, std::int64_t layers, std::int64_t hidden, std::int64_t heads,
                std::int64_t kv, std::int64_t head_dim, std::int64_t ffn, std::int64_t vocab, bool tied) {
  ModelSpec m;
  m.name = std::move(name);
  m.family = Family::llama;
  m.num_layers = layers;
  m.hidden = hidden;
  m.num_heads = heads;
  m.num_kv_heads = kv;
  m.head_dim = head_dim;
  m.mlp_hidden = ffn;
  m.vocab = vocab;
  m.max_seq = longest;
  m.tied_embedding = tied;
  return m;
}

ModelSpec mixture(ModelSpec m, std::int64_t experts, std::int64_t per_token, std::int64_t hidden,
                  std::int64_t shared, std::int64_t dense_layers) {
  m.experts = Experts::deepseek;
  m.num_experts = experts;
  m.experts_per_token = per_token;
  m.expert_hidden = hidden;
  m.num_shared_experts = shared;
  m.num_dense_layers = dense_layers;
  return m;
}

ModelSpec gpt_of(const CsvRow& r, const char* heads) {
  return gpt(whole(r, "layers"), whole(r, "hidden"), whole(r, heads), whole(r, "ffn_hidden"),
             whole(r, "vocab"), whole(r, "seq_len"));
}

Plan mesh(const CsvRow& r) {
  Plan c = checks::searched_plan();
  c.mesh.set(Axis::dp, std::max(1, whole(r, "DP")));
  c.mesh.set(Axis::tp, std::max(1, whole(r, "TP")));
  c.mesh.set(Axis::pp, std::max(1, whole(r, "PP")));
  c.balance_layers = false;
  return c;
}

// Every `every`-th row is one to fit on.
void mark(Table& table, std::size_t every) {
  for (std::size_t i = 0; i < table.points.size(); ++i) table.points[i].fitted = i % every == 0;
}

// Micro-batch and interleaving are not printed: those that the memory of the time holds, the fastest.

}  // namespace echelon::published
