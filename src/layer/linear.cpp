#include "layer/linear.h"

namespace echelon {

static Transpose transposed_if(bool yes) { return yes ? Transpose::yes : Transpose::no; }

void Linear::forward(Kernels& kernels, const Tensor& x, const Tensor& y) const {
  kernels.matmul(x, Transpose::no, weight_.value, transposed_if(order_ == WeightOrder::out_in), y, false);
}

void Linear::backward_input(Kernels& kernels, const Tensor& dy, const Tensor& dx, bool accumulate) const {
  kernels.matmul(dy, Transpose::no, weight_.value, transposed_if(order_ == WeightOrder::in_out), dx,
                 accumulate);
}

void Linear::backward_weight(Kernels& kernels, const Tensor& x, const Tensor& dy) const {
  if (order_ == WeightOrder::in_out)
    kernels.matmul(x, Transpose::yes, dy, Transpose::no, weight_.gradient, true);
  else
    kernels.matmul(dy, Transpose::yes, x, Transpose::no, weight_.gradient, true);
  if (bias_.defined()) kernels.bias_gradient(dy, bias_.gradient);
}

}  // namespace echelon
