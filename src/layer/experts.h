// The MLPs (SwiGLU) of several experts on tokens that are sorted by expert: the products of all of them are
// one call.
#pragma once

#include <cstdint>
#include <vector>

#include "layer/weight.h"
#include "tensor/kernels.h"

namespace echelon {

class ExpertMlps {
 public:
  // Rows [bounds[e], bounds[e + 1]) belong to expert e, which may have none; rows after the last bound are
  // neither read nor written.
  using Bounds = std::vector<std::int64_t>;

  ExpertMlps() = default;
  // in[e] (2F, C), [gate | up]; out[e] (C, F): both as stored, (out, in).
  ExpertMlps(std::vector<Weight> in, std::vector<Weight> out) : in_(std::move(in)), out_(std::move(out)) {}

  std::int64_t size() const { return static_cast<std::int64_t>(in_.size()); }
  std::int64_t hidden_width() const { return in_.front().value.dim(0); }
  std::int64_t activated_width() const { return out_.front().value.dim(1); }

  // x (M, C) -> hidden (M, 2F); hidden -> activated (M, F); activated -> y (M, C).
  void in_forward(Kernels& kernels, const Bounds& bounds, const Tensor& x, const Tensor& hidden) const;
  void activate(Kernels& kernels, const Bounds& bounds, const Tensor& hidden, const Tensor& activated) const;
  void out_forward(Kernels& kernels, const Bounds& bounds, const Tensor& activated, const Tensor& y) const;

  // For the sum of weights[row] y[row]: dy (M, C) is the gradient of that row's sum, and what in_forward and
  // out_forward have to do with the weights is moved to the activation, so that y is not needed again.
  // dy -> d_activated (M, F)...
  void out_backward_input(Kernels& kernels, const Bounds& bounds, const Tensor& dy,
                          const Tensor& d_activated) const;
  // ... in place, hidden becomes its gradient and d_activated the weighted activation, with d_weights (M,
  // 1)...
  void activate_backward(Kernels& kernels, const Bounds& bounds, const Tensor& hidden,
                         const Tensor& d_activated, const Tensor& weights, const Tensor& d_weights) const;
  // ... which with dy gives the gradient of the weights of `out`...
  void out_backward_weight(Kernels& kernels, const Bounds& bounds, const Tensor& activated,
                           const Tensor& dy) const;
  // ... and d_hidden -> dx (M, C), and with x the gradient of the weights of `in`.
  void in_backward_input(Kernels& kernels, const Bounds& bounds, const Tensor& d_hidden,
                         const Tensor& dx) const;
  void in_backward_weight(Kernels& kernels, const Bounds& bounds, const Tensor& x,
                          const Tensor& d_hidden) const;

 private:
  std::vector<Weight> in_, out_;
};

}  // namespace echelon
