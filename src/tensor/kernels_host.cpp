#include "tensor/kernels_host.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "spec/routing_balance.h"
#include "tensor/gradient_packing.h"
#include "tensor/orthonormalize.h"
#include "tensor/reference_view.h"
#include "tensor/top_k.h"

namespace echelon {

template class StateSpaceScan<HostLaunch>;
template class TokenKernels<HostLaunch>;

namespace {

std::span<std::int32_t> integers(const Tensor& t) {
  return {t.host<std::int32_t>(), static_cast<std::size_t>(t.numel())};
}

}  // namespace

// Without signs, floats have the order of their bits, with NaN above infinity.
double HostBackend::largest(const Tensor& tx) {
  double most = 0;
  with_stored_type(tx, [&]<class T>(T) {
    using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                    std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
    static_assert(sizeof(Bits) == sizeof(T));
    constexpr Bits size = std::numeric_limits<Bits>::max() >> 1;
    const Matrix<T> x(tx);
    Bits bits = 0;
    for (std::int64_t i = 0; i < x.rows; ++i)
      for (std::int64_t j = 0; j < x.cols; ++j)
        bits = std::max<Bits>(bits, std::bit_cast<Bits>(x[i][j]) & size);
    most = static_cast<double>(std::bit_cast<T>(bits));
  });
  return most;
}

ExactSum HostBackend::sum_squares_exactly(const Tensor& tx, double scale) {
  ExactSum sum;
  with_stored_type(tx, [&]<class T>(T) {
    const T* x = tx.host<T>();
    for (std::int64_t i = 0; i < tx.numel(); ++i) {
      const rows::ExactSquare square = rows::exact_square(static_cast<double>(x[i]), scale);
      sum.high += square.high;
      sum.low += square.low;
    }
  });
  return sum;
}

void HostBackend::count_routed(const TokenRouter& router, const Tensor& ids, std::int64_t scopes,
                               Out counts) {
  const std::span<const std::int32_t> all = integers(ids);
  const auto width = static_cast<std::size_t>(num_routing_counts(router.num_experts(), router.spec())),
             choices = scopes == 0 ? 0 : all.size() / static_cast<std::size_t>(scopes);
  std::int32_t* to = counts.host<std::int32_t>();
  std::vector<double> of_scope(width);
  for (std::int64_t s = 0; s < scopes; ++s, to += width) {
    std::fill(of_scope.begin(), of_scope.end(), 0.0);
    echelon::count_routed(all.subspan(static_cast<std::size_t>(s) * choices, choices),
                          router.experts_per_token(), router.num_experts(), router.spec(), of_scope);
    std::transform(of_scope.begin(), of_scope.end(), to,
                   [](double n) { return static_cast<std::int32_t>(n); });
  }
}

void HostBackend::drop_over_capacity(const Tensor& ids, const Tensor& weights, const ExpertCapacity& capacity,
                                     Out kept) {
  const std::span<const std::int32_t> all = integers(ids);
  const std::span<std::int32_t> stay = integers(kept);
  std::vector<double> values(all.size());
  with_float_type(weights, [&]<class F>(F) {
    const F* weight = weights.host<F>();
    std::transform(weight, weight + weights.numel(), values.begin(), rows::drop_priority<F>);
  });
  const std::size_t choices = all.size() / static_cast<std::size_t>(capacity.scopes);
  for (std::size_t at = 0; at < all.size(); at += choices)
    echelon::drop_over_capacity(all.subspan(at, choices), std::span(values).subspan(at, choices),
                                capacity.experts, capacity.each, capacity.policy, stay.subspan(at, choices));
}

void HostBackend::sort_by_expert(const Tensor& kept, Out places, Out tokens, Out counts) {
  const std::int64_t choices = kept.numel(), k = kept.cols(), room = tokens->numel();
  const std::int32_t* id = kept.host<std::int32_t>();
  std::int32_t *place = places.host<std::int32_t>(), *token = tokens.host<std::int32_t>();
  const std::span<std::int32_t> count = integers(counts);
  std::fill(count.begin(), count.end(), 0);
  for (std::int64_t i = 0; i < choices; ++i)
    if (id[i] >= 0) ++count[static_cast<std::size_t>(id[i])];
  std::vector<std::int64_t> next;
  std::int64_t total = 0;
  for (const std::int32_t of_expert : count) {
    next.push_back(total);
    total += of_expert;
  }
  check(total <= room, "there is room for every copy of a token");
  for (std::int64_t i = 0; i < choices; ++i) {
    place[i] = -1;
    if (id[i] < 0) continue;
    place[i] = static_cast<std::int32_t>(next[static_cast<std::size_t>(id[i])]++);
    token[place[i]] = static_cast<std::int32_t>(i / k);
  }
  std::fill(token + total, token + room, -1);
}

// ---- gradients on their way

void HostBackend::pack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                                std::span<const Philox> rounding, const Tensor& gradient, Out packed) {
  with_float_type(gradient, [&]<class F>(F) {
    pack_part(kind, bucket, part, rounding, gradient.host<F>(),
              static_cast<std::byte*>(packed->host_bytes()));
  });
}

void HostBackend::unpack_gradient(CompressionKind kind, const GradientBucket& bucket, Range part,
                                  const Tensor& packed, bool accumulate, Out part_of_gradient) {
  with_float_type(part_of_gradient, [&]<class F>(F) {
    unpack_part(kind, bucket, part, static_cast<const std::byte*>(packed.host_bytes()), accumulate,
                part_of_gradient.host<F>());
  });
}

void HostBackend::take_largest(InOut x, std::int64_t first_index, Out values, Out indices) {
  with_float_type(x, [&]<class F>(F) {
    echelon::take_largest(x.host<F>(), x->numel(), values->numel(), first_index, values.host<F>(),
                          indices.host<std::int32_t>());
  });
}

void HostBackend::add_at(const Tensor& values, const Tensor& indices, InOut sum) {
  with_float_type(values, [&]<class F>(F) {
    const F* value = values.host<F>();
    const std::int32_t* index = indices.host<std::int32_t>();
    for (std::int64_t i = 0; i < values.numel(); ++i) sum.host<F>()[index[i]] += value[i];
  });
}

void HostBackend::orthonormalize_rows(InOut x, const Philox& fresh) {
  with_float_type(
      x, [&]<class F>(F) { echelon::orthonormalize_rows(x.host<F>(), x->rows(), x->cols(), fresh); });
}

}  // namespace echelon
