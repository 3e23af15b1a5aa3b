// Rotary positions of queries and keys, in place (Su et al. 2021, https://arxiv.org/abs/2104.09864).
#include "model/op.h"

namespace echelon {
namespace {

class RopeOp final : public OpRunner {
 public:
  RopeOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op),
        heads_(heads_here(s.plan.model, s.tensor_parallel)),
        turns_(turns_of(s.plan, op.windowed)),
        query_turns_(query_turns(s.plan.model.rope, turns_)) {}

 protected:
  void run_forward(BlockRun& run) const override { run.set(out(), turn(run, run.take(in()), false)); }
  void run_backward(BlockRun& run) const override {
    run.set_gradient(in(), turn(run, run.take_gradient(out()), true));
  }

 private:
  static RopeTurns turns_of(const Plan& plan, bool windowed) {
    return rope_turns(plan.model.rope, plan.model.turned_width(), plan.seq_len, windowed);
  }
  // q and k lie side by side, so one pass turns both where they are turned alike.
  Tensor turn(BlockRun& run, Tensor qkv, bool back) const {
    const auto with = [&](const Tensor& x, const RopeTurns& turns) {
      run.kernels().rope(x, heads_.head_dim(), run.microbatch().positions, turns, back);
    };
    if (query_turns_.growth == 0) {
      with(heads_.qk(qkv), turns_);
    } else {
      with(heads_.q(qkv), query_turns_);
      with(heads_.k(qkv), turns_);
    }
    return qkv;
  }

  Heads heads_;
  RopeTurns turns_, query_turns_;
};

}  // namespace

std::unique_ptr<OpRunner> make_rope_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<RopeOp>(op, s);
}

}  // namespace echelon
