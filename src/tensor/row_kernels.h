// Kernels that are passes over rows and elements, of which a vendor may have better ones, for any Launch
// (tensor/launching.h) that Base uses.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "tensor/launching.h"
#include "tensor/rows/activations.h"
#include "tensor/rows/elements.h"
#include "tensor/rows/fp8.h"
#include "tensor/rows/muon.h"
#include "tensor/rows/norms.h"
#include "tensor/rows/rope.h"
#include "tensor/rows/sinks.h"
#include "tensor/rows/vocabulary.h"

namespace echelon {

// Base is TokenKernels<Launch>, or derived from it.
template <class Launch, class Base>
class RowKernels : public Base {
 public:
  using Base::Base;

  void fill(Out x, double value) override {
    with_stored_type(x, [&, this]<class T>(T) {
      this->elements("fill", x, rows::Fill<T>{matrix<T>(x), T(value)});
    });
  }

  void copy(const Tensor& from, Out to) override {
    if (from.dtype() == DType::i16)
      return this->elements(
          "copy", to,
          rows::Copy<std::int16_t, std::int16_t>{matrix<std::int16_t>(from), matrix<std::int16_t>(to)});
    this->with_pair(from, to,
                    [&, this]<class X, class Y>(const rows::Matrix<X>& x, const rows::Matrix<Y>& y) {
                      this->elements("copy", to, rows::Copy<X, Y>{x, y});
                    });
  }

  void add(const Tensor& tx, InOut ty) override {
    this->with_pair(tx, ty, [&, this]<class X, class Y>(const rows::Matrix<X>& x, const rows::Matrix<Y>& y) {
      this->elements("add", ty, rows::Add<X, Y>{x, y});
    });
  }

  void scale(InOut x, double factor) override {
    with_stored_type(x, [&, this]<class T>(T) {
      this->elements("scale", x, rows::Scale<T>{matrix<T>(x), Wide<T>(factor)});
    });
  }

  void round_to_fp8(const Tensor& x, Fp8 format, Out y) override {
    if (x.numel() == 0) return;
    const auto scale = fp8_scale_of(x, format);
    this->elements("round_to_fp8", y,
                   rows::RoundToFp8{matrix<bf16>(x), matrix<bf16>(y), format, scale.data()});
  }

  void sum_squares(const Tensor& x, std::int64_t block, Out sums) override {
    with_stored_type(x, [&, this]<class T>(T) {
      this->each_row("sum_squares", sums->numel(),
                     rows::SumSquares<T>{data<T>(x), x.numel(), block, data<double>(sums)});
    });
  }

  void sum_in_order(const Tensor& x, std::int64_t block, Out sums) override {
    const rows::SumInOrder kernel{data<double>(x), x.numel(), block, data<double>(sums)};
    this->launch().run("sum_in_order", kernel.num_blocks(this->launch().lanes()), kernel);
  }

  void add_bias(const Tensor& bias, InOut y) override {
    with_stored_type(y, [&, this]<class T>(T) {
      this->elements("add_bias", y, rows::AddBias<T>{matrix<T>(y), data<T>(bias)});
    });
  }

  void residual(const Tensor& x, const Tensor& y, const Tensor& bias, Out out) override {
    with_stored_type(out, [&, this]<class T>(T) {
      this->elements("residual", out,
                     rows::Residual<T>{matrix<T>(x), matrix<T>(y), data<T>(bias), matrix<T>(out)});
    });
  }

  void bias_gradient(const Tensor& dy, InOut dbias) override {
    with_stored_type(dy, [&, this]<class T>(T) {
      this->add_column_sums("bias_gradient", dy.rows(), dy.cols(), rows::Element<T>{matrix<T>(dy)},
                            {{data<Wide<T>>(dbias)}});
    });
  }

