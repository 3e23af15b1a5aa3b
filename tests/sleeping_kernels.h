// Kernels that sleep as long as they would compute: what a program hides behind computation then shows on a
// machine that does other things too, and exactly where only sleep turns the clock.
#pragma once

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "base/error.h"
#include "tensor/kernel_backend.h"
#include "tensor/rows/vocabulary.h"

namespace echelon::checks {

// Attention on pairs of queries and keys that the mask leaves takes that many parts of `block`; five halves
// of it backward.
class SleepingKernels final : public KernelBackend {
 public:
  SleepingKernels(std::int64_t pairs_of_block, std::chrono::duration<double> block, const Time& time)
      : pairs_(pairs_of_block), block_(block), time_(time) {}
  // So far: a sleep may be longer than was asked for.
  double slept_seconds() const { return slept_seconds_; }
  // Pairs of forward passes so far, of one head.
  std::int64_t forward_pairs() const { return forward_pairs_; }
  void attention(const Tensor&, const Tensor&, const Tensor&, const AttentionShape& s, Out, Out) override {
    rest(s, 1);
    forward_pairs_ += pairs_of(s);
  }
  void attention_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                          const Tensor&, const AttentionShape& s, Out, Out, Out) override {
    rest(s, 2.5);
  }
  void attention_delta(const Tensor&, const Tensor&, const AttentionShape&, Out) override {}
  void fill(Out, double) override {}
  void copy(const Tensor&, Out) override {}
  void add(const Tensor&, InOut) override {}

  // Attention needs none of these.
  using T = const Tensor&;
  void matmul(T, Transpose, T, Transpose, Out, bool) override { never(); }
  void grouped_matmul(std::span<const MatrixProduct>) override { never(); }
  void fp8_matmul(std::span<const Fp8Product>) override { never(); }
  void round_to_fp8(T, Fp8, Out) override { never(); }
  void weighted_activation_backward(Activation, InOut, InOut, T, Out, const SwigluClamp&) override {
    never();
  }
  void convolve(T, T, T, const SequenceRows&, Out) override { never(); }
  void convolve_backward(T, T, T, const SequenceRows&, InOut, Out) override { never(); }
  void convolve_backward_weight(T, T, const SequenceRows&, InOut) override { never(); }
  void short_convolution(T, T, const SequenceRows&, Out) override { never(); }
  void short_convolution_backward(T, T, T, const SequenceRows&, Out, Out) override { never(); }
  void short_convolution_backward_weight(T, T, const SequenceRows&, InOut) override { never(); }
  void state_space(const StateSpaceTensors&, const StateSpaceShape&, T, InOut, Out) override { never(); }
  void state_space_backward(const StateSpaceTensors&, const StateSpaceShape&, T, T,
                            const StateSpaceGradients&) override {
    never();
  }
  void attention_sink(T, const AttentionShape&, InOut, InOut) override { never(); }
  void attention_sink_backward(T, T, T, const AttentionShape&, InOut) override { never(); }
  void combine_rows(T, T, T, Out) override { never(); }
  void scale(InOut, double) override { never(); }
  void sum_squares(T, std::int64_t, Out) override { never(); }
  void sum_squares_of_all(std::span<const SumsOf>, std::int64_t) override { never(); }
  void sum_in_order(T, std::int64_t, Out) override { never(); }
  void sum_in_order_of_all(std::span<const SumsOf>, std::int64_t) override { never(); }
  bool all_finite(T) override { return false; }
  double largest(T) override { return 0; }
  ExactSum sum_squares_exactly(T, double) override { return {}; }
  void add_bias(T, InOut) override { never(); }
  void residual(T, T, T, Out) override { never(); }
  void bias_gradient(T, InOut) override { never(); }
  void layer_norm(T, T, T, double, Out, Out) override { never(); }
  void layer_norm_again(T, T, T, T, Out) override { never(); }
  void layer_norm_backward_input(T, T, T, T, InOut) override { never(); }
  void layer_norm_backward_weight(T, T, T, InOut, InOut) override { never(); }
  void rms_norm(T, T, double, Out, Out) override { never(); }
  void rms_norm_again(T, T, T, Out) override { never(); }
  void rms_norm_backward_input(T, T, T, T, InOut) override { never(); }
  void rms_norm_backward_weight(T, T, T, InOut) override { never(); }
  void row_squares(T, Out) override { never(); }
  void rms_norm_of_squares(T, T, double, double, Out, InOut) override { never(); }
  void rms_norm_backward_sums(T, T, T, T, Out) override { never(); }
  void rms_norm_backward_input_of_sums(T, T, T, T, T, double, InOut) override { never(); }
  void activate(Activation, InOut, T, Out) override { never(); }
  void activate_backward(Activation, InOut, InOut) override { never(); }
  void xielu(T, T, Out) override { never(); }
  void xielu_backward(InOut, T, InOut, Out) override { never(); }
  void gated(Activation, T, Out, const SwigluClamp&) override { never(); }
  void gated_backward(Activation, InOut, InOut, const SwigluClamp&) override { never(); }
  void sigmoid_gate(T, T, Out) override { never(); }
  void sigmoid_gate_backward(T, InOut, InOut, Out) override { never(); }
  void rope(InOut, std::int64_t, T, const RopeTurns&, bool) override { never(); }
  void embedding(T, T, std::int64_t, Out) override { never(); }
  void embedding_backward(T, T, std::int64_t, InOut) override { never(); }
  void row_max(T, Out) override { never(); }
  void soft_cap(InOut, double) override { never(); }
  void exp_sum(InOut, T, T, std::int64_t, Out, Out) override { never(); }
  void cross_entropy_backward(T, T, T, std::int64_t, double, Out, const LogitsCap&) override { never(); }
  void adamw(InOut, T, InOut, InOut, const AdamWStep&, InOut) override { never(); }
  void adamw_of_all(std::span<const AdamWUpdate>) override { never(); }
  void momentum(T, InOut, Out, const MomentumStep&) override { never(); }
  void step_weights(InOut, T, const WeightStep&, InOut) override { never(); }
  void cross_entropy(InOut, T, double, double, Out, Out, Out, Out) override { never(); }

