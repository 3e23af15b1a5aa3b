// Which experts take which tokens on a rank of the mesh, and what balances them: the part of ExpertParallel
// that comes before the tokens travel.
#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "layer/router_balance.h"
#include "layer/router_capacity.h"
#include "parallel/expert_parallel.h"
#include "tensor/reference_view.h"

namespace echelon {

ExpertParallel::Saved ExpertParallel::route(const Tensor& normed_here, std::int64_t rows,
                                            const RoutedTokens& tokens) const {
  const std::int64_t here = normed_here.rows(), sequences = tokens.sequences;
  RoutingWatch* const watch = sequences > 0 ? watch_ : nullptr;
  Saved saved;
  saved.sequences = sequences;
  saved.logits = rank_->activation({here, experts()});
  router_.gate().forward(rank_->kernels(), normed_here, saved.logits);
  saved.ids = integers({here, k()});
  saved.weights = rank_->activation({here, k()});
  router_.choose(saved.logits, bias_, saved.ids, saved.weights);
  if (watch != nullptr) {
    watch->on_choice(layer_, tokens, router_, saved.logits, bias_, saved.ids);
    router_.weigh(saved.logits, saved.ids, saved.weights);
  }
  if (tensor_parallel_.sequence_parallel()) share_choices(rows, saved);
  saved.places = integers({rows, k()});
  // What generation takes is what comes.
  const Room room = sequences == 0 ? Room{rows * k(), 0} : room_(sequences);
  saved.copies = integers({room.copies});
  {
    const Tensor kept = keep(saved);
    if (watch != nullptr)
      watch->on_kept(layer_, tokens, saved.ids, saved.weights, kept, [&](const Tensor& weights) {
        return keep_of_scopes(saved.ids, weights, scopes(saved));
      });
    saved.bounds = sort_by_expert(kept, experts(), saved.places, saved.copies);
  }
  saved.route = exchange_.route(saved.bounds, room.copies, room.rows);
  return saved;
}

// Choices of experts and their weights as rows of 2 k numbers, so that they travel together: numbers of
// experts are exact as floats.
Tensor ExpertParallel::packed_choices(const Saved& saved) const {
  const Tensor packed = rank_->activation({saved.ids.rows(), 2 * k()});
  with_float_type(packed, [&]<class F>(F) {
    const F* weight = saved.weights.host<F>();
    const std::int32_t* id = saved.ids.host<std::int32_t>();
    for (std::int64_t i = 0; i < packed.rows(); ++i) {
      F* row = packed.host<F>() + i * 2 * k();
      std::copy_n(weight + i * k(), k(), row);
      std::copy_n(id + i * k(), k(), row + k());
    }
  });
  return packed;
}

// Row i of `packed` goes to row place(i).
template <class Place>
void ExpertParallel::unpack_choices(const Tensor& packed, const Tensor& ids, const Tensor& weights,
                                    const Place& place) const {
  with_float_type(packed, [&]<class F>(F) {
    for (std::int64_t i = 0; i < packed.rows(); ++i) {
      const F* row = packed.host<F>() + i * 2 * k();
      std::copy_n(row, k(), weights.host<F>() + place(i) * k());
      std::transform(row + k(), row + 2 * k(), ids.host<std::int32_t>() + place(i) * k(),
                     [](F id) { return static_cast<std::int32_t>(id); });
    }
  });
}

// From the rows that are here to all rows.
void ExpertParallel::share_choices(std::int64_t rows, Saved& saved) const {
  const Tensor all = tensor_parallel_.enter(packed_choices(saved), rows).get();
  saved.ids = integers({rows, k()});
  saved.weights = rank_->activation({rows, k()});
  unpack_choices(all, saved.ids, saved.weights, [](std::int64_t row) { return row; });
}

// The choices that capacities leave; the choices themselves where there are none.
Tensor ExpertParallel::keep(const Saved& saved) const {
  if (balancing_.capacity == 0 || saved.sequences == 0) return saved.ids;
  return rank_->size(Axis::cp) == 1 ? keep_of_scopes(saved.ids, saved.weights, scopes(saved))
                                    : keep_of_sequences(saved);
}

Tensor ExpertParallel::keep_of_scopes(const Tensor& ids, const Tensor& weights, std::int64_t scopes) const {
  const Tensor kept = integers(ids.shape());
  const std::int64_t tokens = ids.rows() / scopes;
  const std::int64_t capacity = expert_capacity(balancing_.capacity, tokens, k(), experts());
  for (std::int64_t s = 0; s < scopes; ++s) {
    const auto of = [&](const Tensor& t) { return t.row_range(s * tokens, (s + 1) * tokens); };
    drop_over_capacity(of(ids), of(weights), experts(), capacity, balancing_.drop, of(kept));
  }
  return kept;
}

// A scope's tokens lie on all cp ranks: each gets all choices, in the order of their positions, and so makes
// the same of them as the others, and as one rank.
Tensor ExpertParallel::keep_of_sequences(const Saved& saved) const {
  const std::int64_t rows = saved.ids.rows(), cp = rank_->size(Axis::cp), here = seq_len_ / cp;
  // The row among whole sequences of row i of rank r.
  const auto place = [&](std::int64_t r, std::int64_t i) {
    return i / here * seq_len_ + positions_[static_cast<std::size_t>(r * here + i % here)];
  };
  Tensor ids = integers({cp * rows, k()}), weights = rank_->activation({cp * rows, k()});
  {
    const Tensor packed = packed_choices(saved), all = rank_->activation({cp * rows, 2 * k()});
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(cp), packed.numel());
    rank_->along(Axis::cp).all_gather(packed, all, counts).wait();
    unpack_choices(all, ids, weights, [&](std::int64_t row) { return place(row / rows, row % rows); });
  }
  const Tensor all_kept = keep_of_scopes(ids, weights, scopes(saved)), kept = integers(saved.ids.shape());
  for (std::int64_t i = 0; i < rows; ++i)
    std::copy_n(all_kept.host<std::int32_t>() + place(rank_->coordinate(Axis::cp), i) * k(), k(),
                kept.host<std::int32_t>() + i * k());
  return kept;
}

