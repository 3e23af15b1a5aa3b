// Kernels that decide for each token, only add up, or move choices: every backend with a Launch
// (tensor/launching.h) uses these, as none needs faster ones.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tensor/launching.h"
#include "tensor/rows/elements.h"
#include "tensor/rows/experts.h"
#include "tensor/rows/short_convolution.h"
#include "tensor/rows/sinks.h"
#include "tensor/rows/state_space.h"
#include "tensor/rows/vocabulary.h"
#include "tensor/state_space_scan.h"

namespace echelon {

template <class Launch>
class TokenKernels : public KernelBackend, protected Launching<Launch> {
 public:
  explicit TokenKernels(Launch launch = {}) : Launching<Launch>(std::move(launch)) {}

  void first_keys(const Tensor& starts, std::int64_t first_position, std::int64_t stride, std::int64_t count,
                  Out first) final {
    this->each_element(
        "first_keys", 1, starts.numel(),
        rows::FirstKey{data<std::int32_t>(starts), first_position, stride, count, data<std::int32_t>(first)});
  }

  void attention_sink_backward(const Tensor& sinks, const Tensor& lse, const Tensor& delta,
                               const AttentionShape& s, InOut dsinks) override {
    with_stored_type(sinks, [&, this]<class T>(T) {
      using F = Wide<T>;
      this->each_row("attention_sink_backward", s.num_heads,
                     rows::AttentionSinkBackward<T>{data<T>(sinks),
                                                    {s.batch, s.q_len, s.num_heads, s.head_dim},
                                                    data<F>(lse),
                                                    data<F>(delta),
                                                    data<F>(dsinks)});
    });
  }

  void convolve(const Tensor& x, const Tensor& w, const Tensor& bias, const SequenceRows& rows,
                Out y) override {
    with_stored_type(x, [&, this]<class T>(T) {
      this->each_of_rows("convolve", x,
                         rows::Convolve<T>{matrix<T>(x), taps<T>(w, bias, rows), matrix<Wide<T>>(y)});
    });
  }
  void convolve_backward(const Tensor& x, const Tensor& w, const Tensor& bias, const SequenceRows& rows,
                         InOut dy, Out dx) override {
    with_stored_type(x, [&, this]<class T>(T) {
      const rows::Taps<T> of = taps<T>(w, bias, rows);
      this->each_of_rows("convolve_backward", x,
                         rows::ConvolveBackward<T>{matrix<T>(x), of, matrix<Wide<T>>(dy)});
      this->each_of_rows("convolve_backward_input", x,
                         rows::ConvolveBackwardInput<T>{matrix<Wide<T>>(dy), of, matrix<T>(dx)});
    });
  }
  void convolve_backward_weight(const Tensor& x, const Tensor& dy, const SequenceRows& rows,
                                InOut dw) override {
    with_stored_type(x, [&, this]<class T>(T) {
      spread_blocks(this->launch(), this->team(), "convolve_backward_weight", x.cols(),
                    rows::ConvolveBackwardWeight<T>{matrix<Wide<T>>(dy), matrix<T>(x), sequences(rows),
                                                    matrix<Wide<T>>(dw)});
    });
  }

  void short_convolution(const Tensor& bcx, const Tensor& w, const SequenceRows& rows, Out y) override {
    with_stored_type(bcx, [&, this]<class T>(T) {
      this->each_of_rows("short_convolution", y,
                         rows::ShortConvolution<T>{gated_channels<T>(bcx, rows), matrix<T>(w), matrix<T>(y)});
    });
  }
  void short_convolution_backward(const Tensor& bcx, const Tensor& w, const Tensor& dy,
                                  const SequenceRows& rows, Out dbcx, Out y) override {
    with_stored_type(bcx, [&, this]<class T>(T) {
      this->each_of_rows(
          "short_convolution_backward", y,
          rows::ShortConvolutionBackward<T>{
              {gated_channels<T>(bcx, rows), matrix<T>(w), matrix<T>(y)}, matrix<T>(dy), matrix<T>(dbcx)});
    });
  }
  void short_convolution_backward_weight(const Tensor& bcx, const Tensor& dy, const SequenceRows& rows,
                                         InOut dw) override {
    with_stored_type(bcx, [&, this]<class T>(T) {
      spread_blocks(this->launch(), this->team(), "short_convolution_backward_weight", dy.cols(),
                    rows::ShortConvolutionBackwardWeight<T>{gated_channels<T>(bcx, rows), matrix<T>(dy),
                                                            matrix<Wide<T>>(dw)});
    });
  }