  void merge_softmax(const Tensor&, const Tensor&, std::span<const std::int64_t>, Out, Out, Out,
                     Out) override {
    never();
  }
  void merge_gradients(std::span<const Tensor>, std::span<const Tensor>, std::span<const Tensor>,
                       const Tensor&, double, Out) override {
    never();
  }
  void add_losses(const Tensor&, const Tensor&, const Tensor&, InOut) override { never(); }
  void add_number(const Tensor&, InOut) override { never(); }
  void route(const TokenRouter&, const Tensor&, std::span<const double>, Out, Out) override { never(); }
  void weigh_routes(const TokenRouter&, const Tensor&, const Tensor&, Out) override { never(); }
  void route_backward(const TokenRouter&, const Tensor&, const Tensor&, const Tensor&, const RouterLosses&,
                      double, Out) override {
    never();
  }
  void add_router_losses(const TokenRouter&, const Tensor&, const RouterLosses&, InOut) override { never(); }
  void count_routed(const TokenRouter&, const Tensor&, std::int64_t, Out) override { never(); }
  void drop_over_capacity(const Tensor&, const Tensor&, const ExpertCapacity&, Out) override { never(); }
  void sort_by_expert(const Tensor&, Out, Out, Out) override { never(); }
  void pack_choices(const Tensor&, const Tensor&, Out) override { never(); }
  void unpack_choices(const Tensor&, std::span<const std::int64_t>, Out, Out) override { never(); }
  void take_ids(const Tensor&, std::span<const std::int64_t>, Out) override { never(); }
  void place_weights(const Tensor&, const Tensor&, InOut) override { never(); }
  void pack_gradient(CompressionKind, const GradientBucket&, Range, std::span<const Philox>, const Tensor&,
                     Out) override {
    never();
  }
  void unpack_gradient(CompressionKind, const GradientBucket&, Range, const Tensor&, bool, Out) override {
    never();
  }
  void take_largest(InOut, std::int64_t, Out, Out) override { never(); }
  void add_at(const Tensor&, const Tensor&, InOut) override { never(); }
  void orthonormalize_rows(InOut, const Philox&) override { never(); }
  void first_keys(const Tensor& starts, std::int64_t first_position, std::int64_t stride, std::int64_t count,
                  Out first) override {
    const rows::FirstKey key{starts.host<std::int32_t>(), first_position, stride, count,
                             first->host<std::int32_t>()};
    for (std::int64_t j = 0; j < starts.numel(); ++j) key(0, j);
  }

 private:
  static void never() { throw InvariantError("attention alone is run"); }
  static std::int64_t pairs_of(const AttentionShape& s) {
    const std::int32_t* const first = s.first_keys.defined() ? s.first_keys.host<std::int32_t>() : nullptr;
    std::int64_t pairs = 0;
    for (std::int64_t row = 0; row < s.batch * s.q_len; ++row)
      pairs += std::max<std::int64_t>(0, s.end_key(row % s.q_len) - (first == nullptr ? 0 : first[row]));
    return pairs;
  }
  void rest(const AttentionShape& s, double times) {
    const double share = times * static_cast<double>(pairs_of(s)) / static_cast<double>(pairs_);
    const auto begin = time_.now();
    time_.sleep(std::chrono::duration_cast<Clock::duration>(block_ * share));
    slept_seconds_ += seconds_between(begin, time_.now());
  }
  std::int64_t pairs_;
  std::chrono::duration<double> block_;
  const Time time_;
  double slept_seconds_ = 0;
  std::int64_t forward_pairs_ = 0;
};

}  // namespace echelon::checks
