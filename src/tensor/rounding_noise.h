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

  // The draws of one trial; the same number, the same draws. `narrow`: whether what is kept in bf16 moves
  // too, which it does not where both runs round the same numbers.
  void begin(std::uint64_t trial, bool narrow = true) {
    on_ = true;
    moves_narrow_ = narrow;
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
  void activate(Activation a, InOut h, const Tensor& bias, Out y) override;
  void activate_backward(Activation a, InOut h, InOut dy) override;
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

  // What decides, and what only adds up, is exact.
  void add_losses(const Tensor& sum, const Tensor& target, const Tensor& targets, InOut loss) override {
    exact_.add_losses(sum, target, targets, loss);
  }
  void add_number(const Tensor& x, InOut y) override { exact_.add_number(x, y); }
  void route(const TokenRouter& router, const Tensor& logits, std::span<const double> bias, Out ids,
             Out weights) override {
    exact_.route(router, logits, bias, ids, weights);
  }
  void weigh_routes(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                    Out weights) override {
    exact_.weigh_routes(router, logits, ids, weights);
  }
  void route_backward(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                      const Tensor& d_weights, const RouterLosses& losses, double loss_scale,
                      Out d_logits) override {
    exact_.route_backward(router, logits, ids, d_weights, losses, loss_scale, d_logits);
  }
  void add_router_losses(const TokenRouter& router, const Tensor& logits, const RouterLosses& losses,
                         InOut loss) override {
    exact_.add_router_losses(router, logits, losses, loss);
  }
  void count_routed(const TokenRouter& router, const Tensor& ids, std::int64_t scopes, Out counts) override {
    exact_.count_routed(router, ids, scopes, counts);
  }
  void drop_over_capacity(const Tensor& ids, const Tensor& weights, const ExpertCapacity& capacity,
                          Out kept) override {
    exact_.drop_over_capacity(ids, weights, capacity, kept);
  }
  void sort_by_expert(const Tensor& kept, Out places, Out tokens, Out counts) override {
    exact_.sort_by_expert(kept, places, tokens, counts);
  }
  void pack_choices(const Tensor& ids, const Tensor& weights, Out packed) override {
    exact_.pack_choices(ids, weights, packed);
  }
  void unpack_choices(const Tensor& packed, std::span<const std::int64_t> rows, Out ids,
                      Out weights) override {
    exact_.unpack_choices(packed, rows, ids, weights);
  }
  void take_ids(const Tensor& from, std::span<const std::int64_t> rows, Out to) override {
    exact_.take_ids(from, rows, to);
  }
  void place_weights(const Tensor& weights, const Tensor& places, InOut placed) override {
    exact_.place_weights(weights, places, placed);
  }
  void pack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                     std::span<const Philox> rounding, const Tensor& gradient, Out packed) override {
    exact_.pack_gradient(kind, bucket, part, rounding, gradient, packed);
  }
  void unpack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part, const Tensor& packed,
                       bool accumulate, Out part_of_gradient) override {
    exact_.unpack_gradient(kind, bucket, part, packed, accumulate, part_of_gradient);
  }
  void take_largest(InOut x, std::int64_t first_index, Out values, Out indices) override {
    exact_.take_largest(x, first_index, values, indices);
  }
  void add_at(const Tensor& values, const Tensor& indices, InOut sum) override {
    exact_.add_at(values, indices, sum);
  }
  void orthonormalize_rows(InOut x, const Philox& fresh) override { exact_.orthonormalize_rows(x, fresh); }
  void first_keys(const Tensor& starts, std::int64_t first_position, std::int64_t stride, std::int64_t count,
                  Out first) override {
    exact_.first_keys(starts, first_position, stride, count, first);
  }

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
  bool on_ = false, moves_narrow_ = true;
  std::uint64_t state_ = 0, bits_ = 0;
  int left_ = 0;  // of bits_
};

}  // namespace echelon
