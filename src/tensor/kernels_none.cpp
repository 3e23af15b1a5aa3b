// The kernels of a dry run.
#include "tensor/kernel_backend.h"

namespace echelon {
namespace {

class NoneKernels final : public KernelBackend {
 public:
  NoneKernels(Arena& arena, std::int64_t scratch_bytes)
      : scratch_(arena, MemoryCategory::other, DType::u8, {scratch_bytes}) {}

  void matmul(const Tensor&, Transpose, const Tensor&, Transpose, Out, bool) override {}
  void grouped_matmul(std::span<const MatrixProduct>) override {}
  void fill(Out, double) override {}
  void copy(const Tensor&, Out) override {}
  void add(const Tensor&, InOut) override {}
  void scale(InOut, double) override {}
  void sum_squares(const Tensor&, std::int64_t, Out) override {}
  bool all_finite(const Tensor&) override { return true; }
  void add_bias(const Tensor&, InOut) override {}
  void residual(const Tensor&, const Tensor&, const Tensor&, Out) override {}
  void bias_gradient(const Tensor&, InOut) override {}
  void layer_norm(const Tensor&, const Tensor&, const Tensor&, double, Out, Out) override {}
  void layer_norm_again(const Tensor&, const Tensor&, const Tensor&, const Tensor&, Out) override {}
  void layer_norm_backward_input(const Tensor&, const Tensor&, const Tensor&, const Tensor&, InOut) override {
  }
  void layer_norm_backward_weight(const Tensor&, const Tensor&, const Tensor&, InOut, InOut) override {}
  void rms_norm(const Tensor&, const Tensor&, double, Out, Out) override {}
  void rms_norm_again(const Tensor&, const Tensor&, const Tensor&, Out) override {}
  void rms_norm_backward_input(const Tensor&, const Tensor&, const Tensor&, const Tensor&, InOut) override {}
  void rms_norm_backward_weight(const Tensor&, const Tensor&, const Tensor&, InOut) override {}
  void activate(Activation, InOut, const Tensor&, Out) override {}
  void activate_backward(Activation, InOut, InOut) override {}
  void swiglu(const Tensor&, Out) override {}
  void swiglu_backward(InOut, InOut) override {}
  void weighted_swiglu_backward(InOut, InOut, const Tensor&, Out) override {}
  void rope(InOut, std::int64_t, const Tensor&, double, bool) override {}
  void attention(const Tensor&, const Tensor&, const Tensor&, const AttentionShape&, Out, Out) override {}
  void attention_delta(const Tensor&, const Tensor&, const AttentionShape&, Out) override {}
  void attention_backward(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                          const Tensor&, const AttentionShape&, Out, Out, Out) override {}
  void embedding(const Tensor&, const Tensor&, std::int64_t, Out) override {}
  void embedding_backward(const Tensor&, const Tensor&, std::int64_t, InOut) override {}
  void combine_rows(const Tensor&, const Tensor&, const Tensor&, Out) override {}
  void row_max(const Tensor&, Out) override {}
  void exp_sum(InOut, const Tensor&, const Tensor&, std::int64_t, Out, Out) override {}
  void cross_entropy_backward(const Tensor&, const Tensor&, const Tensor&, std::int64_t, double,
                              Out) override {}
  void adamw(InOut, const Tensor&, InOut, InOut, const AdamWStep&, Out) override {}
  void add_losses(const Tensor&, const Tensor&, const Tensor&, InOut) override {}
  void add_number(const Tensor&, InOut) override {}
  void route(const TokenRouter&, const Tensor&, std::span<const double>, Out, Out) override {}
  void weigh_routes(const TokenRouter&, const Tensor&, const Tensor&, Out) override {}
  void route_backward(const TokenRouter&, const Tensor&, const Tensor&, const Tensor&, const RouterLosses&,
                      double, Out) override {}
  void add_router_losses(const TokenRouter&, const Tensor&, const RouterLosses&, InOut) override {}
  void count_routed(const TokenRouter&, const Tensor&, std::int64_t, Out) override {}
  void drop_over_capacity(const Tensor&, const Tensor&, const ExpertCapacity&, Out) override {}
  void sort_by_expert(const Tensor&, Out, Out, Out) override {}
  void pack_choices(const Tensor&, const Tensor&, Out) override {}
  void unpack_choices(const Tensor&, std::span<const std::int64_t>, Out, Out) override {}
  void take_ids(const Tensor&, std::span<const std::int64_t>, Out) override {}
  void place_weights(const Tensor&, const Tensor&, InOut) override {}
  void pack_gradient(CompressionKind, const GradientBucket&, Range, std::span<const Philox>, const Tensor&,
                     Out) override {}
  void unpack_gradient(CompressionKind, const GradientBucket&, Range, const Tensor&, bool, Out) override {}
  void take_largest(InOut, std::int64_t, Out, Out) override {}
  void add_at(const Tensor&, const Tensor&, InOut) override {}
  void orthonormalize_rows(InOut, const Philox&) override {}
  void first_keys(const Tensor&, std::int64_t, std::int64_t, std::int64_t, Out) override {}

 private:
  const Tensor scratch_;
};

}  // namespace

std::unique_ptr<Kernels> make_none_kernels(Arena& arena, std::int64_t scratch_bytes) {
  return std::make_unique<Kernels>(std::make_shared<NoneKernels>(arena, scratch_bytes));
}

}  // namespace echelon
