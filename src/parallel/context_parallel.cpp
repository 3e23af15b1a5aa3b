#include "parallel/context_parallel.h"

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
      here_(UlyssesExchange::part_of(heads, layout_.ulysses())) {}

Tensor ContextParallel::enter(const Sequences& sequences, Tensor qkv) const {
  if (!exchanges_heads()) return qkv;
  return UlyssesExchange(*rank_, neighbours(), layout_, heads_, sequences.batch).to_heads(qkv);
}

void ContextParallel::forward(const Sequences& sequences, const Tensor& core, const Tensor& out,
                              const Tensor& lse) const {
  if (!exchanges_heads()) return core_forward(sequences, core, out, lse);
  const Tensor core_out = rank_->activation({core.rows(), here_.width()});
  core_forward(sequences, core, core_out, lse);
  UlyssesExchange(*rank_, neighbours(), layout_, heads_, sequences.batch).output_to_tokens(core_out, out);
}

// The order of the numbers is that of ContextBlocks where no heads are exchanged.
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

void ContextParallel::backward(const Sequences& sequences, const Tensor& core, Tensor dout, const Tensor& lse,
                               Tensor delta, const Tensor& dqkv) const {
  if (!exchanges_heads()) return core_backward(sequences, core, dout, lse, delta, dqkv);
  const UlyssesExchange exchange(*rank_, neighbours(), layout_, heads_, sequences.batch);
  dout = exchange.output_gradient_to_heads(dout);
  delta = exchange.delta_to_heads(delta);
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

void ContextParallel::core_forward(const Sequences& sequences, const Tensor& core, const Tensor& out,
                                   const Tensor& lse) const {
  if (layout_.ring() == 1)
    return rank_->kernels().attention(here_.q(core), here_.k(core), here_.v(core),
                                      whole_sequences(sequences, core), out, lse);
  const ContextBlocks blocks(*rank_, layout_, here_, sequences);
  const auto attend = gathers_ ? gathered_attention_forward : ring_attention_forward;
  attend(blocks, ring(), here_.q(core), own_kv(core), out, lse);
}

void ContextParallel::core_backward(const Sequences& sequences, const Tensor& core, const Tensor& dout,
                                    const Tensor& lse, const Tensor& delta, const Tensor& dcore) const {
  if (layout_.ring() == 1)
    return rank_->kernels().attention_backward(here_.q(core), here_.k(core), here_.v(core), dout, lse, delta,
                                               whole_sequences(sequences, core), here_.q(dcore),
                                               here_.k(dcore), here_.v(dcore));
  const ContextBlocks blocks(*rank_, layout_, here_, sequences);
  const auto attend = gathers_ ? gathered_attention_backward : ring_attention_backward;
  attend(blocks, ring(), here_.q(core), own_kv(core), dout, lse, delta, here_.q(dcore), here_.kv(dcore));
}

}  // namespace echelon
