#include "layer/mlp.h"

namespace echelon {

void Mlp::activate(Kernels& kernels, const Tensor& hidden, const Tensor& activated) const {
  if (!is_gated(activation_))
    kernels.activate(activation_, hidden, in_.bias(), activated);
  else
    kernels.swiglu(hidden, activated);
}

Mlp::Gradients Mlp::activate_backward(Kernels& kernels, const Tensor& hidden,
                                      const Tensor& d_activated) const {
  if (!is_gated(activation_)) {
    kernels.activate_backward(activation_, hidden, d_activated);
    return {hidden, d_activated};
  }
  kernels.swiglu_backward(hidden, d_activated);
  return {d_activated, hidden};
}

}  // namespace echelon
