// A matrix product with a parameter: y = x W. The bias is added where it fuses with what follows, so not
// here.
#pragma once

#include "layer/weight.h"
#include "spec/block.h"
#include "tensor/kernels.h"

namespace echelon {

class Linear {
 public:
  Linear() = default;
  // bias may be undefined; its gradient is the column sum of dy.
  Linear(Weight weight, Weight bias, WeightOrder order) : weight_(weight), bias_(bias), order_(order) {}

  const Tensor& bias() const { return bias_.value; }
  std::int64_t out_features() const { return weight_.value.dim(order_ == WeightOrder::in_out ? 1 : 0); }
  std::int64_t in_features() const { return weight_.value.dim(order_ == WeightOrder::in_out ? 0 : 1); }

  void forward(Kernels& kernels, const Tensor& x, const Tensor& y) const;  // x (N, in), y (N, out)
  void backward_input(Kernels& kernels, const Tensor& dy, const Tensor& dx,
                      bool accumulate = false) const;  // dx (N, in) overwritten, or added to
  // Adds to the gradients of weight and bias.
  void backward_weight(Kernels& kernels, const Tensor& x, const Tensor& dy) const;

 private:
  Weight weight_, bias_;
  WeightOrder order_ = WeightOrder::out_in;
};

}  // namespace echelon
