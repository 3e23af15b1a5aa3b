// Models and meshes from a published row's columns.
#pragma once

#include <string>

#include "published/csv.h"
#include "published/tables.h"

namespace echelon::published {

// For models whose positions are not learned.
inline constexpr std::int64_t longest = std::int64_t{1} << 24;

ModelSpec gpt(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t ffn,
              std::int64_t vocab, std::int64_t seq_len);
ModelSpec llama(std::string name, std::int64_t layers, std::int64_t hidden, std::int64_t heads,
                std::int64_t kv, std::int64_t head_dim, std::int64_t ffn, std::int64_t vocab,
                bool tied = false);
// With experts in the layers behind the dense ones.
ModelSpec mixture(ModelSpec m, std::int64_t experts, std::int64_t per_token, std::int64_t hidden,
                  std::int64_t shared = 0, std::int64_t dense_layers = 0);
// From the columns layers, hidden, ffn_hidden, vocab, seq_len.
ModelSpec gpt_of(const CsvRow& r, const char* heads = "attention_heads");

// dp, tp and pp, with layers split evenly.
Plan mesh(const CsvRow& r);

// Every `every`-th row is one to fit on.
void mark(Table& table, std::size_t every);

}  // namespace echelon::published
