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
  void fp8_matmul(std::span<const Fp8Product> products) override {
    time_.sleep(product_);
    inner_->fp8_matmul(products);
  }
  void round_to_fp8(T x, Fp8 format, Out y) override { inner_->round_to_fp8(x, format, y); }
  void fill(Out x, double value) override { inner_->fill(x, value); }
  void copy(T from, Out to) override { inner_->copy(from, to); }
  void add(T x, InOut y) override { inner_->add(x, y); }
  void scale(InOut x, double factor) override { inner_->scale(x, factor); }
  void sum_squares(T x, std::int64_t block, Out sums) override { inner_->sum_squares(x, block, sums); }
  void sum_squares_of_all(std::span<const SumsOf> all, std::int64_t block) override {
    inner_->sum_squares_of_all(all, block);
  }
  void sum_in_order(T x, std::int64_t block, Out sums) override { inner_->sum_in_order(x, block, sums); }
  void sum_in_order_of_all(std::span<const SumsOf> all, std::int64_t block) override {
    inner_->sum_in_order_of_all(all, block);
  }
  bool all_finite(T x) override { return inner_->all_finite(x); }
  double largest(T x) override { return inner_->largest(x); }
  ExactSum sum_squares_exactly(T x, double scale) override { return inner_->sum_squares_exactly(x, scale); }
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
  void row_squares(T x, Out squares) override { inner_->row_squares(x, squares); }
  void rms_norm_of_squares(T x, T w, double eps, double columns, Out y, InOut stats) override {
    inner_->rms_norm_of_squares(x, w, eps, columns, y, stats);
  }
  void rms_norm_backward_sums(T dy, T x, T w, T stats, Out sums) override {
    inner_->rms_norm_backward_sums(dy, x, w, stats, sums);
  }
  void rms_norm_backward_input_of_sums(T dy, T x, T w, T stats, T sums, double columns, InOut dx) override {
    inner_->rms_norm_backward_input_of_sums(dy, x, w, stats, sums, columns, dx);
  }
  void activate(Activation a, InOut h, T bias, Out y) override { inner_->activate(a, h, bias, y); }
  void activate_backward(Activation a, InOut h, InOut dy) override { inner_->activate_backward(a, h, dy); }
  void xielu(T h, T alphas, Out y) override { inner_->xielu(h, alphas, y); }
  void xielu_backward(InOut h, T alphas, InOut dy, Out dalphas) override {
    inner_->xielu_backward(h, alphas, dy, dalphas);
  }
  void gated(Activation a, T gate_up, Out y, const SwigluClamp& clamp) override {
    inner_->gated(a, gate_up, y, clamp);
  }
  void sigmoid_gate(T x, T gate, Out y) override { inner_->sigmoid_gate(x, gate, y); }
  void sigmoid_gate_backward(T x, InOut gate, InOut dy, Out y) override {
    inner_->sigmoid_gate_backward(x, gate, dy, y);
  }
  void gated_backward(Activation a, InOut gate_up, InOut dy, const SwigluClamp& clamp) override {
    inner_->gated_backward(a, gate_up, dy, clamp);
  }
  void weighted_activation_backward(Activation a, InOut gate_up, InOut dy, T weights, Out dweights,
                                    const SwigluClamp& clamp) override {
    inner_->weighted_activation_backward(a, gate_up, dy, weights, dweights, clamp);
  }
  void convolve(T x, T w, T bias, const SequenceRows& rows, Out y) override {
    inner_->convolve(x, w, bias, rows, y);
  }
  void convolve_backward(T x, T w, T bias, const SequenceRows& rows, InOut dy, Out dx) override {
    inner_->convolve_backward(x, w, bias, rows, dy, dx);
  }
  void convolve_backward_weight(T x, T dy, const SequenceRows& rows, InOut dw) override {
    inner_->convolve_backward_weight(x, dy, rows, dw);
  }
  void short_convolution(T bcx, T w, const SequenceRows& rows, Out y) override {
    inner_->short_convolution(bcx, w, rows, y);
  }
  void short_convolution_backward(T bcx, T w, T dy, const SequenceRows& rows, Out dbcx, Out y) override {
    inner_->short_convolution_backward(bcx, w, dy, rows, dbcx, y);
  }
  void short_convolution_backward_weight(T bcx, T dy, const SequenceRows& rows, InOut dw) override {
    inner_->short_convolution_backward_weight(bcx, dy, rows, dw);
  }
  void state_space(const StateSpaceTensors& in, const StateSpaceShape& shape, T workspace, InOut state,
                   Out y) override {
    inner_->state_space(in, shape, workspace, state, y);
  }
  void state_space_backward(const StateSpaceTensors& in, const StateSpaceShape& shape, T dy, T workspace,
                            const StateSpaceGradients& out) override {
    inner_->state_space_backward(in, shape, dy, workspace, out);
  }
  void attention_sink(T sinks, const AttentionShape& shape, InOut out, InOut lse) override {
    inner_->attention_sink(sinks, shape, out, lse);
  }
  void attention_sink_backward(T sinks, T lse, T delta, const AttentionShape& shape, InOut dsinks) override {
    inner_->attention_sink_backward(sinks, lse, delta, shape, dsinks);
  }
  void rope(InOut x, std::int64_t head_dim, T positions, const RopeTurns& turns, bool inverse) override {
    inner_->rope(x, head_dim, positions, turns, inverse);
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
  void soft_cap(InOut x, double cap) override { inner_->soft_cap(x, cap); }
  void exp_sum(InOut logits, T max, T targets, std::int64_t first_id, Out sum, Out target) override {
    inner_->exp_sum(logits, max, targets, first_id, sum, target);
  }
  void cross_entropy_backward(T p, T sum, T targets, std::int64_t first_id, double loss_scale, Out dlogits,
                              const LogitsCap& cap) override {
    inner_->cross_entropy_backward(p, sum, targets, first_id, loss_scale, dlogits, cap);
  }
  void adamw(InOut p, T g, InOut m, InOut v, const AdamWStep& step, InOut remainder) override {
    inner_->adamw(p, g, m, v, step, remainder);
  }
  void adamw_of_all(std::span<const AdamWUpdate> updates) override { inner_->adamw_of_all(updates); }
  void momentum(T g, InOut m, Out update, const MomentumStep& step) override {
    inner_->momentum(g, m, update, step);
  }
  void step_weights(InOut p, T update, const WeightStep& step, InOut remainder) override {
    inner_->step_weights(p, update, step, remainder);
  }
  void cross_entropy(InOut logits, T targets, double loss_scale, double cap, Out max, Out sum, Out target,
                     Out dlogits) override {
    inner_->cross_entropy(logits, targets, loss_scale, cap, max, sum, target, dlogits);
  }

  void merge_softmax(const Tensor& parts, const Tensor& targets, std::span<const std::int64_t> bounds,
                     Out sum, Out target, Out scales, Out shares) override {
    inner_->merge_softmax(parts, targets, bounds, sum, target, scales, shares);
  }
  void merge_gradients(std::span<const Tensor> means, std::span<const Tensor> shares,
                       std::span<const Tensor> of_targets, const Tensor& targets, double factor,
                       Out y) override {
    inner_->merge_gradients(means, shares, of_targets, targets, factor, y);
  }
  void add_losses(const Tensor& sum, const Tensor& target, const Tensor& targets, InOut loss) override {
    inner_->add_losses(sum, target, targets, loss);
  }
  void add_number(const Tensor& x, InOut y) override { inner_->add_number(x, y); }
  void route(const TokenRouter& router, const Tensor& logits, std::span<const double> bias, Out ids,
             Out weights) override {
    inner_->route(router, logits, bias, ids, weights);
  }
  void weigh_routes(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                    Out weights) override {
    inner_->weigh_routes(router, logits, ids, weights);
  }
  void route_backward(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                      const Tensor& d_weights, const RouterLosses& losses, double loss_scale,
                      Out d_logits) override {
    inner_->route_backward(router, logits, ids, d_weights, losses, loss_scale, d_logits);
  }
  void add_router_losses(const TokenRouter& router, const Tensor& logits, const RouterLosses& losses,
                         InOut loss) override {
    inner_->add_router_losses(router, logits, losses, loss);
  }
  void count_routed(const TokenRouter& router, const Tensor& ids, std::int64_t scopes, Out counts) override {
    inner_->count_routed(router, ids, scopes, counts);
  }
  void drop_over_capacity(const Tensor& ids, const Tensor& weights, const ExpertCapacity& capacity,
                          Out kept) override {
    inner_->drop_over_capacity(ids, weights, capacity, kept);
  }
  void sort_by_expert(const Tensor& kept, Out places, Out tokens, Out counts) override {
    inner_->sort_by_expert(kept, places, tokens, counts);
  }
  void pack_choices(const Tensor& ids, const Tensor& weights, Out packed) override {
    inner_->pack_choices(ids, weights, packed);
  }
  void unpack_choices(const Tensor& packed, std::span<const std::int64_t> rows, Out ids,
                      Out weights) override {
    inner_->unpack_choices(packed, rows, ids, weights);
  }
  void take_ids(const Tensor& from, std::span<const std::int64_t> rows, Out to) override {
    inner_->take_ids(from, rows, to);
  }
  void place_weights(const Tensor& weights, const Tensor& places, InOut placed) override {
    inner_->place_weights(weights, places, placed);
  }
  void pack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                     std::span<const Philox> rounding, const Tensor& gradient, Out packed) override {
    inner_->pack_gradient(kind, bucket, part, rounding, gradient, packed);
  }
  void unpack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part, const Tensor& packed,
                       bool accumulate, Out part_of_gradient) override {
    inner_->unpack_gradient(kind, bucket, part, packed, accumulate, part_of_gradient);
  }
  void take_largest(InOut x, std::int64_t first_index, Out values, Out indices) override {
    inner_->take_largest(x, first_index, values, indices);
  }
  void add_at(const Tensor& values, const Tensor& indices, InOut sum) override {
    inner_->add_at(values, indices, sum);
  }
  void orthonormalize_rows(InOut x, const Philox& fresh) override { inner_->orthonormalize_rows(x, fresh); }
  void first_keys(const Tensor& starts, std::int64_t first_position, std::int64_t stride, std::int64_t count,
                  Out first) override {
    inner_->first_keys(starts, first_position, stride, count, first);
  }

 private:
  std::unique_ptr<Kernels> inner_;
  Clock::duration product_;
  const Time time_;
};

}  // namespace echelon::checks
