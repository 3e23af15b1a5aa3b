// Passes over rows of floats, compiled for several instruction sets and chosen at run time (Highway). Each
// pass reads and writes every element once, so that a kernel with one pass runs at memory speed.
// Single-threaded, without allocation; the order of each sum depends on n alone.
//
// T, float or bf16, is the stored type; all arithmetic is in float, and a bf16 is rounded to nearest once,
// when it is stored. Pointers are to n elements unless noted; none needs to be aligned.
#pragma once

#include <cstdint>
#include <functional>

#include "base/bf16.h"
#include "base/fp8.h"
#include "spec/activation.h"

namespace echelon {

// Copies, sums and products of elements: simd_elements.cpp.
template <class T>
struct ElementSimd {
  using Size = std::int64_t;

  void (*add)(const T* x, T* y, Size n);                           // y += x
  void (*add_to_wide)(const T* x, float* y, Size n);               // likewise
  void (*add_wide)(const float* x, T* y, Size n);                  // likewise
  void (*add_scaled)(const T* x, float factor, float* y, Size n);  // y += factor x
  void (*widen)(const T* x, float* y, Size n);                     // y = x
  void (*narrow)(const float* x, T* y, Size n);                    // y = x
  void (*scale)(const T* x, float factor, T* y, Size n);           // y = factor x; y may be x
  void (*scale_wide)(const float* x, float factor, T* y, Size n);  // likewise; y may be x if it is as wide
  double (*sum_squares)(const T* x, Size n);
  bool (*all_finite)(const T* x, Size n);
  // high and low = the sums of the digits of scale x^2 (rows::exact_square), which doubles hold exactly for
  // up to 2^20 elements.
  void (*sum_squares_exactly)(const T* x, double scale, Size n, double* high, double* low);
  // In magnitude; NaN if any element is NaN.
  float (*largest)(const T* x, Size n);
  // y = rounded_to_fp8(scale x) / scale; the scale is a power of two, or NaN.
  void (*round_to_fp8)(const T* x, float scale, Fp8 format, T* y, Size n);
  float (*dot)(const T* x, const T* y, Size n);
  // out = x + y + bias (bias may be null); out may be x or y.
  void (*residual)(const T* x, const T* y, const T* bias, T* out, Size n);
  // sum += column sums over `rows` rows, `stride` apart.
  void (*column_sums)(const T* x, Size stride, Size rows, float* sum, Size n);
  // Rotates (low[i], high[i]) by the angle with this cosine and sign * sine.
  void (*rotate)(T* low, T* high, const float* cosine, const float* sine, float sign, Size n);
};

// The inputs of a gated short convolution for one row: [B | C | x] of `width` channels each, with
// neighbouring rows `stride` apart; and the taps of all channels for the row itself, for the one before, and
// so on.
template <class T>
struct ConvolvedRow {
  const T* given;
  std::int64_t stride, width;
  const float* taps;    // undefined for a weight's gradient
  std::int64_t before;  // rows that it sees, its own included
};

// simd_short_convolution.cpp.
template <class T>
struct ShortConvolutionSimd {
  using Size = std::int64_t;

  // y = C times the convolution of B x.
  void (*short_convolution)(const ConvolvedRow<T>& row, T* y);
  // From dy, with rows dy_stride apart, of this row and of the `seen_by` later rows that see it: the gradient
  // of this row's inputs, and y once more.
  void (*short_convolution_backward)(const ConvolvedRow<T>& row, const T* dy, Size dy_stride, Size seen_by,
                                     T* d_given, T* y);
  // sums[k n ...] += the row's contribution to the gradients of taps, for n channels that begin at the
  // pointers.
  void (*short_convolution_taps)(const ConvolvedRow<T>& row, const T* dy, float* sums, Size n);
};

// LayerNorm and RMSNorm: simd_norms.cpp.
template <class T>
struct NormSimd {
  using Size = std::int64_t;

