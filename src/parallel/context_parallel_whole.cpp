#include "parallel/context_parallel_whole.h"

#include <algorithm>
#include <vector>

#include "parallel/ring_travel.h"
#include "tensor/host.h"

namespace echelon {

WholeAttention::WholeAttention(const Rank& rank, Communicator& ring, const WholeRows* rows,
                               const ContextLayout& layout, const Heads& heads, const Sequences& sequences)
    : rank_(rank),
      ring_(ring),
      rows_(rows),
      layout_(layout),
      heads_(heads),
      sequences_(sequences),
      own_(layout.ring_index(rank.coordinate(Axis::cp))) {}

template <class Visit>
void WholeAttention::each_run(int ring_index, const Visit& visit) const {
  std::int64_t begin = 0;
  const std::vector<PositionRun> runs = layout_.runs(ring_index);
  for (std::int64_t b = 0; b < sequences_.batch; ++b)
    for (const PositionRun& run : runs) {
      visit(b, run, Range{begin, begin + run.size});
      begin += run.size;
    }
}

template <class Visit>
void WholeAttention::each_run_of(Range steps, const Visit& visit) const {
  const auto last_step = [&](const PositionRun& queries) {
    int last = 0;
    for (int r = 0; r < layout_.ring(); ++r)
      for (const PositionRun& keys : layout_.runs(r))
        if (keys.begin < queries.end()) last = std::max(last, around(own_ - r, layout_.ring()));
    return last;
  };
  each_run(own_, [&](std::int64_t b, const PositionRun& run, Range rows) {
    if (const int step = last_step(run); step >= steps.begin && step < steps.end) visit(b, run, rows);
  });
}

template <class Take, class Meanwhile>
void WholeAttention::travel(const Tensor& x, bool are_keys, const Take& take,
                            const Meanwhile& meanwhile) const {
  Tensor packed = x;
  if (!x.contiguous()) {
    packed = rank_.activation({x.rows(), x.cols()});
    rank_.kernels().copy(x, packed);
  }
  RingTravel part(rank_, ring_, std::move(packed), are_keys);
  for (int step = 0; step < ring_.size(); ++step) {
    const bool goes_on = step + 1 < ring_.size();
    if (goes_on) part.start();
    take(part.source(step), part.here());
    meanwhile(step);
    if (goes_on) part.finish();
  }
}

void WholeAttention::put_rows(int ring_index, const Tensor& x, const Tensor& whole) const {
  each_run(ring_index, [&](std::int64_t b, const PositionRun& run, Range rows) {
    rank_.kernels().copy(x.row_range(rows.begin, rows.end), rows_at(of_sequence(whole, b), run));
  });
}

void WholeAttention::put_numbers(int ring_index, const Tensor& x, const Tensor& whole) const {
  const std::int64_t heads = heads_.num_heads();
  each_run(ring_index, [&](std::int64_t b, const PositionRun& run, Range rows) {
    const Tensor from = x.flat_range(rows.begin * heads, rows.end * heads),
                 all = whole.row_range(b * heads, (b + 1) * heads);
    if (run.stride == 1)
      return rank_.kernels().copy(from.reshape({heads, run.size}), all.column_range(run.begin, run.end()));
    // One of every `stride` numbers, whichever head's.
    rank_.kernels().copy(from.reshape({heads * run.size, 1}),
                         all.reshape({heads * run.size, run.stride}).column_range(run.begin, run.begin + 1));
  });
}

template <class Use>
void WholeAttention::with_keys(const Tensor& qkv, const Use& use) const {
  const Tensor here = heads_.kv(qkv);
  if (rows_ != nullptr) return use(rows_->gather(here, all_rows(), true), Range{0, ring_.size()});
  const Tensor whole = rank_.activation({all_rows(), here.cols()});
  travel(
      here, true, [&](int ring_index, const Tensor& kv) { put_rows(ring_index, kv, whole); },
      [&](int step) {
        use(whole, Range{step, step + 1});
      });
}

Tensor WholeAttention::whole_rows(const Tensor& here) const {
  if (rows_ != nullptr) return rows_->gather(here, all_rows(), true);
  const Tensor whole = rank_.activation({all_rows(), here.cols()});
  travel(
      here, false, [&](int ring_index, const Tensor& x) { put_rows(ring_index, x, whole); }, [](int) {});
  return whole;
}

Tensor WholeAttention::whole_positions(const Tensor& here) const {
  if (rows_ != nullptr) return rows_->gather(here, all_rows(), true);
  std::vector<std::int32_t> in_order(static_cast<std::size_t>(all_rows()));
  const auto take = [&](int ring_index, const Tensor& x) {
    const std::vector<std::int32_t> from = copy_to_host<std::int32_t>(x, 0);
    each_run(ring_index, [&](std::int64_t b, const PositionRun& run, Range rows) {
      for (std::int64_t i = 0; i < run.size; ++i)
        in_order[static_cast<std::size_t>(b * seq_len() + run.at(i))] =
            from[static_cast<std::size_t>(rows.begin + i)];
    });
  };
  travel(here, false, take, [](int) {});
  const Tensor whole(rank_.arena(), MemoryCategory::activations, DType::i32, {all_rows()});
  copy_from_host(in_order, whole);
  return whole;
}

Tensor WholeAttention::whole_numbers(const Tensor& here) const {
  const Tensor whole = rank_.statistic({sequences_.batch * heads_.num_heads(), seq_len()});
  const auto take = [&](int ring_index, const Tensor& x) { put_numbers(ring_index, x, whole); };
  if (rows_ == nullptr) {
    travel(here, false, take, [](int) {});
    return whole;
  }
  const std::int64_t of_rank = here.numel();
  const Tensor all = rank_.statistic({ring_.size() * of_rank});
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(ring_.size()), of_rank);
  rank_.along(Axis::cp).all_gather(here, all, counts).wait();
  for (int r = 0; r < ring_.size(); ++r) take(r, all.flat_range(r * of_rank, (r + 1) * of_rank));
  return whole;
}

