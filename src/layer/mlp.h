// The feed-forward layer between its two matrix products: GELU (GPT-2) or SwiGLU (Llama) and its gradient.
#pragma once

#include "layer/linear.h"

namespace echelon {

class Mlp {
 public:
  Mlp() = default;
  // `in` maps C to F (GELU) or to [gate | up] of 2F (SwiGLU); `out` maps F to C. The bias of `out` is not
  // added here.
  Mlp(Linear in, Linear out, Activation activation) : in_(in), out_(out), activation_(activation) {}

  const Linear& in() const { return in_; }
  const Linear& out() const { return out_; }
  std::int64_t hidden_width() const { return in_.out_features(); }
  std::int64_t activated_width() const { return out_.in_features(); }

  // hidden (N, F or 2F) is the product of `in`; on exit it is what the backward pass needs. activated (N, F).
  void activate(Kernels& kernels, const Tensor& hidden, const Tensor& activated) const;

  struct Gradients {
    Tensor activated;  // the activation's output again, input of `out`
    Tensor d_hidden;   // gradient of `hidden`
  };
  // In place: the two buffers change roles, no third one is needed.
  Gradients activate_backward(Kernels& kernels, const Tensor& hidden, const Tensor& d_activated) const;

 private:
  Linear in_, out_;
  Activation activation_ = Activation::gelu;
};

}  // namespace echelon