  void layer_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, Out y, Out stats) override {
    with_stored_type(x, [&, this]<class T>(T) {
      using F = Wide<T>;
      this->each_row(
          "layer_norm", x,
          rows::LayerNorm<T>{matrix<T>(x), data<T>(w), data<T>(b), F(eps), matrix<T>(y), data<F>(stats)});
    });
  }

  void layer_norm_again(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& stats,
                        Out y) override {
    with_stored_type(x, [&, this]<class T>(T) {
      this->elements(
          "layer_norm_again", y,
          rows::LayerNormAgain<T>{matrix<T>(x), data<T>(w), data<T>(b), data<Wide<T>>(stats), matrix<T>(y)});
    });
  }

  void layer_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                                 InOut dx) override {
    with_stored_type(x, [&, this]<class T>(T) {
      this->each_row("layer_norm_backward_input", x,
                     rows::LayerNormBackwardInput<T>{matrix<T>(dy), matrix<T>(x), data<T>(w),
                                                     data<Wide<T>>(stats), matrix<T>(dx)});
    });
  }

  void layer_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw,
                                  InOut db) override {
    with_stored_type(x, [&, this]<class T>(T) {
      using F = Wide<T>;
      this->add_column_sums("layer_norm_backward_weight", x.rows(), x.cols(),
                            rows::LayerNormWeightTerms<T>{matrix<T>(dy), matrix<T>(x), data<F>(stats)},
                            {{data<F>(dw), data<F>(db)}});
    });
  }

  void rms_norm(const Tensor& x, const Tensor& w, double eps, Out y, Out stats) override {
    with_stored_type(x, [&, this]<class T>(T) {
      using F = Wide<T>;
      this->each_row("rms_norm", x,
                     rows::RmsNorm<T>{matrix<T>(x), data<T>(w), F(eps), matrix<T>(y), data<F>(stats)});
    });
  }

  void rms_norm_again(const Tensor& x, const Tensor& w, const Tensor& stats, Out y) override {
    with_stored_type(x, [&, this]<class T>(T) {
      this->elements("rms_norm_again", y,
                     rows::RmsNormAgain<T>{matrix<T>(x), data<T>(w), data<Wide<T>>(stats), matrix<T>(y)});
    });
  }

  void rms_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                               InOut dx) override {
    with_stored_type(x, [&, this]<class T>(T) {
      this->each_row("rms_norm_backward_input", x,
                     rows::RmsNormBackwardInput<T>{matrix<T>(dy), matrix<T>(x), data<T>(w),
                                                   data<Wide<T>>(stats), matrix<T>(dx)});
    });
  }

  void rms_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw) override {
    with_stored_type(x, [&, this]<class T>(T) {
      using F = Wide<T>;
      this->add_column_sums("rms_norm_backward_weight", x.rows(), x.cols(),
                            rows::RmsNormWeightTerm<T>{matrix<T>(dy), matrix<T>(x), data<F>(stats)},
                            {{data<F>(dw)}});
    });
  }

  void row_squares(const Tensor& x, Out squares) override {
    with_stored_type(x, [&, this]<class T>(T) {
      this->each_row("row_squares", x, rows::RowSquares<T>{matrix<T>(x), data<Wide<T>>(squares)});
    });
  }

  void rms_norm_of_squares(const Tensor& x, const Tensor& w, double eps, double columns, Out y,
                           InOut stats) override {
    with_stored_type(x, [&, this]<class T>(T) {
      using F = Wide<T>;
      this->each_row("rms_norm_of_squares", x,
                     rows::RmsNormOfSquares<T>{matrix<T>(x), data<T>(w), F(eps), F(columns), matrix<T>(y),
                                               data<F>(stats)});
    });
  }

  void rms_norm_backward_sums(const Tensor& dy, const Tensor& x, const Tensor& w, const Tensor& stats,
                              Out sums) override {
    with_stored_type(x, [&, this]<class T>(T) {
      this->each_row("rms_norm_backward_sums", x,
                     rows::RmsNormBackwardSums<T>{matrix<T>(dy), matrix<T>(x), data<T>(w),
                                                  data<Wide<T>>(stats), data<Wide<T>>(sums)});
    });
  }

  void rms_norm_backward_input_of_sums(const Tensor& dy, const Tensor& x, const Tensor& w,
                                       const Tensor& stats, const Tensor& sums, double columns,
                                       InOut dx) override {
    with_stored_type(x, [&, this]<class T>(T) {
      using F = Wide<T>;
      this->elements(
          "rms_norm_backward_input_of_sums", dx,
          rows::RmsNormBackwardInputOfSums<T>{matrix<T>(dy), matrix<T>(x), data<T>(w), data<F>(stats),
                                              data<F>(sums), F(columns), matrix<T>(dx)});
    });
  }

  void activate(Activation a, InOut h, const Tensor& bias, Out y) override {
    with_stored_type(h, [&, this]<class T>(T) {
      if (bias.defined())
        this->elements("activate", h, rows::ActivateBiased<T>{a, matrix<T>(h), data<T>(bias), matrix<T>(y)});
      else
        this->elements("activate", h, rows::Activate<T>{a, matrix<T>(h), matrix<T>(y)});
    });
  }

  void activate_backward(Activation a, InOut h, InOut dy) override {
    with_stored_type(h, [&, this]<class T>(T) {
      this->elements("activate_backward", h, rows::ActivateBackward<T>{a, matrix<T>(h), matrix<T>(dy)});
    });
  }

  void gated(Activation a, const Tensor& gate_up, Out y, const SwigluClamp& clamp) override {
    with_stored_type(y, [&, this]<class T>(T) {
      this->elements("gated", y, rows::Gated<T>{a, clamp, matrix<T>(gate_up), matrix<T>(y)});
    });
  }

  void gated_backward(Activation a, InOut gate_up, InOut dy, const SwigluClamp& clamp) override {
    with_stored_type(dy, [&, this]<class T>(T) {
      this->elements("gated_backward", dy,
                     rows::GatedBackward<T>{a, clamp, matrix<T>(gate_up), matrix<T>(dy)});
    });
  }

  void weighted_activation_backward(Activation a, InOut gate_up, InOut dy, const Tensor& weights,
                                    Out dweights, const SwigluClamp& clamp) override {
    with_stored_type(dy, [&, this]<class T>(T) {
      using F = Wide<T>;
      this->each_row("weighted_activation_backward", dy->rows(),
                     rows::WeightedActivationBackward<T>{a, clamp, matrix<T>(gate_up), matrix<T>(dy),
                                                         data<F>(weights), data<F>(dweights)});
    });
  }

  void attention_sink(const Tensor& sinks, const AttentionShape& s, InOut out, InOut lse) override {
    with_stored_type(out, [&, this]<class T>(T) {
      this->each_row("attention_sink", out->rows() * s.num_heads,
                     rows::AttentionSink<T>{data<T>(sinks),
                                            {s.batch, s.q_len, s.num_heads, s.head_dim},
                                            matrix<T>(out),
                                            data<Wide<T>>(lse)});
    });
  }

  void combine_rows(const Tensor& x, const Tensor& places, const Tensor& weights, Out y) override {
    with_stored_type(y, [&, this]<class T>(T) {
      this->elements("combine_rows", y,
                     rows::CombineRows<T>{matrix<T>(x), data<std::int32_t>(places), data<Wide<T>>(weights),
                                          y->rows() == 0 ? 0 : places.numel() / y->rows(), matrix<T>(y)});
    });
  }

  void rope(InOut x, std::int64_t head_dim, const Tensor& positions, const RopeTurns& turns,
            bool inverse) override {
    const auto frequencies = this->launch().upload(std::span(turns.frequencies));
    with_stored_type(x, [&, this]<class T>(T) {
      this->each_row("rope", x,
                     rows::Rope<T>{matrix<T>(x), head_dim, data<std::int32_t>(positions), frequencies.data(),
                                   std::ssize(turns.frequencies), turns.factor, turns.growth,
                                   turns.growth_length, inverse});
    });
  }

  void embedding(const Tensor& ids, const Tensor& table, std::int64_t first_id, Out y) override {
    with_stored_type(y, [&, this]<class T>(T) {
      this->elements("embedding", y,
                     rows::Embedding<T>{data<std::int32_t>(ids), matrix<T>(table), first_id, matrix<T>(y)});
    });
  }

  void embedding_backward(const Tensor& ids, const Tensor& dy, std::int64_t first_id, InOut dtable) override {
    with_stored_type(dy, [&, this]<class T>(T) {
      const rows::EmbeddingBackward<T> kernel{data<std::int32_t>(ids), matrix<T>(dy), first_id,
                                              matrix<Wide<T>>(dtable)};
      this->launch().run("embedding_backward", dy.rows(), kernel,
                         kernel.shared_bytes(this->launch().lanes()));
    });
  }

  void soft_cap(InOut x, double cap) override {
    with_float_type(x, [&, this]<class F>(F) {
      this->elements("soft_cap", x, rows::SoftCap<F>{matrix<F>(x), F(cap)});
    });
  }

  void row_max(const Tensor& logits, Out max) override {
    with_float_type(logits, [&, this]<class F>(F) {
      this->each_row("row_max", logits.rows(), rows::RowMax<F>{matrix<F>(logits), data<F>(max)});
    });
  }

  void exp_sum(InOut logits, const Tensor& max, const Tensor& targets, std::int64_t first_id, Out sum,
               Out target) override {
    with_float_type(logits, [&, this]<class F>(F) {
      this->each_row("exp_sum", logits->rows(),
                     rows::ExpSum<F>{matrix<F>(logits), data<F>(max), data<std::int32_t>(targets), first_id,
                                     data<F>(sum), data<F>(target)});
    });
  }

  void cross_entropy_backward(const Tensor& tp, const Tensor& sum, const Tensor& targets,
                              std::int64_t first_id, double loss_scale, Out tdlogits,
                              const LogitsCap& cap) override {
    this->with_pair(
        tp, tdlogits, [&, this]<class F, class T>(const rows::Matrix<F>& p, const rows::Matrix<T>& dlogits) {
          if constexpr (std::is_same_v<F, Wide<F>>)
            this->elements("cross_entropy_backward", tdlogits,
                           rows::CrossEntropyBackward<F, T>{p, data<F>(sum), data<std::int32_t>(targets),
                                                            first_id, F(loss_scale), dlogits, F(cap.cap),
                                                            cap.cap > 0 ? data<F>(cap.max) : nullptr});
        });
  }

  void adamw(InOut p, const Tensor& g, InOut m, InOut v, const AdamWStep& step, InOut remainder) override {
    with_weights(p, remainder, step.rounding, [&, this]<class Weights, class F>(const Weights& weights, F) {
      using M = std::conditional_t<std::is_same_v<Weights, rows::WeightsRoundedAtRandom>, bf16, F>;
      this->each_element(
          "adamw", 1, p->numel(),
          rows::AdamW<Weights, M>{weights, data<F>(g), data<M>(m), data<M>(v), numbers_of<F>(step)});
    });
  }

  void momentum(const Tensor& g, InOut m, Out update, const MomentumStep& step) override {
    with_stored_type(m, [&, this]<class M>(M) {
      using F = Wide<M>;
      const auto run = [&]<class T>(T) {
        this->each_element("momentum", 1, m->numel(),
                           rows::Momentum<M, T>{data<F>(g), data<M>(m), data<T>(update), F(step.momentum),
                                                F(step.gradient_scale)});
      };
      if constexpr (std::is_same_v<F, float>)
        if (update->dtype() == DType::bf16) return run(bf16());
      run(F());
    });
  }

  void step_weights(InOut p, const Tensor& update, const WeightStep& step, InOut remainder) override {
    with_weights(p, remainder, step.rounding, [&, this]<class Weights, class F>(const Weights& weights, F) {
      const auto run = [&]<class T>(T) {
        this->each_element(
            "step_weights", 1, p->numel(),
            rows::StepWeights<Weights, F, T>{weights, data<T>(update), F(1 - step.lr * step.weight_decay),
                                             F(step.lr * step.scale)});
      };
      if constexpr (std::is_same_v<F, float>)
        if (update.dtype() == DType::bf16) return run(bf16());
      run(F());
    });
  }

 protected:
  // Calls act(weights, F()) with the form in which weights are stored, and the type in which they are
  // updated.
  template <class Act>
  void with_weights(const Tensor& p, const Tensor& remainder, const StochasticRounding* rounding,
                    const Act& act) {
    if (rounding != nullptr) {
      std::vector<rows::PlacedRun> runs;
      std::int64_t first = 0;
      for (const LogicalRun& run : rounding->runs) {
        if (run.count > 0) runs.push_back({first, run.begin});
        first += run.count;
      }
      const auto placed = this->launch().upload(std::span<const rows::PlacedRun>(runs));
      return act(rows::WeightsRoundedAtRandom{data<bf16>(p), rounding->random.key(), placed.data(),
                                              std::ssize(runs)},
                 float());
    }
    if (remainder.defined())
      return act(rows::SplitWeights{data<bf16>(p), data<std::int16_t>(remainder)}, float());
    with_float_type(p, [&]<class F>(F) { act(rows::WholeWeights<F>{data<F>(p)}, F()); });
  }

  template <class F>
  static rows::AdamWNumbers<F> numbers_of(const AdamWStep& step) {
    const double t = static_cast<double>(step.step);
    return {.beta1 = F(step.beta1),
            .rest1 = F(1 - step.beta1),
            .beta2 = F(step.beta2),
            .rest2 = F(1 - step.beta2),
            .scale = F(step.gradient_scale),
            .rate = F(step.lr / (1 - std::pow(step.beta1, t))),
            .root_scale = F(1 / std::sqrt(1 - std::pow(step.beta2, t))),
            .eps = F(step.eps),
            .keep = F(1 - step.lr * step.weight_decay)};
  }

  // The fp8 scale of x (bf16, not empty), for kernels that follow.
  auto fp8_scale_of(const Tensor& x, Fp8 format) const {
    const auto largest = this->launch().template scratch<double>(x.rows());
    auto scale = this->launch().template scratch<rows::Fp8Scale>(1);
    this->each_row("largest", x.rows(),
                   rows::LargestOfRow<bf16, rows::Magnitude>{matrix<bf16>(x), {}, largest.data()});
    this->launch().run("fp8_scale", 1, rows::ChooseFp8Scale{largest.data(), x.rows(), format, scale.data()});
    return scale;
  }
  // Writes the codes of x (not empty) into its room; returns the scale.
  auto cast_to_fp8(const Tensor& x, bool turned, Fp8 format, const Tensor& room) const {
    auto scale = fp8_scale_of(x, format);
    const rows::CastToFp8 cast{matrix<bf16>(x), turned, reinterpret_cast<std::uint8_t*>(data<bf16>(room)),
                               format, scale.data()};
    this->launch().run("cast_to_fp8", cast.num_blocks(), cast, rows::CastToFp8::shared_bytes());
    return scale;
  }

  template <class T>
  rows::Matrix<T> matrix(const Tensor& t) const {
    return this->launch().template matrix<T>(t);
  }
  // Null for an undefined tensor.
  template <class T>
  T* data(const Tensor& t) const {
    return t.defined() ? this->launch().template data<T>(t) : nullptr;
  }
};

}  // namespace echelon
