#include "parallel/context_parallel.h"

#include <span>
#include <utility>

#include "parallel/context_parallel_allgather.h"
#include "parallel/context_parallel_ring.h"
#include "parallel/context_parallel_ulysses.h"

namespace echelon {

ContextParallel::ContextParallel(const Rank& rank, const Plan& plan, const Heads& heads)
    : rank_(&rank),
      layout_(plan),
      gathers_(plan.context_kind == ContextKind::allgather),
      heads_(heads),
      here_(exchanges_heads() ? heads.part(neighbours().rank(), layout_.ulysses()) : heads),
      is_whole_(plan.numerics == Numerics::invariant && layout_.ring() > 1) {
  if (is_whole_ && gathers_) whole_rows_.emplace(rank, plan);
}

Tensor ContextParallel::enter(const Sequences& sequences, Tensor qkv) const {
  if (!exchanges_heads()) return qkv;
  return UlyssesExchange(*rank_, neighbours(), layout_, heads_, sequences.batch).to_heads(qkv);
}

void ContextParallel::forward(const Sequences& sequences, const Tensor& core, const Tensor& sinks,
                              const Tensor& out, const Tensor& lse) const {
  if (!exchanges_heads()) return core_forward(sequences, core, sinks, out, lse);
  const Tensor core_out = rank_->activation({core.rows(), here_.width()});
  core_forward(sequences, core, sinks, core_out, lse);
  UlyssesExchange(*rank_, neighbours(), layout_, heads_, sequences.batch).output_to_tokens(core_out, out);
}

// If no heads are exchanged, the numbers are in the order of ContextBlocks.
Tensor ContextParallel::delta(const Sequences& sequences, const Tensor& out, const Tensor& dout) const {
  const Tensor delta = rank_->statistic({out.rows() * heads_.num_heads()});
  const auto runs = layout_.runs(layout_.ring_index(rank_->coordinate(Axis::cp)));
  if (exchanges_heads() || runs.size() == 1) {
    rank_->kernels().attention_delta(out, dout, heads_.shape(sequences.batch, layout_.tokens_here(), 0),
                                     delta);
    return delta;
  }
  std::int64_t begin = 0;
  for (std::int64_t b = 0; b < sequences.batch; ++b)
    for (const PositionRun& run : runs) {
      const std::int64_t end = begin + run.size;
      rank_->kernels().attention_delta(
          out.row_range(begin, end), dout.row_range(begin, end), heads_.shape(1, run.size, 0),
          delta.flat_range(begin * heads_.num_heads(), end * heads_.num_heads()));
      begin = end;
    }
  return delta;
}

void ContextParallel::backward(const Sequences& sequences, const Tensor& core, const Weight& sinks,
                               const SequenceSums& sums, Tensor dout, const Tensor& lse, Tensor delta,
                               const Tensor& dqkv) const {
  if (!exchanges_heads()) {
    add_sink_gradient(sequences, sinks, sums, lse, delta);
    return core_backward(sequences, core, dout, lse, delta, dqkv);
  }
  const UlyssesExchange exchange(*rank_, neighbours(), layout_, heads_, sequences.batch);
  dout = exchange.output_gradient_to_heads(dout);
  delta = exchange.delta_to_heads(delta);
  add_sink_gradient(sequences, sinks, sums, lse, delta);
  const Tensor dcore = rank_->activation({core.rows(), core.cols()});
  core_backward(sequences, core, std::exchange(dout, {}), lse, std::exchange(delta, {}), dcore);
  exchange.gradient_to_tokens(dcore, dqkv);
}

AttentionShape ContextParallel::whole_sequences(const Sequences& sequences, const Tensor& core) const {
  const std::int64_t seq_len = sequences.batch == 0 ? 0 : core.rows() / sequences.batch;
  AttentionShape shape = here_.shape(sequences.batch, seq_len, seq_len);
  shape.first_keys = sequences.first_positions;
  return shape;
}

Tensor ContextParallel::own_kv(const Tensor& core) const {
  const Tensor kv = rank_->activation({core.rows(), 2 * here_.kv_width()});
  rank_->kernels().copy(here_.kv(core), kv);
  return kv;
}

Tensor ContextParallel::heads_here(const Tensor& of_heads) const {
  if (!exchanges_heads()) return of_heads;
  const Range heads = range_here();
  return of_heads.flat_range(heads.begin, heads.end);
}

Range ContextParallel::range_here() const {
  if (!exchanges_heads()) return {0, here_.num_heads()};
  const std::int64_t begin = neighbours().rank() * here_.num_heads();
  return {begin, begin + here_.num_heads()};
}

WholeAttention ContextParallel::whole_attention(const Sequences& sequences) const {
  return {*rank_, ring(), whole_rows_ ? &*whole_rows_ : nullptr, layout_, here_, sequences};
}

template <class Visit>
void ContextParallel::each_run(Range sequences, const Visit& visit) const {
  const auto runs = layout_.runs(layout_.ring_index(rank_->coordinate(Axis::cp)));
  const std::int64_t tokens = layout_.core_tokens();
  if (runs.size() == 1)
    return visit(Range{sequences.begin * tokens, sequences.end * tokens},
                 here_.shape(sequences.size(), tokens, 0));
  for (std::int64_t b = sequences.begin, begin = b * tokens; b < sequences.end; ++b)
    for (const PositionRun& run : runs) {
      visit(Range{begin, begin + run.size}, here_.shape(1, run.size, 0));
      begin += run.size;
    }
}

// Sinks are included once all keys have been seen.
void ContextParallel::core_forward(const Sequences& sequences, const Tensor& core, const Tensor& sinks,
                                   const Tensor& out, const Tensor& lse) const {
  attend(sequences, core, out, lse);
  if (!sinks.defined()) return;
  each_run({0, sequences.batch}, [&, heads = here_.num_heads()](Range rows, const AttentionShape& shape) {
    rank_->kernels().attention_sink(heads_here(sinks), shape, out.row_range(rows.begin, rows.end),
                                    lse.flat_range(rows.begin * heads, rows.end * heads));
  });
}

// Each cp rank computes a part: for its queries, and for its heads if they are exchanged.
void ContextParallel::add_sink_gradient(const Sequences& sequences, const Weight& sinks,
                                        const SequenceSums& sums, const Tensor& lse,
                                        const Tensor& delta) const {
  if (!sinks.gradient.defined()) return;
  if (sums.by_sequence() && rank_->size(Axis::cp) > 1)
    return add_sink_gradient_of_heads(sequences, sinks, sums, lse, delta);
  const Weight* const one[] = {&sinks};
  sums.add(one, [&](Range rows, std::span<const Tensor> gradients, bool onto) {
    if (!onto) rank_->kernels().fill(gradients[0], 0.0);
    const std::int64_t tokens = layout_.tokens_here(), heads = here_.num_heads();
    each_run({rows.begin / tokens, rows.end / tokens}, [&](Range run, const AttentionShape& shape) {
      rank_->kernels().attention_sink_backward(
          heads_here(sinks.value), lse.flat_range(run.begin * heads, run.end * heads),
          delta.flat_range(run.begin * heads, run.end * heads), shape, heads_here(gradients[0]));
    });
  });
}

// Sequence by sequence, over all queries, for the heads on this rank; if several ranks have the same heads,
// each takes a part of these.
void ContextParallel::add_sink_gradient_of_heads(const Sequences& sequences, const Weight& sinks,
                                                 const SequenceSums& sums, const Tensor& lse,
                                                 const Tensor& delta) const {
  const std::int64_t held = here_.num_heads(), first = range_here().begin;
  const Range among_here = split_range(held, layout_.ring(), layout_.ring_index(rank_->coordinate(Axis::cp)));
  const Range mine{first + among_here.begin, first + among_here.end};
  Tensor all_lse = lse, all_delta = delta;
  if (is_whole_) {
    const WholeAttention whole = whole_attention(sequences);
    all_lse = whole.whole_numbers(lse).flat();
    all_delta = whole.whole_numbers(delta).flat();
  }
  fill_others(rank_->kernels(), sinks, 0, mine);
  if (mine.size() == 0) return;
  const Weight own = part_of(sinks, 0, mine);
  const Weight* const one[] = {&own};
  const Heads heads(mine.size(), mine.size(), here_.head_dim());
  sums.add(one, [&](Range rows, std::span<const Tensor> gradients, bool onto) {
    if (!onto) rank_->kernels().fill(gradients[0], 0.0);
    const std::int64_t tokens = rows.size(), sequence = rows.begin / tokens,
                       begin = (sequence * held + among_here.begin) * tokens,
                       end = begin + mine.size() * tokens;
    rank_->kernels().attention_sink_backward(own.value, all_lse.flat_range(begin, end),
                                             all_delta.flat_range(begin, end), heads.shape(1, tokens, 0),
                                             gradients[0]);
  });
}

void ContextParallel::attend(const Sequences& sequences, const Tensor& core, const Tensor& out,
                             const Tensor& lse) const {
  if (layout_.ring() == 1)
    return rank_->kernels().attention(here_.q(core), here_.k(core), here_.v(core),
                                      whole_sequences(sequences, core), out, lse);
  if (is_whole_) return whole_attention(sequences).forward(core, out, lse);
  const ContextBlocks blocks(*rank_, layout_, here_, sequences);
  const auto forward = gathers_ ? gathered_attention_forward : ring_attention_forward;
  forward(blocks, ring(), here_.q(core), own_kv(core), out, lse);
}

void ContextParallel::core_backward(const Sequences& sequences, const Tensor& core, const Tensor& dout,
                                    const Tensor& lse, const Tensor& delta, const Tensor& dcore) const {
  if (layout_.ring() == 1)
    return rank_->kernels().attention_backward(here_.q(core), here_.k(core), here_.v(core), dout, lse, delta,
                                               whole_sequences(sequences, core), here_.q(dcore),
                                               here_.k(dcore), here_.v(dcore));
  if (is_whole_) return whole_attention(sequences).backward(core, dout, lse, delta, dcore);
  const ContextBlocks blocks(*rank_, layout_, here_, sequences);
  const auto attend = gathers_ ? gathered_attention_backward : ring_attention_backward;
  attend(blocks, ring(), here_.q(core), own_kv(core), dout, lse, delta, here_.q(dcore), here_.kv(dcore));
}

}  // namespace echelon
