// Kernels of which a matrix product, and nothing else, takes time on a clock that only sleep turns.
#pragma once

#include <memory>
#include <utility>

#include "base/clock.h"
#include "tensor/kernel_backend.h"

namespace echelon::checks {

class TimedKernels final : public KernelBackend {
 public:
  TimedKernels(std::unique_ptr<Kernels> inner, Clock::duration product, const Time& time)
      : inner_(std::move(inner)), product_(product), time_(time) {}

  using T = const Tensor&;
  void matmul(T a, Transpose ta, T b, Transpose tb, Out c, bool accumulate) override {
    time_.sleep(product_);
    inner_->matmul(a, ta, b, tb, c, accumulate);
  }
  void grouped_matmul(std::span<const MatrixProduct> products) override {
    time_.sleep(product_);
    inner_->grouped_matmul(products);
  }
  void fill(Out x, double value) override { inner_->fill(x, value); }
  void copy(T from, Out to) override { inner_->copy(from, to); }
  void add(T x, InOut y) override { inner_->add(x, y); }
  void scale(InOut x, double factor) override { inner_->scale(x, factor); }
  void sum_squares(T x, std::int64_t block, Out sums) override { inner_->sum_squares(x, block, sums); }
  bool all_finite(T x) override { return inner_->all_finite(x); }
  void add_bias(T bias, InOut y) override { inner_->add_bias(bias, y); }
  void residual(T x, T y, T bias, Out out) override { inner_->residual(x, y, bias, out); }
  void bias_gradient(T dy, InOut dbias) override { inner_->bias_gradient(dy, dbias); }
  void layer_norm(T x, T w, T b, double eps, Out y, Out stats) override {
    inner_->layer_norm(x, w, b, eps, y, stats);
  }
  void layer_norm_again(T x, T w, T b, T stats, Out y) override {
    inner_->layer_norm_again(x, w, b, stats, y);
  }
  void layer_norm_backward_input(T dy, T x, T w, T stats, InOut dx) override {
    inner_->layer_norm_backward_input(dy, x, w, stats, dx);
  }
  void layer_norm_backward_weight(T dy, T x, T stats, InOut dw, InOut db) override {
    inner_->layer_norm_backward_weight(dy, x, stats, dw, db);
  }
  void rms_norm(T x, T w, double eps, Out y, Out stats) override { inner_->rms_norm(x, w, eps, y, stats); }
  void rms_norm_again(T x, T w, T stats, Out y) override { inner_->rms_norm_again(x, w, stats, y); }
  void rms_norm_backward_input(T dy, T x, T w, T stats, InOut dx) override {
    inner_->rms_norm_backward_input(dy, x, w, stats, dx);
  }
  void rms_norm_backward_weight(T dy, T x, T stats, InOut dw) override {
    inner_->rms_norm_backward_weight(dy, x, stats, dw);
  }
  void gelu(InOut h, T bias, Out y) override { inner_->gelu(h, bias, y); }
  void gelu_backward(InOut h, InOut dy) override { inner_->gelu_backward(h, dy); }
  void swiglu(T gate_up, Out y) override { inner_->swiglu(gate_up, y); }
  void swiglu_backward(InOut gate_up, InOut dy) override { inner_->swiglu_backward(gate_up, dy); }
  void weighted_swiglu_backward(InOut gate_up, InOut dy, T weights, Out dweights) override {
    inner_->weighted_swiglu_backward(gate_up, dy, weights, dweights);
  }
  void rope(InOut x, std::int64_t head_dim, T positions, double theta, bool inverse) override {
    inner_->rope(x, head_dim, positions, theta, inverse);
  }
  void attention(T q, T k, T v, const AttentionShape& shape, Out out, Out lse) override {
    inner_->attention(q, k, v, shape, out, lse);
  }
  void attention_delta(T out, T dout, const AttentionShape& shape, Out delta) override {
    inner_->attention_delta(out, dout, shape, delta);
  }
  void attention_backward(T q, T k, T v, T dout, T lse, T delta, const AttentionShape& shape, Out dq, Out dk,
                          Out dv) override {
    inner_->attention_backward(q, k, v, dout, lse, delta, shape, dq, dk, dv);
  }
  void embedding(T ids, T table, std::int64_t first_id, Out y) override {
    inner_->embedding(ids, table, first_id, y);
  }
  void embedding_backward(T ids, T dy, std::int64_t first_id, InOut dtable) override {
    inner_->embedding_backward(ids, dy, first_id, dtable);
  }
  void combine_rows(T x, T places, T weights, Out y) override { inner_->combine_rows(x, places, weights, y); }
  void row_max(T logits, Out max) override { inner_->row_max(logits, max); }
  void exp_sum(InOut logits, T max, T targets, std::int64_t first_id, Out sum, Out target) override {
    inner_->exp_sum(logits, max, targets, first_id, sum, target);
  }
  void cross_entropy_backward(T p, T sum, T targets, std::int64_t first_id, double loss_scale,
                              Out dlogits) override {
    inner_->cross_entropy_backward(p, sum, targets, first_id, loss_scale, dlogits);
  }
  void adamw(InOut p, T g, InOut m, InOut v, const AdamWStep& step, Out rounded) override {
    inner_->adamw(p, g, m, v, step, rounded);
  }

 private:
  std::unique_ptr<Kernels> inner_;
  Clock::duration product_;
  const Time time_;
};

}  // namespace echelon::checks