// Not all keys may be there when some are read, and those behind the last query's never are.
AttentionShape WholeAttention::shape_of(const PositionRun& run, Range rows) const {
  AttentionShape shape = heads_.shape(1, run.size, run.end());
  shape.q_offset = run.begin;
  shape.q_step = run.stride;
  if (sequences_.first_positions.defined())
    shape.first_keys = sequences_.first_positions.flat_range(rows.begin, rows.end);
  return shape;
}

void WholeAttention::forward(const Tensor& qkv, const Tensor& out, const Tensor& lse) const {
  const std::int64_t heads = heads_.num_heads(), width = heads_.kv_width();
  const Tensor q = heads_.q(qkv);
  with_keys(qkv, [&](const Tensor& kv, Range steps) {
    const Doing doing = rank_.doing(Activity::attention_forward);
    each_run_of(steps, [&](std::int64_t b, const PositionRun& run, Range rows) {
      const Tensor seen = of_sequence(kv, b).row_range(0, run.end());
      rank_.kernels().attention(q.row_range(rows.begin, rows.end), seen.column_range(0, width),
                                seen.column_range(width, 2 * width), shape_of(run, rows),
                                out.row_range(rows.begin, rows.end),
                                lse.flat_range(rows.begin * heads, rows.end * heads));
    });
  });
}

void WholeAttention::backward(const Tensor& qkv, const Tensor& dout, const Tensor& lse, const Tensor& delta,
                              const Tensor& dqkv) const {
  Kernels& kernels = rank_.kernels();
  const std::int64_t heads = heads_.num_heads(), width = heads_.kv_width();
  const auto columns = [](const Tensor& x, Range range) { return x.column_range(range.begin, range.end); };
  const Range k{0, width}, v{width, 2 * width};
  const Tensor not_wanted;
  with_keys(qkv, [&](const Tensor& kv, Range steps) {
    const Doing doing = rank_.doing(Activity::attention_backward);
    each_run_of(steps, [&](std::int64_t b, const PositionRun& run, Range rows) {
      const auto numbers = [&](const Tensor& x) {
        return x.flat_range(rows.begin * heads, rows.end * heads);
      };
      const Tensor seen = of_sequence(kv, b).row_range(0, run.end());
      kernels.attention_backward(heads_.q(qkv).row_range(rows.begin, rows.end), columns(seen, k),
                                 columns(seen, v), dout.row_range(rows.begin, rows.end), numbers(lse),
                                 numbers(delta), shape_of(run, rows),
                                 heads_.q(dqkv).row_range(rows.begin, rows.end), not_wanted, not_wanted);
    });
  });
  const Tensor all_q = whole_rows(heads_.q(qkv)), all_dout = whole_rows(dout), all_lse = whole_numbers(lse),
               all_delta = whole_numbers(delta);
  Tensor starts;
  if (sequences_.first_positions.defined()) starts = whole_positions(sequences_.first_positions);
  const Doing doing = rank_.doing(Activity::attention_backward);
  each_run(own_, [&](std::int64_t b, const PositionRun& run, Range rows) {
    AttentionShape shape = heads_.shape(1, seq_len(), run.size);
    shape.q_offset = -run.begin;
    shape.k_step = run.stride;
    if (starts.defined()) {
      shape.first_keys = Tensor(rank_.arena(), MemoryCategory::activations, DType::i32, {seq_len()});
      kernels.first_keys(starts.flat_range(b * seq_len(), (b + 1) * seq_len()), run.begin, run.stride,
                         run.size, shape.first_keys);
    }
    const auto numbers = [&](const Tensor& x) { return x.row_range(b * heads, (b + 1) * heads).flat(); };
    const Tensor own = heads_.kv(qkv).row_range(rows.begin, rows.end),
                 gradient = heads_.kv(dqkv).row_range(rows.begin, rows.end);
    kernels.attention_backward(of_sequence(all_q, b), columns(own, k), columns(own, v),
                               of_sequence(all_dout, b), numbers(all_lse), numbers(all_delta), shape,
                               not_wanted, columns(gradient, k), columns(gradient, v));
  });
}

}  // namespace echelon