  // stats[0] = mean, stats[1] = rstd. w and b may be null: ones and zeros; no b without w.
  void (*layer_norm)(const T* x, const T* w, const T* b, float eps, T* y, float* stats, Size n);
  void (*layer_norm_again)(const T* x, const T* w, const T* b, const float* stats, T* y, Size n);
  // dx += gradient through the norm.
  void (*layer_norm_dx)(const T* dy, const T* x, const T* w, const float* stats, T* dx, Size n);
  // dw += column sums of dy * xhat, db += column sums of dy, over `rows` rows with these strides.
  void (*layer_norm_dw)(const T* dy, Size dy_stride, const T* x, Size x_stride, const float* stats, Size rows,
                        float* dw, float* db, Size n);
  // stats[0] = rstd.
  void (*rms_norm)(const T* x, const T* w, float eps, T* y, float* stats, Size n);
  void (*rms_norm_again)(const T* x, const T* w, const float* stats, T* y, Size n);
  void (*rms_norm_dx)(const T* dy, const T* x, const T* w, const float* stats, T* dx, Size n);
  // Its two halves, for some columns of a row: the sum of dy w x rstd, and dx += given its mean over the row.
  float (*rms_norm_dx_sum)(const T* dy, const T* x, const T* w, float rstd, Size n);
  void (*rms_norm_dx_of)(const T* dy, const T* x, const T* w, float rstd, float mean, T* dx, Size n);
  void (*rms_norm_dw)(const T* dy, Size dy_stride, const T* x, Size x_stride, const float* stats, Size rows,
                      float* dw, Size n);
};

// alpha and limit are for clamped_swiglu only.
template <class T>
struct GatedPasses {
  void (*forward)(const T* gate, const T* up, T* y, std::int64_t n, float alpha, float limit);
  // gate and up become their gradients, dy becomes y.
  void (*backward)(T* gate, T* up, T* dy, std::int64_t n, float alpha, float limit);
};
template <class T>
using WideGatedBackward = void(T* gate, T* up, float* dy, std::int64_t n, float alpha, float limit);
template <class T>
struct ActivationPasses {
  // h += bias (may be null), y = a(h).
  void (*forward)(T* h, const T* bias, T* y, std::int64_t n);
  // h becomes a(h), dy becomes the gradient of h.
  void (*backward)(T* h, T* dy, std::int64_t n);
};

// simd_activations.cpp.
template <class T>
struct ActivationSimd {
  using Size = std::int64_t;

  // For an activation without a gate.
  ActivationPasses<T> (*activation)(Activation a);
  GatedPasses<T> (*gated)(Activation a);                       // for one with a gate
  WideGatedBackward<T>* (*gated_backward_wide)(Activation a);  // for swiglu and clamped_swiglu
  // xIELU with its two numbers (rows::XieluOf). Backward, h becomes y, dy becomes the gradient of h, and the
  // sums are of dy times the factor of each number.
  void (*xielu)(const T* h, float above, float below, T* y, Size n);
  void (*xielu_backward)(T* h, T* dy, float above, float below, float* sum_above, float* sum_below, Size n);
  // y = x sigmoid(gate). Backward, gate and dy become the gradients of gate and of x.
  void (*sigmoid_gate)(const T* x, const T* gate, T* y, Size n);
  void (*sigmoid_gate_backward)(const T* x, T* gate, T* dy, T* y, Size n);
};

// The softmax of attention, and its gradient: simd_softmax.cpp.
template <class T>
struct SoftmaxSimd {
  using Size = std::int64_t;

