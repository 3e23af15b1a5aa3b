#include "parallel/context_parallel_whole.h"

#include <vector>

namespace echelon {

WholeAttention::WholeAttention(const Rank& rank, const WholeRows& rows, const ContextLayout& layout,
                               const Heads& heads, const Sequences& sequences)
    : rank_(rank), rows_(rows), layout_(layout), heads_(heads), sequences_(sequences) {}

template <class Visit>
void WholeAttention::each_run(int cp_rank, const Visit& visit) const {
  std::int64_t begin = 0;
  const std::vector<PositionRun> runs = layout_.runs(layout_.ring_index(cp_rank));
  for (std::int64_t b = 0; b < sequences_.batch; ++b)
    for (const PositionRun& run : runs) {
      visit(b, run, Range{begin, begin + run.size});
      begin += run.size;
    }
}

AttentionShape WholeAttention::shape_of(const PositionRun& run, Range rows) const {
  AttentionShape shape = heads_.shape(1, run.size, seq_len());
  shape.q_offset = run.begin;
  if (sequences_.first_positions.defined())
    shape.first_keys = sequences_.first_positions.flat_range(rows.begin, rows.end);
  return shape;
}

void WholeAttention::forward(const Tensor& qkv, const Tensor& out, const Tensor& lse) const {
  const Doing doing = rank_.doing(Activity::attention_forward);
  const std::int64_t heads = heads_.num_heads(), width = heads_.kv_width();
  const Tensor kv = rows_.gather(heads_.kv(qkv), all_rows(), true), q = heads_.q(qkv);
  each_run(rank_.coordinate(Axis::cp), [&](std::int64_t b, const PositionRun& run, Range rows) {
    const Tensor seen = of_sequence(kv, b);
    rank_.kernels().attention(q.row_range(rows.begin, rows.end), seen.column_range(0, width),
                              seen.column_range(width, 2 * width), shape_of(run, rows),
                              out.row_range(rows.begin, rows.end),
                              lse.flat_range(rows.begin * heads, rows.end * heads));
  });
}

Tensor WholeAttention::whole_numbers(const Tensor& here) const {
  const std::int64_t heads = heads_.num_heads(), of_rank = here.numel();
  Communicator& group = rank_.along(Axis::cp);
  const Tensor all = rank_.statistic({group.size() * of_rank}),
               whole = rank_.statistic({sequences_.batch * heads, seq_len()});
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(group.size()), of_rank);
  group.all_gather(here, all, counts).wait();
  for (int r = 0; r < group.size(); ++r)
    each_run(r, [&](std::int64_t b, const PositionRun& run, Range rows) {
      const std::int64_t first = r * of_rank;
      rank_.kernels().copy(
          all.flat_range(first + rows.begin * heads, first + rows.end * heads).reshape({heads, run.size}),
          whole.row_range(b * heads, (b + 1) * heads).column_range(run.begin, run.begin + run.size));
    });
  return whole;
}

void WholeAttention::backward(const Tensor& qkv, const Tensor& dout, const Tensor& lse, const Tensor& delta,
                              const Tensor& dqkv) const {
  const Doing doing = rank_.doing(Activity::attention_backward);
  Kernels& kernels = rank_.kernels();
  const std::int64_t heads = heads_.num_heads(), width = heads_.kv_width();
  const int here = rank_.coordinate(Axis::cp);
  const auto columns = [](const Tensor& x, Range range) { return x.column_range(range.begin, range.end); };
  const Range k{0, width}, v{width, 2 * width};
  {
    const Tensor kv = rows_.gather(heads_.kv(qkv), all_rows(), true),
                 unused = rank_.activation({seq_len(), 2 * width});
    each_run(here, [&](std::int64_t b, const PositionRun& run, Range rows) {
      const auto numbers = [&](const Tensor& x) {
        return x.flat_range(rows.begin * heads, rows.end * heads);
      };
      const Tensor seen = of_sequence(kv, b);
      kernels.attention_backward(
          heads_.q(qkv).row_range(rows.begin, rows.end), columns(seen, k), columns(seen, v),
          dout.row_range(rows.begin, rows.end), numbers(lse), numbers(delta), shape_of(run, rows),
          heads_.q(dqkv).row_range(rows.begin, rows.end), columns(unused, k), columns(unused, v));
    });
  }
  const Tensor all_q = rows_.gather(heads_.q(qkv), all_rows(), true),
               all_dout = rows_.gather(dout, all_rows(), true), all_lse = whole_numbers(lse),
               all_delta = whole_numbers(delta), unused = rank_.activation({seq_len(), heads_.width()});
  Tensor starts;
  if (sequences_.first_positions.defined())
    starts = rows_.gather(sequences_.first_positions, all_rows(), true);
  each_run(here, [&](std::int64_t b, const PositionRun& run, Range rows) {
    AttentionShape shape = heads_.shape(1, seq_len(), run.size);
    shape.q_offset = -run.begin;
    if (starts.defined()) {
      shape.first_keys = Tensor(rank_.arena(), MemoryCategory::activations, DType::i32, {seq_len()});
      kernels.first_keys(starts.flat_range(b * seq_len(), (b + 1) * seq_len()), run.begin, 1, run.size,
                         shape.first_keys);
    }
    const auto numbers = [&](const Tensor& x) { return x.row_range(b * heads, (b + 1) * heads).flat(); };
    const Tensor own = heads_.kv(qkv).row_range(rows.begin, rows.end),
                 gradient = heads_.kv(dqkv).row_range(rows.begin, rows.end);
    kernels.attention_backward(of_sequence(all_q, b), columns(own, k), columns(own, v),
                               of_sequence(all_dout, b), numbers(all_lse), numbers(all_delta), shape, unused,
                               columns(gradient, k), columns(gradient, v));
  });
}

}  // namespace echelon
