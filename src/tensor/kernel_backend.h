// The interface of kernel implementations for a kind of machine. kernels_reference.cpp has plain loops in any
// float type, kernels_cpu.cpp oneDNN and SIMD in f32 and bf16; math that several share is in rows/. Functions
// and arguments are those of Kernels, which has checked shapes and dtypes. A backend that does not support
// every dtype checks for its own.
#pragma once

#include "tensor/kernels.h"

namespace echelon {

class KernelBackend {
 public:
  KernelBackend() = default;
  virtual ~KernelBackend() = default;
  KernelBackend(const KernelBackend&) = delete;
  KernelBackend& operator=(const KernelBackend&) = delete;

  virtual const ThreadTeam& team() const;  // by default the calling thread alone
  virtual void matmul(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, Out c,
                      bool accumulate) = 0;
  virtual void grouped_matmul(std::span<const MatrixProduct> products) = 0;
  // A product with its epilogue in one pass. False, with nothing done, if there is none for it: Kernels then
  // runs the product and separate passes.
  virtual bool fused_matmul(const MatrixProduct&, const Epilogue&) { return false; }
  // By default, rounds operands, which are then exact in bf16, and calls grouped_matmul().
  virtual void fp8_matmul(std::span<const Fp8Product> products);
  virtual void round_to_fp8(const Tensor& x, Fp8 format, Out y) = 0;
  virtual void fill(Out x, double value) = 0;
  virtual void copy(const Tensor& from, Out to) = 0;
  virtual void add(const Tensor& x, InOut y) = 0;
  virtual void scale(InOut x, double factor) = 0;
  virtual void sum_squares(const Tensor& x, std::int64_t block, Out sums) = 0;
  // For several tensors, where separate calls cost too much.
  virtual void sum_squares_of_all(std::span<const SumsOf> all, std::int64_t block) {
    for (const SumsOf& one : all) sum_squares(one.x, block, one.sums);
  }
  virtual void sum_in_order(const Tensor& x, std::int64_t block, Out sums) = 0;
  virtual void sum_in_order_of_all(std::span<const SumsOf> all, std::int64_t block) {
    for (const SumsOf& one : all) sum_in_order(one.x, block, one.sums);
  }
  virtual bool all_finite(const Tensor& x) = 0;
  virtual double largest(const Tensor& x) = 0;
  virtual ExactSum sum_squares_exactly(const Tensor& x, double scale) = 0;
  virtual void add_bias(const Tensor& bias, InOut y) = 0;
  virtual void residual(const Tensor& x, const Tensor& y, const Tensor& bias, Out out) = 0;
  virtual void bias_gradient(const Tensor& dy, InOut dbias) = 0;
  virtual void layer_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, Out y,
                          Out stats) = 0;
  virtual void layer_norm_again(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& stats,
                                Out y) = 0;
  virtual void layer_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w,
                                         const Tensor& stats, InOut dx) = 0;
  virtual void layer_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw,
                                          InOut db) = 0;
  virtual void rms_norm(const Tensor& x, const Tensor& w, double eps, Out y, Out stats) = 0;
  virtual void rms_norm_again(const Tensor& x, const Tensor& w, const Tensor& stats, Out y) = 0;
  virtual void rms_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w,
                                       const Tensor& stats, InOut dx) = 0;
  virtual void rms_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw) = 0;
  virtual void row_squares(const Tensor& x, Out squares) = 0;
  virtual void rms_norm_of_squares(const Tensor& x, const Tensor& w, double eps, double columns, Out y,
                                   InOut stats) = 0;
  virtual void rms_norm_backward_sums(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                                      Out sums) = 0;
  virtual void rms_norm_backward_input_of_sums(const Tensor& dy, const Tensor& x, const Tensor& w,
                                               const Tensor& stats, const Tensor& sums, double columns,
                                               InOut dx) = 0;
  virtual void activate(Activation a, InOut h, const Tensor& bias, Out y) = 0;
  virtual void activate_backward(Activation a, InOut h, InOut dy) = 0;
  virtual void xielu(const Tensor& h, const Tensor& alphas, Out y) = 0;
  virtual void xielu_backward(InOut h, const Tensor& alphas, InOut dy, Out dalphas) = 0;
  virtual void gated(Activation a, const Tensor& gate_up, Out y, const SwigluClamp& clamp) = 0;
  virtual void gated_backward(Activation a, InOut gate_up, InOut dy, const SwigluClamp& clamp) = 0;
  virtual void sigmoid_gate(const Tensor& x, const Tensor& gate, Out y) = 0;
  virtual void sigmoid_gate_backward(const Tensor& x, InOut gate, InOut dy, Out y) = 0;
  virtual void weighted_activation_backward(Activation a, InOut gate_up, InOut dy, const Tensor& weights,
                                            Out dweights, const SwigluClamp& clamp) = 0;
  virtual void rope(InOut x, std::int64_t head_dim, const Tensor& positions, const RopeTurns& turns,
                    bool inverse) = 0;
  virtual void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
                         Out out, Out lse) = 0;
  virtual void attention_delta(const Tensor& out, const Tensor& dout, const AttentionShape& shape,
                               Out delta) = 0;
  virtual void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                                  const Tensor& lse, const Tensor& delta, const AttentionShape& shape, Out dq,
                                  Out dk, Out dv) = 0;
  virtual void attention_sink(const Tensor& sinks, const AttentionShape& shape, InOut out, InOut lse) = 0;
  virtual void attention_sink_backward(const Tensor& sinks, const Tensor& lse, const Tensor& delta,
                                       const AttentionShape& shape, InOut dsinks) = 0;
  virtual void convolve(const Tensor& x, const Tensor& w, const Tensor& bias, const SequenceRows& rows,
                        Out y) = 0;
  virtual void convolve_backward(const Tensor& x, const Tensor& w, const Tensor& bias,
                                 const SequenceRows& rows, InOut dy, Out dx) = 0;
  virtual void convolve_backward_weight(const Tensor& x, const Tensor& dy, const SequenceRows& rows,
                                        InOut dw) = 0;
  virtual void short_convolution(const Tensor& bcx, const Tensor& w, const SequenceRows& rows, Out y) = 0;
  virtual void short_convolution_backward(const Tensor& bcx, const Tensor& w, const Tensor& dy,
                                          const SequenceRows& rows, Out dbcx, Out y) = 0;
  virtual void short_convolution_backward_weight(const Tensor& bcx, const Tensor& dy,
                                                 const SequenceRows& rows, InOut dw) = 0;
  virtual void state_space(const StateSpaceTensors& in, const StateSpaceShape& shape, const Tensor& workspace,
                           InOut state, Out y) = 0;
  virtual void state_space_backward(const StateSpaceTensors& in, const StateSpaceShape& shape,
                                    const Tensor& dy, const Tensor& workspace,
                                    const StateSpaceGradients& out) = 0;
  virtual void embedding(const Tensor& ids, const Tensor& table, std::int64_t first_id, Out y) = 0;
  virtual void embedding_backward(const Tensor& ids, const Tensor& dy, std::int64_t first_id,
                                  InOut dtable) = 0;
  virtual void combine_rows(const Tensor& x, const Tensor& places, const Tensor& weights, Out y) = 0;
  virtual void soft_cap(InOut x, double cap) = 0;
  virtual void row_max(const Tensor& logits, Out max) = 0;
  virtual void exp_sum(InOut logits, const Tensor& max, const Tensor& targets, std::int64_t first_id, Out sum,
                       Out target) = 0;
  virtual void cross_entropy_backward(const Tensor& p, const Tensor& sum, const Tensor& targets,
                                      std::int64_t first_id, double loss_scale, Out dlogits,
                                      const LogitsCap& cap) = 0;
  // In three steps, unless a backend has something better.
  virtual void cross_entropy(InOut logits, const Tensor& targets, double loss_scale, double cap, Out max,
                             Out sum, Out target, Out dlogits) {
    row_max(logits, max);
    exp_sum(logits, max, targets, 0, sum, target);
    cross_entropy_backward(logits, sum, targets, 0, loss_scale, dlogits, {cap, max});
  }
  virtual void adamw(InOut p, const Tensor& g, InOut m, InOut v, const AdamWStep& step, InOut remainder) = 0;
  virtual void adamw_of_all(std::span<const AdamWUpdate> updates) {
    for (const AdamWUpdate& u : updates) adamw(u.p, u.g, u.m, u.v, u.step, u.remainder);
  }
  virtual void momentum(const Tensor& g, InOut m, Out update, const MomentumStep& step) = 0;
  virtual void step_weights(InOut p, const Tensor& update, const WeightStep& step, InOut remainder) = 0;

  virtual void merge_softmax(const Tensor& parts, const Tensor& targets, std::span<const std::int64_t> bounds,
                             Out sum, Out target, Out scales, Out shares) = 0;
  virtual void merge_gradients(std::span<const Tensor> means, std::span<const Tensor> shares,
                               std::span<const Tensor> of_targets, const Tensor& targets, double factor,
                               Out y) = 0;
  virtual void add_losses(const Tensor& sum, const Tensor& target, const Tensor& targets, InOut loss) = 0;
  virtual void add_number(const Tensor& x, InOut y) = 0;
  virtual void route(const TokenRouter& router, const Tensor& logits, std::span<const double> bias, Out ids,
                     Out weights) = 0;
  virtual void weigh_routes(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                            Out weights) = 0;
  virtual void route_backward(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                              const Tensor& d_weights, const RouterLosses& losses, double loss_scale,
                              Out d_logits) = 0;
  virtual void add_router_losses(const TokenRouter& router, const Tensor& logits, const RouterLosses& losses,
                                 InOut loss) = 0;
  virtual void count_routed(const TokenRouter& router, const Tensor& ids, std::int64_t scopes,
                            Out counts) = 0;
  virtual void drop_over_capacity(const Tensor& ids, const Tensor& weights, const ExpertCapacity& capacity,
                                  Out kept) = 0;
  virtual void sort_by_expert(const Tensor& kept, Out places, Out tokens, Out counts) = 0;
  virtual void pack_choices(const Tensor& ids, const Tensor& weights, Out packed) = 0;
  virtual void unpack_choices(const Tensor& packed, std::span<const std::int64_t> rows, Out ids,
                              Out weights) = 0;
  virtual void take_ids(const Tensor& from, std::span<const std::int64_t> rows, Out to) = 0;
  virtual void place_weights(const Tensor& weights, const Tensor& places, InOut placed) = 0;
  virtual void pack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                             std::span<const Philox> rounding, const Tensor& gradient, Out packed) = 0;
  virtual void unpack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                               const Tensor& packed, bool accumulate, Out part_of_gradient) = 0;
  virtual void take_largest(InOut x, std::int64_t first_index, Out values, Out indices) = 0;
  virtual void add_at(const Tensor& values, const Tensor& indices, InOut sum) = 0;
  virtual void orthonormalize_rows(InOut x, const Philox& fresh) = 0;
  virtual void first_keys(const Tensor& starts, std::int64_t first_position, std::int64_t stride,
                          std::int64_t count, Out first) = 0;
};

}  // namespace echelon
