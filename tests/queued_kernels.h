// The reference kernels as what a fake device computes: every call is queued on the rank's stream, and sees
// memory when it runs.
#pragma once

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "fake_driver.h"
#include "tensor/kernel_backend.h"

namespace echelon::checks {

class QueuedKernels final : public KernelBackend {
 public:
  using T = const Tensor&;
  // `tf32`: operands of products in f32 are cut off where TF32 ends.
  QueuedKernels(FakeDriver& driver, Arena& arena, bool tf32 = false);

  void matmul(T a, Transpose ta, T b, Transpose tb, Out c, bool accumulate) override;
  void grouped_matmul(std::span<const MatrixProduct> products) override;
  void fp8_matmul(std::span<const Fp8Product> products) override;
  void round_to_fp8(T x, Fp8 format, Out y) override;
  void fill(Out x, double value) override;
  void copy(T from, Out to) override;
  void add(T x, InOut y) override;
  void scale(InOut x, double factor) override;
  void sum_squares(T x, std::int64_t block, Out sums) override;
  void sum_in_order(T x, std::int64_t block, Out sums) override;
  void sum_in_order_of_all(std::span<const SumsOf> all, std::int64_t block) override {
    for (const SumsOf& one : all) sum_in_order(one.x, block, one.sums);
  }
  void sum_squares_of_all(std::span<const SumsOf> all, std::int64_t block) override {
    for (const SumsOf& one : all) sum_squares(one.x, block, one.sums);
  }
  bool all_finite(T x) override;
  double largest(T x) override;
  ExactSum sum_squares_exactly(T x, double scale) override;
  void add_bias(T bias, InOut y) override;
  void residual(T x, T y, T bias, Out out) override;
  void bias_gradient(T dy, InOut dbias) override;
  void layer_norm(T x, T w, T b, double eps, Out y, Out stats) override;
  void layer_norm_again(T x, T w, T b, T stats, Out y) override;
  void layer_norm_backward_input(T dy, T x, T w, T stats, InOut dx) override;
  void layer_norm_backward_weight(T dy, T x, T stats, InOut dw, InOut db) override;
  void rms_norm(T x, T w, double eps, Out y, Out stats) override;
  void rms_norm_again(T x, T w, T stats, Out y) override;
  void rms_norm_backward_input(T dy, T x, T w, T stats, InOut dx) override;
  void rms_norm_backward_weight(T dy, T x, T stats, InOut dw) override;
  void row_squares(T x, Out squares) override;
  void rms_norm_of_squares(T x, T w, double eps, double columns, Out y, InOut stats) override;
  void rms_norm_backward_sums(T dy, T x, T w, T stats, Out sums) override;
  void rms_norm_backward_input_of_sums(T dy, T x, T w, T stats, T sums, double columns, InOut dx) override;
  void activate(Activation a, InOut h, T bias, Out y) override;
  void activate_backward(Activation a, InOut h, InOut dy) override;
  void xielu(T h, T alphas, Out y) override;
  void xielu_backward(InOut h, T alphas, InOut dy, Out dalphas) override;
  void gated(Activation a, T gate_up, Out y, const SwigluClamp& clamp) override;
  void gated_backward(Activation a, InOut gate_up, InOut dy, const SwigluClamp& clamp) override;
  void sigmoid_gate(T x, T gate, Out y) override;
  void sigmoid_gate_backward(T x, InOut gate, InOut dy, Out y) override;
  void weighted_activation_backward(Activation a, InOut gate_up, InOut dy, T weights, Out dweights,
                                    const SwigluClamp& clamp) override;
  void rope(InOut x, std::int64_t head_dim, T positions, const RopeTurns& turns, bool inverse) override;
  void attention(T q, T k, T v, const AttentionShape& shape, Out out, Out lse) override;
  void attention_sink(T sinks, const AttentionShape& shape, InOut out, InOut lse) override;
  void attention_sink_backward(T sinks, T lse, T delta, const AttentionShape& shape, InOut dsinks) override;
  void convolve(T x, T w, T bias, const SequenceRows& rows, Out y) override;
  void convolve_backward(T x, T w, T bias, const SequenceRows& rows, InOut dy, Out dx) override;
  void convolve_backward_weight(T x, T dy, const SequenceRows& rows, InOut dw) override;
  void short_convolution(T bcx, T w, const SequenceRows& rows, Out y) override;
  void short_convolution_backward(T bcx, T w, T dy, const SequenceRows& rows, Out dbcx, Out y) override;
  void short_convolution_backward_weight(T bcx, T dy, const SequenceRows& rows, InOut dw) override;
  void state_space(const StateSpaceTensors& in, const StateSpaceShape& shape, T workspace, InOut state,
                   Out y) override;
  void state_space_backward(const StateSpaceTensors& in, const StateSpaceShape& shape, T dy, T workspace,
                            const StateSpaceGradients& out) override;
  void attention_delta(T out, T dout, const AttentionShape& shape, Out delta) override;
  void attention_backward(T q, T k, T v, T dout, T lse, T delta, const AttentionShape& shape, Out dq, Out dk,
                          Out dv) override;
  void embedding(T ids, T table, std::int64_t first_id, Out y) override;
  void embedding_backward(T ids, T dy, std::int64_t first_id, InOut dtable) override;
  void combine_rows(T x, T places, T weights, Out y) override;
  void soft_cap(InOut x, double cap) override;
  void row_max(T logits, Out max) override;
  void exp_sum(InOut logits, T max, T targets, std::int64_t first_id, Out sum, Out target) override;
  void cross_entropy_backward(T p, T sum, T targets, std::int64_t first_id, double loss_scale, Out dlogits,
                              const LogitsCap& cap) override;
  void adamw(InOut p, T g, InOut m, InOut v, const AdamWStep& step, InOut remainder) override;
  void momentum(T g, InOut m, Out update, const MomentumStep& step) override;
  void step_weights(InOut p, T update, const WeightStep& step, InOut remainder) override;
  void adamw_of_all(std::span<const AdamWUpdate> updates) override {
    for (const AdamWUpdate& u : updates) adamw(u.p, u.g, u.m, u.v, u.step, u.remainder);
  }
  void cross_entropy(InOut logits, T targets, double loss_scale, double cap, Out max, Out sum, Out target,
                     Out dlogits) override;
  void merge_softmax(T parts, T targets, std::span<const std::int64_t> bounds, Out sum, Out target,
                     Out scales, Out shares) override;
  void merge_gradients(std::span<const Tensor> means, std::span<const Tensor> shares,
                       std::span<const Tensor> of_targets, T targets, double factor, Out y) override;
  void add_losses(T sum, T target, T targets, InOut loss) override;
  void add_number(T x, InOut y) override;
  void route(const TokenRouter& router, T logits, std::span<const double> bias, Out ids,
             Out weights) override;
  void weigh_routes(const TokenRouter& router, T logits, T ids, Out weights) override;
  void route_backward(const TokenRouter& router, T logits, T ids, T d_weights, const RouterLosses& losses,
                      double loss_scale, Out d_logits) override;
  void add_router_losses(const TokenRouter& router, T logits, const RouterLosses& losses,
                         InOut loss) override;
  void count_routed(const TokenRouter& router, T ids, std::int64_t scopes, Out counts) override;
  void drop_over_capacity(T ids, T weights, const ExpertCapacity& capacity, Out kept) override;
  void sort_by_expert(T kept, Out places, Out tokens, Out counts) override;
  void pack_choices(T ids, T weights, Out packed) override;
  void unpack_choices(T packed, std::span<const std::int64_t> rows, Out ids, Out weights) override;
  void take_ids(T from, std::span<const std::int64_t> rows, Out to) override;
  void place_weights(T weights, T places, InOut placed) override;
  void pack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                     std::span<const Philox> rounding, T gradient, Out packed) override;
  void unpack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part, T packed,
                       bool accumulate, Out part_of_gradient) override;
  void take_largest(InOut x, std::int64_t first_index, Out values, Out indices) override;
  void add_at(T values, T indices, InOut sum) override;
  void orthonormalize_rows(InOut x, const Philox& fresh) override;
  void first_keys(T starts, std::int64_t first_position, std::int64_t stride, std::int64_t count,
                  Out first) override;

 private:
  using Uses = std::vector<FakeDriver::Use>;
  // What an argument is to work that runs later: memory as work sees it, and what it uses of it; all else by
  // value. Nothing is kept alive, as a kernel does not.
  Tensor held(T tensor, Uses& uses) const;
  Tensor held(const Out& tensor, Uses& uses) const { return held(static_cast<T>(tensor), uses); }
  Tensor held(const InOut& tensor, Uses& uses) const { return held(static_cast<T>(tensor), uses); }
  std::vector<Tensor> held(std::span<const Tensor> tensors, Uses& uses) const;
  std::vector<MatrixProduct> held(std::span<const MatrixProduct> products, Uses& uses) const;
  AttentionShape held(AttentionShape shape, Uses& uses) const;
  LogitsCap held(LogitsCap cap, Uses& uses) const;
  SequenceRows held(SequenceRows rows, Uses& uses) const;
  StateSpaceShape held(StateSpaceShape shape, Uses& uses) const;
  StateSpaceTensors held(const StateSpaceTensors& in, Uses& uses) const;
  StateSpaceGradients held(const StateSpaceGradients& out, Uses& uses) const;
  // A step with what its rounding points to.
  template <class Step>
  struct OwnStep {
    explicit OwnStep(const Step& of) : step(of) {
      if (of.rounding == nullptr) return;
      random = of.rounding->random;
      runs.assign(of.rounding->runs.begin(), of.rounding->runs.end());
    }
    template <class Use>
    void with(const Use& use) const {
      Step at = step;
      std::optional<StochasticRounding> rounding;
      if (random) rounding.emplace(StochasticRounding{*random, runs});
      at.rounding = rounding ? &*rounding : nullptr;
      use(at);
    }
    Step step;
    std::optional<Philox> random;
    std::vector<LogicalRun> runs;
  };
  template <class Value>
  static std::vector<Value> held(std::span<const Value> values, Uses&) {
    return {values.begin(), values.end()};
  }
  template <class Value>
  static Value held(const Value& value, Uses&) {
    return value;
  }
  // kernels.*method(args...) in the order of the stream.
  template <class... Parameters, class... Args>
  void queue(const char* name, void (Kernels::*method)(Parameters...), const Args&... args);
  // The same of one whose result the host waits for.
  template <class Result, class... Parameters, class... Args>
  Result ask(const char* name, Result (Kernels::*method)(Parameters...), const Args&... args);
  void enqueue(const char* name, Uses uses, std::function<void()> work);
  void multiply_in_tf32(const char* name, std::span<const MatrixProduct> products);

  FakeDriver& driver_;
  Arena& arena_;
  const bool tf32_;
  std::shared_ptr<Kernels> kernels_;
  Tensor workspace_;
};

}  // namespace echelon::checks
