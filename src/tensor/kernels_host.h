// Kernels that are the same plain loops wherever the host computes: small or memory-bound, or work that
// decides what is computed next. The reference kernels and the CPU kernels are these and their own.
#pragma once

#include "tensor/kernel_backend.h"

namespace echelon {

class HostBackend : public KernelBackend {
 public:
  double largest(const Tensor& x) final;
  ExactSum sum_squares_exactly(const Tensor& x, double scale) final;

  void first_keys(const Tensor& starts, std::int64_t first_position, std::int64_t stride, std::int64_t count,
                  Out first) final;

  void merge_softmax(const Tensor& parts, const Tensor& targets, std::span<const std::int64_t> bounds,
                     Out sum, Out target, Out scales, Out shares) final;
  void merge_gradients(std::span<const Tensor> means, std::span<const Tensor> shares,
                       std::span<const Tensor> of_targets, const Tensor& targets, double factor, Out y) final;
  void add_losses(const Tensor& sum, const Tensor& target, const Tensor& targets, InOut loss) final;
  void add_number(const Tensor& x, InOut y) final;

  void route(const TokenRouter& router, const Tensor& logits, std::span<const double> bias, Out ids,
             Out weights) final;
  void weigh_routes(const TokenRouter& router, const Tensor& logits, const Tensor& ids, Out weights) final;
  void route_backward(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                      const Tensor& d_weights, const RouterLosses& losses, double loss_scale,
                      Out d_logits) final;
  void add_router_losses(const TokenRouter& router, const Tensor& logits, const RouterLosses& losses,
                         InOut loss) final;
  void count_routed(const TokenRouter& router, const Tensor& ids, std::int64_t scopes, Out counts) final;
  void drop_over_capacity(const Tensor& ids, const Tensor& weights, const ExpertCapacity& capacity,
                          Out kept) final;
  void sort_by_expert(const Tensor& kept, Out places, Out tokens, Out counts) final;
  void pack_choices(const Tensor& ids, const Tensor& weights, Out packed) final;
  void unpack_choices(const Tensor& packed, std::span<const std::int64_t> rows, Out ids, Out weights) final;
  void take_ids(const Tensor& from, std::span<const std::int64_t> rows, Out to) final;
  void place_weights(const Tensor& weights, const Tensor& places, InOut placed) final;

  void pack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                     std::span<const Philox> rounding, const Tensor& gradient, Out packed) final;
  void unpack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part, const Tensor& packed,
                       bool accumulate, Out part_of_gradient) final;
  void take_largest(InOut x, std::int64_t first_index, Out values, Out indices) final;
  void add_at(const Tensor& values, const Tensor& indices, InOut sum) final;
  void orthonormalize_rows(InOut x, const Philox& fresh) final;
};

}  // namespace echelon
