// Passes over rows of floats, compiled for several instruction sets and chosen at run time (Highway). Each
// reads and writes every element once, so that a kernel made of one pass runs at the speed of memory. One
// thread, no allocation; what a sum adds in which order depends on n alone.
#pragma once

#include <cstdint>

#include "spec/activation.h"

namespace echelon {

// What AdamW multiplies by, the same for all elements of a step.
struct AdamWFactors {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float gradient_scale;
  float decay;       // 1 - lr * weight_decay
  float rate;        // lr / (1 - beta1^step)
  float root_scale;  // 1 / sqrt(1 - beta2^step)
  float eps;
};

// All pointers are to n floats unless said otherwise; none needs to be aligned.
struct Simd {
  using Size = std::int64_t;

  void (*add)(const float* x, float* y, Size n);                       // y += x
  void (*add_scaled)(const float* x, float factor, float* y, Size n);  // y += factor x
  void (*scale)(float* x, float factor, Size n);
  double (*sum_squares)(const float* x, Size n);
  bool (*all_finite)(const float* x, Size n);
  float (*dot)(const float* x, const float* y, Size n);
  // out = x + y + bias (bias may be null); out may be x or y.
  void (*residual)(const float* x, const float* y, const float* bias, float* out, Size n);
  // sum += column sums over `rows` rows that stand `stride` apart.
  void (*column_sums)(const float* x, Size stride, Size rows, float* sum, Size n);

  // stats[0] = mean, stats[1] = rstd.
  void (*layer_norm)(const float* x, const float* w, const float* b, float eps, float* y, float* stats,
                     Size n);
  void (*layer_norm_again)(const float* x, const float* w, const float* b, const float* stats, float* y,
                           Size n);
  // dx += gradient through the norm.
  void (*layer_norm_dx)(const float* dy, const float* x, const float* w, const float* stats, float* dx,
                        Size n);
  // dw += column sums of dy * xhat, db += column sums of dy, over `rows` rows that stand their stride apart.
  void (*layer_norm_dw)(const float* dy, Size dy_stride, const float* x, Size x_stride, const float* stats,
                        Size rows, float* dw, float* db, Size n);
  // stats[0] = rstd.
  void (*rms_norm)(const float* x, const float* w, float eps, float* y, float* stats, Size n);
  void (*rms_norm_again)(const float* x, const float* w, const float* stats, float* y, Size n);
  void (*rms_norm_dx)(const float* dy, const float* x, const float* w, const float* stats, float* dx, Size n);
  void (*rms_norm_dw)(const float* dy, Size dy_stride, const float* x, Size x_stride, const float* stats,
                      Size rows, float* dw, Size n);

  // Of an activation a without a gate.
  struct ActivationPasses {
    // h += bias (may be null), y = a(h).
    void (*forward)(float* h, const float* bias, float* y, Size n);
    // h becomes a(h), dy becomes the gradient of h.
    void (*backward)(float* h, float* dy, Size n);
  };
  ActivationPasses (*activation)(Activation a);
  void (*swiglu)(const float* gate, const float* up, float* y, Size n);
  // gate and up become their gradients, dy becomes y.
  void (*swiglu_backward)(float* gate, float* up, float* dy, Size n);
  // Turns (low[i], high[i]) by the angle of (cosine[i], sign * sine[i]).
  void (*rotate)(float* low, float* high, const float* cosine, const float* sine, float sign, Size n);

  float (*max)(const float* x, Size n);
  // x becomes exp(x - max); returns the sum.
  float (*exp_sum)(float* x, float max, Size n);
  void (*adamw)(float* p, const float* g, float* m, float* v, const AdamWFactors& factors, Size n);

  // One row of a tile of attention scores, of which the first `visible` may be seen; max and sum are the
  // row's so far. s becomes exp(s - new max), 0 where not visible up to n; max and sum are updated; returns
  // exp(old max - new max). s must have room up to a multiple of 64 floats.
  float (*softmax_row)(float* s, Size visible, Size n, float* max, float* sum);
  // s becomes p = exp(s - lse), dp becomes p (dp - delta); both 0 where not visible up to n. Room as above.
  void (*softmax_gradient_row)(float* s, float* dp, Size visible, Size n, float lse, float delta);
};

// The passes for this processor.
const Simd& simd();

}  // namespace echelon
