#include "parallel/context_blocks.h"

#include <algorithm>

namespace echelon {

ContextBlocks::ContextBlocks(const Rank& rank, const ContextLayout& layout, const Heads& heads,
                             const Sequences& sequences)
    : rank_(rank),
      layout_(layout),
      heads_(heads),
      sequences_(sequences),
      own_(layout.ring_index(rank.coordinate(Axis::cp))) {}

Tensor ContextBlocks::make_kv() const {
  return rank_.activation({sequences_.batch * layout_.core_tokens(), 2 * heads_.kv_width()});
}

std::vector<ContextBlocks::Part> ContextBlocks::parts_of(int ring_index) const {
  std::vector<Part> parts;
  for (std::int64_t b = 0; b < sequences_.batch; ++b) {
    std::int64_t begin = b * layout_.core_tokens();
    for (const PositionRun& run : layout_.runs(ring_index)) {
      parts.push_back({run, {begin, begin + run.size}});
      begin += run.size;
    }
  }
  return parts;
}

// The first key that a query sees, among the keys of a run.
Tensor ContextBlocks::first_keys(const Part& queries, const Part& keys) const {
  if (!sequences_.first_positions.defined()) return {};
  const Tensor first(rank_.arena(), MemoryCategory::activations, DType::i32, {queries.run.size});
  rank_.kernels().first_keys(
      sequences_.first_positions.flat_range(queries.rows.begin, queries.rows.begin + queries.run.size),
      keys.run.begin, keys.run.stride, keys.run.size, first);
  return first;
}

template <class Body>
void ContextBlocks::each_pair(int source, const Body& body) const {
  const std::vector<Part> queries = parts_of(own_), keys = parts_of(source);
  const std::vector<ContextLayout::RunPair> pairs = layout_.pairs(own_, source);
  const std::size_t runs = layout_.runs(own_).size();
  for (std::size_t first = 0; first < queries.size(); first += runs)  // of a sequence
    for (const ContextLayout::RunPair& pair : pairs) {
      const Part &query = queries[first + pair.queries], &key = keys[first + pair.keys];
      AttentionShape shape = heads_.shape(1, query.run.size, key.run.size);
      shape.q_offset = pair.offset;
      if (shape.alibi.is_used()) {  // counts the positions between, where a mask only compares
        shape.q_offset = query.run.begin - key.run.begin;
        shape.q_step = query.run.stride;
        shape.k_step = key.run.stride;
      }
      shape.first_keys = first_keys(query, key);
      shape.accumulate = source != own_ || pair.keys > 0;
      body(query.rows, key.rows, shape);
    }
}

void ContextBlocks::forward(const Tensor& q, const Tensor& kv, int source, const Tensor& out,
                            const Tensor& lse) const {
  const std::int64_t heads = heads_.num_heads(), kv_width = heads_.kv_width();
  const Doing doing = rank_.doing(Activity::attention_forward, source);
  each_pair(source, [&](const Range& queries, const Range& keys, const AttentionShape& shape) {
    const Tensor block = kv.row_range(keys.begin, keys.end);
    rank_.kernels().attention(q.row_range(queries.begin, queries.end), block.column_range(0, kv_width),
                              block.column_range(kv_width, 2 * kv_width), shape,
                              out.row_range(queries.begin, queries.end),
                              lse.flat_range(queries.begin * heads, queries.end * heads));
  });
}

void ContextBlocks::backward(const Tensor& q, const Tensor& kv, int source, const Tensor& dout,
                             const Tensor& lse, const Tensor& delta, const Tensor& dq,
                             const Tensor& dkv) const {
  const std::int64_t heads = heads_.num_heads(), kv_width = heads_.kv_width();
  const Doing doing = rank_.doing(Activity::attention_backward, source);
  each_pair(source, [&](const Range& queries, const Range& keys, AttentionShape shape) {
    shape.accumulate = true;
    const Tensor block = kv.row_range(keys.begin, keys.end), gradient = dkv.row_range(keys.begin, keys.end);
    rank_.kernels().attention_backward(
        q.row_range(queries.begin, queries.end), block.column_range(0, kv_width),
        block.column_range(kv_width, 2 * kv_width), dout.row_range(queries.begin, queries.end),
        lse.flat_range(queries.begin * heads, queries.end * heads),
        delta.flat_range(queries.begin * heads, queries.end * heads), shape,
        dq.row_range(queries.begin, queries.end), gradient.column_range(0, kv_width),
        gradient.column_range(kv_width, 2 * kv_width));
  });
}

}  // namespace echelon
