// How far rounding can move the results of a computation, found by moving it: kernels whose operands and
// results are off by about what rounding may make of them (Parker 1997, Monte Carlo arithmetic; Wilkinson's
// backward errors, drawn at random). What a result owes to a difference of large numbers is moved by as much
// as these, not by what is left of them.
#pragma once

#include <cstdint>

#include "tensor/kernel_backend.h"

namespace echelon {

class RoundingNoise final : public KernelBackend {
 public:
  // Those of `exact`, until begin(). Copies of operands are in the arena (category other).
  RoundingNoise(Kernels& exact, Arena& arena) : exact_(exact), arena_(arena) {}

  // The draws of one trial; the same number, the same draws.
  void begin(std::uint64_t trial) {
    on_ = true;
    state_ = trial * 0xd1342543de82ef95;
    left_ = 0;
  }
  void end() { on_ = false; }

  void matmul(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, Out c, bool accumulate) override;
  void grouped_matmul(std::span<const MatrixProduct> products) override;
  void fill(Out x, double value) override { exact_.fill(x, value); }
  void copy(const Tensor& from, Out to) override { exact_.copy(from, to); }
  void add(const Tensor& x, InOut y) override;
  void scale(InOut x, double factor) override;
  void sum_squares(const Tensor& x, std::int64_t block, Out sums) override;
  bool all_finite(const Tensor& x) override { return exact_.all_finite(x); }
  void add_bias(const Tensor& bias, InOut y) override;
  void residual(const Tensor& x, const Tensor& y, const Tensor& bias, Out out) override;
  void bias_gradient(const Tensor& dy, InOut dbias) override;
  void layer_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, Out y, Out stats) override;
  void layer_norm_again(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& stats,
                        Out y) override;
  void layer_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                                 InOut dx) override;
  void layer_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw,
                                  InOut db) override;
  void rms_norm(const Tensor& x, const Tensor& w, double eps, Out y, Out stats) override;
  void rms_norm_again(const Tensor& x, const Tensor& w, const Tensor& stats, Out y) override;
  void rms_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                               InOut dx) override;
  void rms_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw) override;
  void gelu(InOut h, const Tensor& bias, Out y) override;
  void gelu_backward(InOut h, InOut dy) override;
  void swiglu(const Tensor& gate_up, Out y) override;
  void swiglu_backward(InOut gate_up, InOut dy) override;
  void weighted_swiglu_backward(InOut gate_up, InOut dy, const Tensor& weights, Out dweights) override;
  void rope(InOut x, std::int64_t head_dim, const Tensor& positions, double theta, bool inverse) override;
  void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape, Out out,
                 Out lse) override;
  void attention_delta(const Tensor& out, const Tensor& dout, const AttentionShape& shape,
                       Out delta) override;
  void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                          const Tensor& lse, const Tensor& delta, const AttentionShape& shape, Out dq, Out dk,
                          Out dv) override;
  void embedding(const Tensor& ids, const Tensor& table, std::int64_t first_id, Out y) override {
    exact_.embedding(ids, table, first_id, y);
  }
  void embedding_backward(const Tensor& ids, const Tensor& dy, std::int64_t first_id, InOut dtable) override;
  void combine_rows(const Tensor& x, const Tensor& places, const Tensor& weights, Out y) override;
  void row_max(const Tensor& logits, Out max) override { exact_.row_max(logits, max); }
  void exp_sum(InOut logits, const Tensor& max, const Tensor& targets, std::int64_t first_id, Out sum,
               Out target) override;
  void cross_entropy_backward(const Tensor& p, const Tensor& sum, const Tensor& targets,
                              std::int64_t first_id, double loss_scale, Out dlogits) override;
  void adamw(InOut p, const Tensor& g, InOut m, InOut v, const AdamWStep& step, Out rounded) override;

 private:
  // A sum of `terms` is off as if each of them were off by so many of the type's units in the last place: one
  // of the term itself, and what a random walk of roundings of the partial sums comes to.
  static double units(std::int64_t terms);
  // x with every element off by so much, as a copy: an operand of sums of `terms`.
  Tensor moved(const Tensor& x, std::int64_t terms = 1);
  // The same in place: a result.
  void move(const Tensor& x, std::int64_t terms = 1);
  // Of logarithms: by the unit of numbers around one at least.
  Tensor moved_logarithms(const Tensor& x);
  template <class Each>
  void visit(const Tensor& x, const Each& each);
  double sign();

  Kernels& exact_;
  Arena& arena_;
  bool on_ = false;
  std::uint64_t state_ = 0, bits_ = 0;
  int left_ = 0;  // of bits_
};

}  // namespace echelon
