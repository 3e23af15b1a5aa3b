#include "tensor/kernels_host.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "spec/routing_balance.h"
#include "tensor/gradient_packing.h"
#include "tensor/orthonormalize.h"
#include "tensor/reference_view.h"
#include "tensor/top_k.h"

namespace echelon {
namespace {

// ---- loss

// In row order and double precision, by itself before it is added.
template <class F>
double sum_losses(const F* sum, const F* target, const Tensor& targets) {
  const std::int32_t* ids = targets.host<std::int32_t>();
  double loss = 0;
  for (std::int64_t i = 0; i < targets.numel(); ++i)
    if (ids[i] >= 0) loss += std::log(static_cast<double>(sum[i])) - static_cast<double>(target[i]);
  return loss;
}

// ---- routing

template <class F>
void read_row(const Matrix<F>& m, std::int64_t i, std::vector<double>& row) {
  row.assign(m[i], m[i] + m.cols);
}

std::span<const double> factors_of(const RouterLosses& losses, std::int64_t row, std::int64_t experts) {
  if (losses.factors.empty()) return {};
  const std::int64_t scope = (losses.first_row + row) / losses.rows_per_scope;
  check((scope + 1) * experts <= std::ssize(losses.factors), "balance factors are there for every scope");
  return {losses.factors.data() + scope * experts, static_cast<std::size_t>(experts)};
}

// body(row, ids, weights) fills the weights of each token's experts, and its ids where they are chosen here.
template <class Body>
void each_token(const TokenRouter& router, const Tensor& logits, const Tensor& ids, const Tensor& weights,
                const Body& body) {
  const auto k = static_cast<std::size_t>(router.experts_per_token());
  with_float_type(logits, [&]<class F>(F) {
    const Matrix<F> in(logits);
    std::int32_t* id = ids.host<std::int32_t>();
    F* weight = weights.host<F>();
    TokenRouter::Row row;
    std::vector<double> values, chosen(k);
    for (std::int64_t i = 0; i < in.rows; ++i, id += k, weight += k) {
      read_row(in, i, values);
      router.score(values, row);
      body(row, std::span(id, k), chosen);
      for (std::size_t j = 0; j < k; ++j) weight[j] = static_cast<F>(chosen[j]);
    }
  });
}

std::span<std::int32_t> integers(const Tensor& t) {
  return {t.host<std::int32_t>(), static_cast<std::size_t>(t.numel())};
}

// Half the digits of a weight. Tokens that have the same weight (the only choice of k = 1; the same tokens at
// the beginning of a sequence) have it up to rounding, which is another one on another mesh: what is equal
// here is equal there.
template <class F>
F drop_priority(F weight) {
  constexpr F digits = sizeof(F) == 8 ? F(0x1p26) : F(0x1p12);
  return std::nearbyint(weight * digits);
}

}  // namespace

double HostBackend::largest(const Tensor& tx) {
  double most = 0;
  with_stored_type(tx, [&]<class T>(T) {
    const Matrix<T> x(tx);
    for (std::int64_t i = 0; i < x.rows; ++i)
      for (std::int64_t j = 0; j < x.cols; ++j) {
        const double size = std::abs(static_cast<double>(x[i][j]));
        if (!(size <= most)) most = size;
        if (std::isnan(most)) return;
      }
  });
  return most;
}

ExactSum HostBackend::sum_squares_exactly(const Tensor& tx, double scale) {
  constexpr double unit = 0x1p32;
  ExactSum sum;
  with_stored_type(tx, [&]<class T>(T) {
    const T* x = tx.host<T>();
    for (std::int64_t i = 0; i < tx.numel(); ++i) {
      const double wide = static_cast<double>(x[i]);
      const double square = wide * wide * scale * unit;
      const auto high = static_cast<std::int64_t>(square);  // rounds towards zero
      sum.high += static_cast<std::uint64_t>(high);
      sum.low +=
          static_cast<std::uint64_t>(static_cast<std::int64_t>((square - static_cast<double>(high)) * unit));
    }
  });
  return sum;
}

void HostBackend::first_keys(const Tensor& starts, std::int64_t first_position, std::int64_t stride,
                             std::int64_t count, Out first) {
  const std::span<const std::int32_t> begins = integers(starts);
  std::transform(begins.begin(), begins.end(), first.host<std::int32_t>(), [&](std::int32_t begin) {
    return static_cast<std::int32_t>(
        std::clamp<std::int64_t>((begin - first_position + stride - 1) / stride, 0, count));
  });
}

void HostBackend::add_losses(const Tensor& sum, const Tensor& target, const Tensor& targets, InOut loss) {
  with_float_type(
      sum, [&]<class F>(F) { *loss.host<double>() += sum_losses(sum.host<F>(), target.host<F>(), targets); });
}

void HostBackend::merge_softmax(const Tensor& tparts, const Tensor& ttargets,
                                std::span<const std::int64_t> bounds, Out tsum, Out ttarget, Out tscales,
                                Out tshares) {
  with_float_type(tparts, [&]<class F>(F) {
    const std::int64_t rows = ttargets.numel(), count = static_cast<std::int64_t>(bounds.size()) - 1;
    const std::span<const std::int32_t> targets = integers(ttargets);
    const auto of = [&](std::int64_t part, int which) {
      return tparts.host<F>() + (3 * part + which) * rows;
    };
    F *sum = tsum.host<F>(), *target = ttarget.host<F>(), *scales = tscales.host<F>(),
      *shares = tshares.host<F>();
    for (std::int64_t i = 0; i < rows; ++i) {
      F max = of(0, 0)[i];
      for (std::int64_t part = 1; part < count; ++part) max = std::max(max, of(part, 0)[i]);
      sum[i] = 0;
      target[i] = 0;
      for (std::int64_t part = 0; part < count; ++part) {
        const F shift = of(part, 0)[i] - max;
        sum[i] += of(part, 1)[i] * std::exp(shift);
        const std::int64_t id = targets[static_cast<std::size_t>(i)];
        if (id >= bounds[static_cast<std::size_t>(part)] && id < bounds[static_cast<std::size_t>(part) + 1])
          target[i] = of(part, 2)[i] + shift;
      }
      for (std::int64_t part = 0; part < count; ++part) {
        // Infinite where all of the part's probabilities vanish, and then they do.
        F& scale = scales[part * rows + i];
        scale = sum[i] * std::exp(max - of(part, 0)[i]);
        shares[part * rows + i] = of(part, 1)[i] / scale;
      }
    }
  });
}

void HostBackend::merge_gradients(std::span<const Tensor> means, std::span<const Tensor> shares,
                                  std::span<const Tensor> of_targets, const Tensor& ttargets, double factor,
                                  Out y) {
  const std::span<const std::int32_t> targets = integers(ttargets);
  with_stored_type(y, [&]<class T>(T) {
    using F = Wide<T>;
    const std::int64_t cols = y->cols();
    std::vector<F> row(static_cast<std::size_t>(cols));
    for (std::int64_t i = 0; i < y->rows(); ++i) {
      std::fill(row.begin(), row.end(), F(0));
      for (std::size_t p = 0; p < means.size() && targets[static_cast<std::size_t>(i)] >= 0; ++p) {
        const F share = shares[p].host<F>()[i];
        const T *mean = means[p].host<T>() + i * cols, *of_target = of_targets[p].host<T>() + i * cols;
        for (std::int64_t j = 0; j < cols; ++j)
          row[static_cast<std::size_t>(j)] += share * F(mean[j]) - F(of_target[j]);
      }
      T* out = y.host<T>() + i * cols;
      for (std::int64_t j = 0; j < cols; ++j) out[j] = T(F(factor) * row[static_cast<std::size_t>(j)]);
    }
  });
}

void HostBackend::add_number(const Tensor& x, InOut y) { *y.host<double>() += *x.host<double>(); }

void HostBackend::route(const TokenRouter& router, const Tensor& logits, std::span<const double> bias,
                        Out ids, Out weights) {
  each_token(router, logits, ids, weights,
             [&](TokenRouter::Row& row, std::span<std::int32_t> its, std::vector<double>& chosen) {
               router.choose(row, bias, its, chosen);
             });
}

void HostBackend::weigh_routes(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                               Out weights) {
  each_token(router, logits, ids, weights,
             [&](TokenRouter::Row& row, std::span<std::int32_t> its, std::vector<double>& chosen) {
               router.weigh(row, its, chosen);
             });
}

void HostBackend::route_backward(const TokenRouter& router, const Tensor& logits, const Tensor& ids,
                                 const Tensor& d_weights, const RouterLosses& losses, double loss_scale,
                                 Out d_logits) {
  const auto k = static_cast<std::size_t>(router.experts_per_token());
  const std::int64_t experts = router.num_experts();
  with_float_type(logits, [&]<class F>(F) {
    const Matrix<F> in(logits), out(d_logits);
    const std::int32_t* id = ids.host<std::int32_t>();
    const F* d_weight = d_weights.host<F>();
    TokenRouter::Row row;
    std::vector<double> values, d_chosen(k), d_values(static_cast<std::size_t>(experts));
    for (std::int64_t i = 0; i < in.rows; ++i, id += k, d_weight += k) {
      read_row(in, i, values);
      router.score(values, row);
      std::copy_n(d_weight, k, d_chosen.begin());
      router.backward(row, {id, k}, d_chosen, factors_of(losses, i, experts), losses.z_loss, loss_scale,
                      d_values);
      std::transform(d_values.begin(), d_values.end(), out[i], [](double d) { return static_cast<F>(d); });
    }
  });
}

void HostBackend::add_router_losses(const TokenRouter& router, const Tensor& logits,
                                    const RouterLosses& losses, InOut loss) {
  double total = 0;
  with_float_type(logits, [&]<class F>(F) {
    const Matrix<F> in(logits);
    TokenRouter::Row row;
    std::vector<double> values;
    for (std::int64_t i = 0; i < in.rows; ++i) {
      read_row(in, i, values);
      router.score(values, row);
      total += router.loss(row, factors_of(losses, i, router.num_experts()), losses.z_loss);
    }
  });
  *loss.host<double>() += total;
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
    std::transform(weight, weight + weights.numel(), values.begin(), drop_priority<F>);
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

void HostBackend::pack_choices(const Tensor& ids, const Tensor& weights, Out packed) {
  const std::int64_t k = ids.cols();
  with_float_type(packed, [&]<class F>(F) {
    const F* weight = weights.host<F>();
    const std::int32_t* id = ids.host<std::int32_t>();
    for (std::int64_t i = 0; i < packed->rows(); ++i) {
      F* row = packed.host<F>() + i * 2 * k;
      std::copy_n(weight + i * k, k, row);
      std::copy_n(id + i * k, k, row + k);
    }
  });
}

void HostBackend::unpack_choices(const Tensor& packed, std::span<const std::int64_t> rows, Out ids,
                                 Out weights) {
  const std::int64_t k = packed.cols() / 2;
  with_float_type(packed, [&]<class F>(F) {
    for (std::int64_t i = 0; i < packed.rows(); ++i) {
      const F* row = packed.host<F>() + i * 2 * k;
      const std::int64_t to = rows.empty() ? i : rows[static_cast<std::size_t>(i)];
      std::copy_n(row, k, weights.host<F>() + to * k);
      std::transform(row + k, row + 2 * k, ids.host<std::int32_t>() + to * k,
                     [](F id) { return static_cast<std::int32_t>(id); });
    }
  });
}

void HostBackend::take_ids(const Tensor& from, std::span<const std::int64_t> rows, Out to) {
  const std::int64_t k = from.cols();
  std::int32_t* at = to.host<std::int32_t>();
  for (const std::int64_t row : rows) at = std::copy_n(from.host<std::int32_t>() + row * k, k, at);
}

void HostBackend::place_weights(const Tensor& weights, const Tensor& places, InOut placed) {
  const std::int32_t* place = places.host<std::int32_t>();
  with_float_type(weights, [&]<class F>(F) {
    const F* weight = weights.host<F>();
    for (std::int64_t i = 0; i < weights.numel(); ++i)
      if (place[i] >= 0) placed.host<F>()[place[i]] = weight[i];
  });
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
