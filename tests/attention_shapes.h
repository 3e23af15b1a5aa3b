// Shapes that attention on a CPU is tried with.
#pragma once

#include <cstdint>
#include <vector>

#include "tensor/kernels.h"

namespace echelon {

inline std::vector<AttentionShape> attention_shapes() {
  return {{.batch = 1, .q_len = 1, .kv_len = 1, .num_heads = 1, .num_kv_heads = 1, .head_dim = 7},
          {.batch = 2, .q_len = 70, .kv_len = 70, .num_heads = 4, .num_kv_heads = 2, .head_dim = 64},
          {.batch = 1, .q_len = 257, .kv_len = 257, .num_heads = 3, .num_kv_heads = 1, .head_dim = 20},
          {.batch = 1, .q_len = 600, .kv_len = 600, .num_heads = 2, .num_kv_heads = 1, .head_dim = 16},
          // a token after a cache, and a block of tokens after a cache that has more room
          {.batch = 3,
           .q_len = 1,
           .kv_len = 100,
           .num_heads = 2,
           .num_kv_heads = 2,
           .head_dim = 64,
           .q_offset = 99},
          {.batch = 2,
           .q_len = 33,
           .kv_len = 100,
           .num_heads = 4,
           .num_kv_heads = 2,
           .head_dim = 20,
           .q_offset = 67,
           .kv_batch_stride = 130},
          // a block of a ring: sees every key; keys that nobody sees; queries that see nothing
          {.batch = 1,
           .q_len = 130,
           .kv_len = 700,
           .num_heads = 2,
           .num_kv_heads = 2,
           .head_dim = 16,
           .q_offset = 900},
          {.batch = 2,
           .q_len = 40,
           .kv_len = 600,
           .num_heads = 2,
           .num_kv_heads = 2,
           .head_dim = 16,
           .q_offset = 5},
          {.batch = 1,
           .q_len = 300,
           .kv_len = 100,
           .num_heads = 1,
           .num_kv_heads = 1,
           .head_dim = 16,
           .q_offset = -140},
          // every third query, and every third key
          {.batch = 1,
           .q_len = 200,
           .kv_len = 600,
           .num_heads = 2,
           .num_kv_heads = 1,
           .head_dim = 16,
           .q_offset = 2,
           .q_step = 3},
          {.batch = 1,
           .q_len = 300,
           .kv_len = 100,
           .num_heads = 2,
           .num_kv_heads = 1,
           .head_dim = 16,
           .q_offset = -1,
           .k_step = 3}};
}

// Short documents, and some queries that see no key.
inline std::vector<std::int32_t> first_keys_of_documents(const AttentionShape& s) {
  std::vector<std::int32_t> first;
  for (std::int64_t t = 0; t < s.batch * s.q_len; ++t)
    first.push_back(
        static_cast<std::int32_t>(t % 11 == 0 ? s.kv_len : (t % s.q_len) / 7 * 5 % (s.kv_len + 1)));
  return first;
}

}  // namespace echelon
