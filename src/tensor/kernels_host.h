// Kernels that are the same plain loops wherever the host computes: small or memory-bound ones, and those
// that decide what is computed next. The reference kernels and the CPU kernels add their own.
#pragma once

#include "tensor/host_launch.h"
#include "tensor/token_kernels.h"

namespace echelon {

// Compiled only in kernels_host.cpp, where loops are vectorised: of two versions the linker would take the
// first.
extern template class StateSpaceScan<HostLaunch>;
extern template class TokenKernels<HostLaunch>;

class HostBackend : public TokenKernels<HostLaunch> {
 public:
  double largest(const Tensor& x) override;
  ExactSum sum_squares_exactly(const Tensor& x, double scale) override;

  void count_routed(const TokenRouter& router, const Tensor& ids, std::int64_t scopes, Out counts) final;
  void drop_over_capacity(const Tensor& ids, const Tensor& weights, const ExpertCapacity& capacity,
                          Out kept) final;
  void sort_by_expert(const Tensor& kept, Out places, Out tokens, Out counts) final;

  void pack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                     std::span<const Philox> rounding, const Tensor& gradient, Out packed) final;
  void unpack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part, const Tensor& packed,
                       bool accumulate, Out part_of_gradient) final;
  void take_largest(InOut x, std::int64_t first_index, Out values, Out indices) final;
  void add_at(const Tensor& values, const Tensor& indices, InOut sum) final;
  void orthonormalize_rows(InOut x, const Philox& fresh) final;
};

}  // namespace echelon