  void xielu(const Tensor& h, const Tensor& alphas, Out y) override {
    with_stored_type(h, [&, this]<class T>(T) {
      this->each_row("xielu", h, rows::XieluForward<T>{matrix<T>(h), data<T>(alphas), matrix<T>(y)});
    });
  }
  void xielu_backward(InOut h, const Tensor& alphas, InOut dy, Out dalphas) override {
    with_stored_type(h, [&, this]<class T>(T) {
      this->each_row(
          "xielu_backward", h,
          rows::XieluBackward<T>{matrix<T>(h), data<T>(alphas), matrix<T>(dy), data<Wide<T>>(dalphas)});
    });
  }

  void sigmoid_gate(const Tensor& x, const Tensor& gate, Out y) override {
    with_stored_type(x, [&, this]<class T>(T) {
      this->each_of_rows("sigmoid_gate", x,
                         rows::SigmoidGate<T>{matrix<T>(x), matrix<T>(gate), matrix<T>(y)});
    });
  }
  void sigmoid_gate_backward(const Tensor& x, InOut gate, InOut dy, Out y) override {
    with_stored_type(x, [&, this]<class T>(T) {
      this->each_of_rows(
          "sigmoid_gate_backward", x,
          rows::SigmoidGateBackward<T>{matrix<T>(x), matrix<T>(gate), matrix<T>(dy), matrix<T>(y)});
    });
  }

  void state_space(const StateSpaceTensors& in, const StateSpaceShape& shape, const Tensor& workspace,
                   InOut state, Out y) override {
    StateSpaceScan<Launch>(this->launch(), *this, shape, in, workspace).forward(state, y);
  }
  void state_space_backward(const StateSpaceTensors& in, const StateSpaceShape& shape, const Tensor& dy,
                            const Tensor& workspace, const StateSpaceGradients& out) override {
    StateSpaceScan<Launch>(this->launch(), *this, shape, in, workspace).backward(dy, out);
  }

  void add_losses(const Tensor& sum, const Tensor& target, const Tensor& targets, InOut loss) final {
    with_float_type(sum, [&, this]<class F>(F) {
      this->each_row("add_losses", 1,
                     rows::AddLosses<F>{data<F>(sum), data<F>(target), data<std::int32_t>(targets),
                                        targets.numel(), data<double>(loss)});
    });
  }

  void merge_softmax(const Tensor& parts, const Tensor& targets, std::span<const std::int64_t> bounds,
                     Out sum, Out target, Out scales, Out shares) final {
    const auto of_parts = this->launch().upload(bounds);
    with_float_type(parts, [&, this]<class F>(F) {
      this->each_element("merge_softmax", 1, targets.numel(),
                         rows::MergeSoftmax<F>{data<F>(parts), data<std::int32_t>(targets), of_parts.data(),
                                               std::ssize(bounds) - 1, targets.numel(), data<F>(sum),
                                               data<F>(target), data<F>(scales), data<F>(shares)});
    });
  }

  void merge_gradients(std::span<const Tensor> means, std::span<const Tensor> shares,
                       std::span<const Tensor> of_targets, const Tensor& targets, double factor,
                       Out y) final {
    with_stored_type(y, [&, this]<class T>(T) {
      std::vector<rows::GradientPart<T>> parts;
      for (std::size_t p = 0; p < means.size(); ++p)
        parts.push_back({data<T>(means[p]), data<T>(of_targets[p]), data<Wide<T>>(shares[p])});
      const auto all = this->launch().upload(std::span<const rows::GradientPart<T>>(parts));
      this->elements("merge_gradients", y,
                     rows::MergeGradients<T>{all.data(), std::ssize(parts), data<std::int32_t>(targets),
                                             Wide<T>(factor), matrix<T>(y)});
    });
  }

  void add_number(const Tensor& x, InOut y) final {
    this->each_element("add_number", 1, 1, rows::AddNumber{data<double>(x), data<double>(y)});
  }

  void route(const TokenRouter& router, const Tensor& logits, std::span<const double> bias, Out ids,
             Out weights) final {
    route_tokens("route", router, logits, bias, true, ids, weights);
  }

  void weigh_routes(const TokenRouter& router, const Tensor& logits, const Tensor& ids, Out weights) final {
    route_tokens("weigh_routes", router, logits, {}, false, ids, weights);
  }

  void route_backward(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                      const Tensor& d_weights, const RouterLosses& losses, double loss_scale,
                      Out d_logits) final {
    const auto factors = this->launch().upload(balance_factors(losses, logits, router));
    with_float_type(logits, [&, this]<class F>(F) {
      this->launch().run("route_backward", logits.rows(),
                         rows::RouteBackward<F>{router.rules(), matrix<F>(logits), data<std::int32_t>(ids),
                                                data<F>(d_weights), row_factors(losses, factors.data()),
                                                losses.z_loss, loss_scale, matrix<F>(d_logits)},
                         rows::RouterSpace::shared_bytes(router.rules()));
    });
  }

