#include "layer/norm.h"

namespace echelon {

void Norm::forward(Kernels& kernels, const Tensor& x, const Tensor& y, const Tensor& stats) const {
  if (bias_.defined())
    kernels.layer_norm(x, weight_.value, bias_.value, eps_, y, stats);
  else
    kernels.rms_norm(x, weight_.value, eps_, y, stats);
}

void Norm::forward_again(Kernels& kernels, const Tensor& x, const Tensor& stats, const Tensor& y) const {
  if (bias_.defined())
    kernels.layer_norm_again(x, weight_.value, bias_.value, stats, y);
  else
    kernels.rms_norm_again(x, weight_.value, stats, y);
}

void Norm::backward_input(Kernels& kernels, const Tensor& dy, const Tensor& x, const Tensor& stats,
                          const Tensor& dx) const {
  if (bias_.defined())
    kernels.layer_norm_backward_input(dy, x, weight_.value, stats, dx);
  else
    kernels.rms_norm_backward_input(dy, x, weight_.value, stats, dx);
}

void Norm::backward_weight(Kernels& kernels, const Tensor& dy, const Tensor& x, const Tensor& stats) const {
  if (bias_.defined())
    kernels.layer_norm_backward_weight(dy, x, stats, weight_.gradient, bias_.gradient);
  else
    kernels.rms_norm_backward_weight(dy, x, stats, weight_.gradient);
}

}  // namespace echelon