void ExpertParallel::route_backward(const Tensor& normed_here, Saved& saved, Backward& backward,
                                    const Tensor& d_normed_here,
                                    const WeightGradient& weight_gradient) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t rows = saved.ids.rows();
  const Range here = tensor_parallel_.rows_here(rows);
  const Tensor d_weights = tensor_parallel_.enter_backward(std::exchange(backward.d_weights, {}), rows).get();
  RouterLosses terms = losses(saved);
  terms.first_row = here.begin;
  const Tensor d_logits = rank_->activation({here.size(), experts()});
  router_.backward(saved.logits, saved.ids.row_range(here.begin, here.end).reshape({here.size(), k()}),
                   d_weights, terms, loss_scale_, d_logits);
  if (balancing_.has_losses()) counts_.loss_sum += router_.loss(saved.logits, terms);
  saved = {};
  router_.gate().backward_input(kernels, d_logits, d_normed_here, true);
  weight_gradient([&kernels, gate = router_.gate(), x = normed_here, d = d_logits] {
    gate.backward_weight(kernels, x, d);
  });
}

void ExpertParallel::begin_step() const {
  batch_counts_.assign(static_cast<std::size_t>(num_routing_counts(experts(), router_.spec())), 0);
  batch_is_known_ = false;
}

void ExpertParallel::count_forward(const Saved& saved) const {
  moved_ += {.forward_sent = saved.route.away, .forward_received = saved.route.from_others};
  if (balancing_.scope == BalanceScope::batch && !batch_counts_.empty() && !batch_is_known_)
    count_routed(saved.ids, experts(), router_.spec(), batch_counts_);
}

// The first backward pass of a step adds up those of all ranks.
std::span<const double> ExpertParallel::batch_counts() const {
  if (!batch_is_known_) {
    const Tensor counts(rank_->arena(), MemoryCategory::other, DType::f64, {std::ssize(batch_counts_)});
    std::copy(batch_counts_.begin(), batch_counts_.end(), counts.host<double>());
    rank_->dp_cp().all_reduce(counts).wait();
    std::copy_n(counts.host<double>(), counts.numel(), batch_counts_.begin());
    batch_is_known_ = true;
  }
  return batch_counts_;
}

RouterLosses ExpertParallel::losses(const Saved& saved) const {
  RouterLosses terms;
  terms.z_loss = balancing_.z_loss;
  const std::int64_t number = scopes(saved), rows = saved.ids.rows();
  if (!balancing_.has_counts() || number == 0) return terms;
  if (balancing_.scope == BalanceScope::batch) {
    terms.rows_per_scope = rows;
    add_balance_factors(balancing_, router_.spec(), experts(), k(), 1 / loss_scale_, batch_counts(),
                        terms.factors);
    return terms;
  }
  terms.rows_per_scope = rows / number;
  const std::int64_t width = num_routing_counts(experts(), router_.spec());
  const Tensor counts(rank_->arena(), MemoryCategory::other, DType::f64, {number, width});
  std::fill_n(counts.host<double>(), counts.numel(), 0.0);
  const auto of_scope = [&](std::int64_t s) {
    return std::span(counts.host<double>() + s * width, static_cast<std::size_t>(width));
  };
  for (std::int64_t s = 0; s < number; ++s)
    count_routed(saved.ids.row_range(s * terms.rows_per_scope, (s + 1) * terms.rows_per_scope), experts(),
                 router_.spec(), of_scope(s));
  if (rank_->size(Axis::cp) > 1) rank_->along(Axis::cp).all_reduce(counts).wait();
  const auto tokens = static_cast<double>(saved.sequences * seq_len_ / number);
  for (std::int64_t s = 0; s < number; ++s)
    add_balance_factors(balancing_, router_.spec(), experts(), k(), tokens, of_scope(s), terms.factors);
  return terms;
}

// Every choice is kept or dropped, expert by expert.
void ExpertParallel::count(const Saved& saved) const {
  const std::int32_t *id = saved.ids.host<std::int32_t>(), *place = saved.places.host<std::int32_t>();
  std::vector<std::int64_t> kept(static_cast<std::size_t>(experts()));
  for (std::int64_t i = 0; i < saved.ids.numel(); ++i) {
    const auto e = static_cast<std::size_t>(id[i]);
    counts_.routed[e] += 1;
    if (place[i] < 0)
      counts_.dropped[e] += 1;
    else
      ++kept[e];
  }
  for (std::size_t e = 0; e < kept.size(); ++e)
    check(kept[e] == saved.bounds[e + 1] - saved.bounds[e], "what is routed to an expert is kept or dropped");
  counts_.away += static_cast<double>(saved.route.away);
  moved_ += {.backward_sent = saved.route.away, .backward_received = saved.route.from_others};
}

}  // namespace echelon
