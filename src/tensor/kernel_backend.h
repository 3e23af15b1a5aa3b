// What computes the kernels: the seam between Echelon and a machine. kernels_reference.cpp is plain loops in
// any float type, kernels_cpu.cpp oneDNN and SIMD in f32, kernels_none.cpp nothing at all. Functions and
// arguments are those of Kernels, which has checked shapes and dtypes; where a backend has not every dtype,
// it checks for its own.
#pragma once

#include "tensor/kernels.h"

namespace echelon {

class KernelBackend {
 public:
  KernelBackend() = default;
  virtual ~KernelBackend() = default;
  KernelBackend(const KernelBackend&) = delete;
  KernelBackend& operator=(const KernelBackend&) = delete;

  virtual void matmul(const Tensor& a, Transpose ta, const Tensor& b, Transpose tb, Out c,
                      bool accumulate) = 0;
  virtual void grouped_matmul(std::span<const MatrixProduct> products) = 0;
  virtual void fill(Out x, double value) = 0;
  virtual void copy(const Tensor& from, Out to) = 0;
  virtual void add(const Tensor& x, InOut y) = 0;
  virtual void scale(InOut x, double factor) = 0;
  virtual void sum_squares(const Tensor& x, std::int64_t block, Out sums) = 0;
  virtual bool all_finite(const Tensor& x) = 0;
  virtual void add_bias(const Tensor& bias, InOut y) = 0;
  virtual void residual(const Tensor& x, const Tensor& y, const Tensor& bias, Out out) = 0;
  virtual void bias_gradient(const Tensor& dy, InOut dbias) = 0;
  virtual void layer_norm(const Tensor& x, const Tensor& w, const Tensor& b, double eps, Out y,
                          Out stats) = 0;
  virtual void layer_norm_again(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& stats,
                                Out y) = 0;
  virtual void layer_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w,
                                         const Tensor& stats, InOut dx) = 0;
  virtual void layer_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw,
                                          InOut db) = 0;
  virtual void rms_norm(const Tensor& x, const Tensor& w, double eps, Out y, Out stats) = 0;
  virtual void rms_norm_again(const Tensor& x, const Tensor& w, const Tensor& stats, Out y) = 0;
  virtual void rms_norm_backward_input(const Tensor& dy, const Tensor& x, const Tensor& w,
                                       const Tensor& stats, InOut dx) = 0;
  virtual void rms_norm_backward_weight(const Tensor& dy, const Tensor& x, const Tensor& stats, InOut dw) = 0;
  virtual void gelu(InOut h, const Tensor& bias, Out y) = 0;
  virtual void gelu_backward(InOut h, InOut dy) = 0;
  virtual void swiglu(const Tensor& gate_up, Out y) = 0;
  virtual void swiglu_backward(InOut gate_up, InOut dy) = 0;
  virtual void weighted_swiglu_backward(InOut gate_up, InOut dy, const Tensor& weights, Out dweights) = 0;
  virtual void rope(InOut x, std::int64_t head_dim, const Tensor& positions, double theta, bool inverse) = 0;
  virtual void attention(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
                         Out out, Out lse) = 0;
  virtual void attention_delta(const Tensor& out, const Tensor& dout, const AttentionShape& shape,
                               Out delta) = 0;
  virtual void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dout,
                                  const Tensor& lse, const Tensor& delta, const AttentionShape& shape, Out dq,
                                  Out dk, Out dv) = 0;
  virtual void embedding(const Tensor& ids, const Tensor& table, std::int64_t first_id, Out y) = 0;
  virtual void embedding_backward(const Tensor& ids, const Tensor& dy, std::int64_t first_id,
                                  InOut dtable) = 0;
  virtual void combine_rows(const Tensor& x, const Tensor& places, const Tensor& weights, Out y) = 0;
  virtual void row_max(const Tensor& logits, Out max) = 0;
  virtual void exp_sum(InOut logits, const Tensor& max, const Tensor& targets, std::int64_t first_id, Out sum,
                       Out target) = 0;
  virtual void cross_entropy_backward(const Tensor& p, const Tensor& sum, const Tensor& targets,
                                      std::int64_t first_id, double loss_scale, Out dlogits) = 0;
  virtual void adamw(InOut p, const Tensor& g, InOut m, InOut v, const AdamWStep& step, Out rounded) = 0;
};

}  // namespace echelon