  void add_router_losses(const TokenRouter& router, const Tensor& logits, const RouterLosses& losses,
                         InOut loss) final {
    const auto factors = this->launch().upload(balance_factors(losses, logits, router));
    const auto of_rows = this->launch().template scratch<double>(logits.rows());
    with_float_type(logits, [&, this]<class F>(F) {
      this->launch().run(
          "add_router_losses", logits.rows(),
          rows::RouterLossOfRow<F>{router.rules(), matrix<F>(logits), row_factors(losses, factors.data()),
                                   losses.z_loss, of_rows.data()},
          rows::RouterSpace::shared_bytes(router.rules()));
    });
    this->each_row("add_router_losses", 1, rows::AddSum{of_rows.data(), logits.rows(), data<double>(loss)});
  }

  void pack_choices(const Tensor& ids, const Tensor& weights, Out packed) final {
    with_float_type(packed, [&, this]<class F>(F) {
      this->each_element(
          "pack_choices", ids.rows(), 2 * ids.cols(),
          rows::PackChoices<F>{data<std::int32_t>(ids), data<F>(weights), ids.cols(), data<F>(packed)});
    });
  }

  void unpack_choices(const Tensor& packed, std::span<const std::int64_t> rows, Out ids, Out weights) final {
    const std::int64_t k = packed.cols() / 2;
    const auto to = this->launch().upload(rows);
    with_float_type(packed, [&, this]<class F>(F) {
      this->each_element("unpack_choices", packed.rows(), k,
                         rows::UnpackChoices<F>{data<F>(packed), rows.empty() ? nullptr : to.data(), k,
                                                data<std::int32_t>(ids), data<F>(weights)});
    });
  }

  void take_ids(const Tensor& from, std::span<const std::int64_t> rows, Out to) final {
    const auto taken = this->launch().upload(rows);
    this->each_element(
        "take_ids", std::ssize(rows), from.cols(),
        rows::TakeIds{data<std::int32_t>(from), taken.data(), from.cols(), data<std::int32_t>(to)});
  }

  void place_weights(const Tensor& weights, const Tensor& places, InOut placed) final {
    with_float_type(weights, [&, this]<class F>(F) {
      this->each_element(
          "place_weights", 1, weights.numel(),
          rows::PlaceWeights<F>{data<F>(weights), data<std::int32_t>(places), data<F>(placed)});
    });
  }

 protected:
  template <class T>
  rows::Matrix<T> matrix(const Tensor& t) const {
    return this->launch().template matrix<T>(t);
  }
  // Null for an undefined tensor.
  template <class T>
  T* data(const Tensor& t) const {
    return t.defined() ? this->launch().template data<T>(t) : nullptr;
  }
  rows::RowsOfSequences sequences(const SequenceRows& rows) const {
    return {rows.length, data<std::int32_t>(rows.first_positions)};
  }
  template <class T>
  rows::GatedChannels<T> gated_channels(const Tensor& bcx, const SequenceRows& rows) const {
    return {matrix<T>(bcx), bcx.cols() / 3, sequences(rows)};
  }

 private:
  template <class T>
  rows::Taps<T> taps(const Tensor& w, const Tensor& bias, const SequenceRows& rows) const {
    return {matrix<T>(w), data<T>(bias), sequences(rows)};
  }
  template <class Kernel>
  void each_of_rows(const char* name, const Tensor& x, const Kernel& kernel) const {
    if constexpr (std::is_same_v<Launch, HostLaunch>)
      this->team().each_task(x.rows(), [&](std::int64_t i, int) {
        for (std::int64_t j = 0; j < x.cols(); ++j) kernel(i, j);
      });
    else
      this->elements(name, x, kernel);
  }

  void route_tokens(const char* name, const TokenRouter& router, const Tensor& logits,
                    std::span<const double> bias, bool choose, const Tensor& ids, const Tensor& weights) {
    const auto of_choice = this->launch().upload(bias);
    with_float_type(logits, [&, this]<class F>(F) {
      this->launch().run(
          name, logits.rows(),
          rows::RouteToken<F>{router.rules(), matrix<F>(logits), bias.empty() ? nullptr : of_choice.data(),
                              choose, data<std::int32_t>(ids), data<F>(weights)},
          rows::RouterSpace::shared_bytes(router.rules()));
    });
  }

  static std::span<const double> balance_factors(const RouterLosses& losses, const Tensor& logits,
                                                 const TokenRouter& router) {
    check(losses.factors.empty() || logits.rows() == 0 ||
              ((losses.first_row + logits.rows() - 1) / losses.rows_per_scope + 1) * router.num_experts() <=
                  std::ssize(losses.factors),
          "balance factors are there for every scope");
    return losses.factors;
  }
  static rows::RowFactors row_factors(const RouterLosses& losses, const double* factors) {
    return {losses.factors.empty() ? nullptr : factors, losses.rows_per_scope, losses.first_row};
  }
};

}  // namespace echelon
