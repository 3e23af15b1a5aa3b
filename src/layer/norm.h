// LayerNorm or RMSNorm over the last dimension, by family.
#pragma once

#include "layer/weight.h"
#include "tensor/kernels.h"

namespace echelon {

class Norm {
 public:
  Norm() = default;
  // With a bias: LayerNorm. Without: RMSNorm.
  Norm(Weight weight, Weight bias, double eps) : weight_(weight), bias_(bias), eps_(eps) {}

  // Columns of the stats that forward leaves for the backward pass: mean and rstd, or rstd.
  std::int64_t stats_width() const { return bias_.defined() ? 2 : 1; }

  void forward(Kernels& kernels, const Tensor& x, const Tensor& y, const Tensor& stats) const;  // x, y (N, C)
  // y once more from x and stats, cheaper to compute than to keep.
  void forward_again(Kernels& kernels, const Tensor& x, const Tensor& stats, const Tensor& y) const;
  // dx += ; dx holds the gradient of the residual branch.
  void backward_input(Kernels& kernels, const Tensor& dy, const Tensor& x, const Tensor& stats,
                      const Tensor& dx) const;
  void backward_weight(Kernels& kernels, const Tensor& dy, const Tensor& x, const Tensor& stats) const;

 private:
  Weight weight_, bias_;
  double eps_ = 1e-5;
};

}  // namespace echelon
