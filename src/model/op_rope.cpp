// Queries and keys turned by their positions, in place (Su et al. 2021, https://arxiv.org/abs/2104.09864).
#include "model/op.h"

namespace echelon {
namespace {

class RopeOp final : public OpRunner {
 public:
  RopeOp(const BlockOp& op, const OpSetting& s) : OpRunner(op), heads_(heads_here(s.plan)) {}

 protected:
  void run_forward(BlockRun& run) const override {
    const Tensor qkv = run.take(in());
    heads_.rotate(run.kernels(), run.microbatch().positions, qkv);
    run.set(out(), qkv);
  }

  void run_backward(BlockRun& run) const override {
    const Tensor d = run.take_gradient(out());
    heads_.rotate_back(run.kernels(), run.microbatch().positions, d);
    run.set_gradient(in(), d);
  }

 private:
  Attention heads_;
};

}  // namespace

std::unique_ptr<OpRunner> make_rope_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<RopeOp>(op, s);
}

}  // namespace echelon
