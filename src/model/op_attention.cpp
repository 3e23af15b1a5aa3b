// Causal attention on the heads of this tp rank and, under context parallelism, over the tokens of the cp
// group.
#include "model/op.h"

namespace echelon {

Heads heads_here(const ModelSpec& m, const TensorParallel& tp) {
  return Heads(m).part(tp.index(), tp.size());
}

namespace {

class AttentionOp final : public OpRunner {
 public:
  AttentionOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        heads_(heads_here(s.plan.model, s.tensor_parallel)),
        context_parallel_(s.rank, s.plan, heads_),
        sinks_(s.stacked(op.weights)) {}

 protected:
  void run_forward(BlockRun& run) const override {
    if (run.cache().keys.defined()) return generate(run);
    run.set(out(0), context_parallel_.enter(sequences_of(run), run.take(in())));
    attend(run);
  }

  void run_again(BlockRun& run) const override {
    if (run.value(out(0)).defined())
      attend(run);
    else
      run_forward(run);
  }

  void run_backward(BlockRun& run) const override {
    const Sequences sequences = sequences_of(run);
    Tensor d_attended = run.take_gradient(out(1));
    Tensor delta = context_parallel_.delta(sequences, run.take_kept(out(1)), d_attended);
    const Tensor d_qkv = run.activation({run.rows(), heads_.qkv_width()});
    context_parallel_.backward(sequences, run.value(out(0)), sinks_, run.sums(), std::move(d_attended),
                               run.value(out(2)), std::move(delta), d_qkv);
    run.set_gradient(in(), d_qkv);
  }

 private:
  // As this layer sees them.
  Sequences sequences_of(const BlockRun& run) const {
    const Microbatch& m = run.microbatch();
    return {m.sequences.batch, op().windowed ? m.window_starts : m.sequences.first_positions};
  }

  void attend(BlockRun& run) const {
    const Tensor attended = run.activation({run.rows(), heads_.width()}),
                 lse = run.statistic({run.rows() * heads_.num_heads()});
    context_parallel_.forward(sequences_of(run), run.value(out(0)), sinks_.value, attended, lse);
    run.set(out(1), attended);
    run.set(out(2), lse);
  }

  // The new tokens' keys and values go into the cache, and they attend to all that is there.
  void generate(BlockRun& run) const {
    const Tensor qkv = run.take(in()), attended = run.activation({run.rows(), heads_.width()}),
                 lse = run.statistic({run.rows() * heads_.num_heads()});
    const std::int64_t end = run.position() + run.rows(), width = heads_.kv_width();
    run.kernels().copy(heads_.kv(qkv), run.cache().keys.row_range(run.position(), end));
    AttentionShape shape = heads_.shape(1, run.rows(), end);
    shape.q_offset = run.position();
    shape.first_keys = sequences_of(run).first_positions;
    const Tensor seen = run.cache().keys.row_range(0, end);
    run.kernels().attention(heads_.q(qkv), seen.column_range(0, width), seen.column_range(width, 2 * width),
                            shape, attended, lse);
    if (sinks_.defined()) run.kernels().attention_sink(sinks_.value, shape, attended, lse);
    run.set(out(1), attended);
  }

  Heads heads_;
  ContextParallel context_parallel_;
  Weight sinks_;
};

}  // namespace

std::unique_ptr<OpRunner> make_attention_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<AttentionOp>(op, s);
}

}  // namespace echelon
