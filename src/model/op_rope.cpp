// Queries and keys turned by their positions, in place (Su et al. 2021, https://arxiv.org/abs/2104.09864).
#include "model/op.h"

namespace echelon {
namespace {

class RopeOp final : public OpRunner {
 public:
  RopeOp(const BlockOp& op, const OpSetting& s)
      : OpRunner(op), heads_(heads_here(s.plan)), turns_(turns_of(s.plan, op.windowed)) {}

 protected:
  void run_forward(BlockRun& run) const override { run.set(out(), turn(run, run.take(in()), false)); }
  void run_backward(BlockRun& run) const override {
    run.set_gradient(in(), turn(run, run.take_gradient(out()), true));
  }

 private:
  static RopeTurns turns_of(const Plan& plan, bool windowed) {
    return rope_turns(plan.model.rope, plan.model.turned_width(), plan.seq_len, windowed);
  }
  // q and k lie side by side, so one pass turns both.
  Tensor turn(BlockRun& run, Tensor qkv, bool back) const {
    run.kernels().rope(heads_.qk(qkv), heads_.head_dim(), run.microbatch().positions, turns_, back);
    return qkv;
  }

  Heads heads_;
  RopeTurns turns_;
};

}  // namespace

std::unique_ptr<OpRunner> make_rope_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<RopeOp>(op, s);
}

}  // namespace echelon