  // A row of a tile of attention scores s, of which the first `visible` are seen; max and sum are the row's
  // so far. p = exp(s - new max), 0 beyond `visible` up to n; updates max and sum; returns exp(old max - new
  // max). p may be s. Both need space up to a multiple of 64 elements.
  float (*softmax_row)(const float* s, Size visible, Size n, float* max, float* sum, T* p);
  // p = exp(s - lse), ds = p (dp - delta); both 0 beyond `visible` up to n. They may be s and dp. Space as
  // above.
  void (*softmax_gradient_row)(const float* s, const float* dp, Size visible, Size n, float lse, float delta,
                               T* p, T* ds);
  // The same with a soft cap: the softmax saw cap tanh(s / cap); ds is the gradient of s.
  void (*capped_softmax_gradient_row)(const float* s, const float* dp, Size visible, Size n, float lse,
                                      float delta, float cap, T* p, T* ds);
  // y = factor p (1 - (l / cap)^2), l = max + log(p); y may be p if it is as wide.
  void (*scale_capped)(const float* p, float factor, float max, float cap, T* y, Size n);
};

template <class T>
struct Simd : ElementSimd<T>, ShortConvolutionSimd<T>, NormSimd<T>, ActivationSimd<T>, SoftmaxSimd<T> {};

// The softmax of logits, which are f32 in any precision: simd_softmax.cpp, too.
struct LogitsSimd {
  using Size = std::int64_t;

  float (*max)(const float* x, Size n);
  void (*soft_cap)(float* x, float cap, Size n);  // x becomes cap tanh(x / cap)
  // Subtracts slope (first - i step) from x[i]: what ALiBi takes off scores. The distances are below 2^24.
  void (*lower)(float* x, float slope, Size first, Size step, Size n);
  // x becomes exp(x - max); returns the sum.
  float (*exp_sum)(float* x, float max, Size n);
};

// AdamW's factors, the same for all elements of a step.
struct AdamWFactors {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float gradient_scale;
  float decay;       // 1 - lr * weight_decay
  float rate;        // lr / (1 - beta1^step)
  float root_scale;  // 1 / sqrt(1 - beta2^step)
  float eps;
};

// simd_updates.cpp.
struct UpdateSimd {
  using Size = std::int64_t;

  void (*adamw)(float* p, const float* g, float* m, float* v, const AdamWFactors& factors, Size n);
  // p and its remainders are the weights in f32 (base/split_weight.h).
  void (*adamw_split)(bf16* p, std::int16_t* remainder, const float* g, float* m, float* v,
                      const AdamWFactors& factors, Size n);
  // p is rounded by the upper half of its word of `random` (bf16::stochastic), v by the lower half, m to
  // nearest.
  void (*adamw_at_random)(bf16* p, const float* g, bf16* m, bf16* v, const std::uint32_t* random,
                          const AdamWFactors& factors, Size n);

  // Kernels::momentum and Kernels::step_weights, in each form of storage.
  void (*momentum)(const float* g, float* m, float* update, float momentum, float gradient_scale, Size n);
  void (*momentum_to_bf16)(const float* g, float* m, bf16* update, float momentum, float gradient_scale,
                           Size n);
  void (*momentum_in_bf16)(const float* g, bf16* m, bf16* update, float momentum, float gradient_scale,
                           Size n);
  void (*step_weights)(float* p, const float* update, float keep, float rate, Size n);
  void (*step_weights_split)(bf16* p, std::int16_t* remainder, const bf16* update, float keep, float rate,
                             Size n);
  void (*step_weights_at_random)(bf16* p, const bf16* update, const std::uint32_t* random, float keep,
                                 float rate, Size n);
};

// Passes over numbers that are f32 in any precision.
struct WideSimd : LogitsSimd, UpdateSimd {};

// The passes for this processor.
template <class T>
const Simd<T>& simd();
template <>
const Simd<float>& simd<float>();
template <>
const Simd<bf16>& simd<bf16>();
const WideSimd& wide_simd();

// The instruction set of these passes: "AVX-512", "AVX2" or another of Highway's names.
const char* instruction_set();

// For tests: calls body(name) for each instruction set that has passes and that this processor supports, as
// if there were no better one.
void on_each_instruction_set(const std::function<void(const char* name)>& body);

}  // namespace echelon
