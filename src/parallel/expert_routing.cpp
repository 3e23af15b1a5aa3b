// Which experts take which tokens on a rank of the mesh, and load balancing: the part of ExpertParallel
// before tokens travel.
#include <algorithm>
#include <functional>
#include <utility>

#include "base/error.h"
#include "comm/host_group.h"
#include "parallel/expert_parallel.h"
#include "spec/routing_balance.h"
#include "tensor/host.h"

namespace echelon {

ExpertParallel::Saved ExpertParallel::route(const Tensor& normed_here, std::int64_t rows,
                                            const RoutedTokens& tokens) const {
  const std::int64_t here = normed_here.rows(), sequences = tokens.sequences;
  RoutingWatch* const watch = sequences > 0 ? watch_ : nullptr;
  Saved saved;
  saved.sequences = sequences;
  saved.logits = rank_->statistic({here, experts()});
  rank_->kernels().matmul(normed_here, Transpose::no, weights_.gate.value, Transpose::yes, saved.logits,
                          false);
  add_gate_bias(saved.logits);
  saved.ids = integers({here, k()});
  saved.weights = rank_->statistic({here, k()});
  rank_->kernels().route(router_, saved.logits, bias_, saved.ids, saved.weights);
  if (watch != nullptr) {
    watch->on_choice(layer_, tokens, router_, saved.logits, bias_, saved.ids);
    rank_->kernels().weigh_routes(router_, saved.logits, saved.ids, saved.weights);
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
    sort_and_count(kept, saved);
  }
  // In generation too rows are of no sequences, and there are no sums.
  const bool has_runs = by_sequence_ && (sequences > 0 || rows == 0);
  const ExpertBounds by_run = has_runs ? bounds_by_run(saved) : ExpertBounds();
  saved.route = exchange_.route(saved.bounds, room.copies, room.rows, by_run, runs_);
  if (sequences > 0 && has_runs && runs_.ranks > 1 && exchange_.is_local())
    saved.whole_copies = std::make_shared<WholeCopies>(*rank_, runs_, by_run, sequences, moved_);
  return saved;
}

// An expert's copies are in token order, and so in the order of sequences and their runs of positions here.
// In validation, a rank without a sequence reports as many runs as the others have of theirs.
ExpertBounds ExpertParallel::bounds_by_run(const Saved& saved) const {
  const std::int64_t number = std::max<std::int64_t>(saved.sequences, 1) * runs_.of_rank,
                     each = saved.ids.rows() / number;
  const ExpertBounds& bounds = saved.bounds;
  const bool imagined = saved.copies.device() == Device::none;
  const std::vector<std::int32_t> tokens =
      imagined ? std::vector<std::int32_t>() : copy_to_host<std::int32_t>(saved.copies);
  ExpertBounds all{0};
  for (std::size_t e = 0; e + 1 < bounds.size(); ++e)
    for (std::int64_t s = 1; s <= number; ++s)
      all.push_back(
          imagined ? bounds[e] + (bounds[e + 1] - bounds[e]) * s / number
                   : std::lower_bound(tokens.begin() + bounds[e], tokens.begin() + bounds[e + 1], s * each) -
                         tokens.begin());
  return all;
}

// Logits are wide, whatever parameters are.
void ExpertParallel::add_gate_bias(const Tensor& logits) const {
  if (!weights_.gate_bias.defined()) return;
  Tensor bias = weights_.gate_bias.value;
  if (bias.dtype() != logits.dtype()) {
    bias = rank_->statistic({experts()});
    rank_->kernels().copy(weights_.gate_bias.value, bias);
  }
  rank_->kernels().add_bias(bias, logits);
}

// Everything that the host needs to know about where tokens go, in one copy: how many copies each expert
// gets, and how many choices it had in each scope.
void ExpertParallel::sort_and_count(const Tensor& kept, Saved& saved) const {
  const std::int64_t number = std::max<std::int64_t>(scopes(saved), 1),
                     width = num_routing_counts(experts(), router_.spec());
  const Tensor counts = integers({experts() + number * width});
  Kernels& kernels = rank_->kernels();
  kernels.sort_by_expert(kept, saved.places, saved.copies, counts.flat_range(0, experts()));
  kernels.count_routed(router_, saved.ids, number, counts.flat_range(experts(), counts.numel()));
  // Of what the ranks of a cp group keep together each has as much as another.
  std::int64_t even = saved.copies.numel();
  if (balancing_.capacity > 0) {
    const std::int64_t kept_by_all =
        experts() * number *
        expert_capacity(balancing_.capacity, saved.sequences * seq_len_ / number, k(), experts());
    even = std::min(even, kept_by_all / rank_->size(Axis::cp));
  }
  const std::vector<std::int32_t> numbers =
      counts.device() == Device::none ? even_counts(even, number) : copy_to_host<std::int32_t>(counts);
  saved.bounds.assign(1, 0);
  for (std::int64_t e = 0; e < experts(); ++e)
    saved.bounds.push_back(saved.bounds.back() + numbers[static_cast<std::size_t>(e)]);
  saved.routed.assign(numbers.begin() + experts(), numbers.end());
}

// What a dry run assumes: equally many copies for each rank of the expert group, and for each of its experts.
std::vector<std::int32_t> ExpertParallel::even_counts(std::int64_t copies, std::int64_t scopes) const {
  const int ep = rank_->size(Axis::ep), me = rank_->ep().rank();
  const std::int64_t here = experts() / ep, own = copies / ep;
  std::vector<std::int32_t> counts;
  for (int r = 0, others = 0; r < ep; ++r) {
    const std::int64_t share = r == me ? own : split_range(copies - own, ep - 1, others++).size();
    for (std::int64_t e = 0; e < here; ++e)
      counts.push_back(
          static_cast<std::int32_t>(split_range(share, static_cast<int>(here), static_cast<int>(e)).size()));
  }
  const std::vector<std::int32_t> kept = counts;
  for (std::int64_t s = 0; s < scopes; ++s) {
    for (const std::int32_t n : kept)
      counts.push_back(
          static_cast<std::int32_t>(split_range(n, static_cast<int>(scopes), static_cast<int>(s)).size()));
    counts.insert(counts.end(), static_cast<std::size_t>(router_.spec().groups), 0);
  }
  return counts;
}

// So that they travel together.
Tensor ExpertParallel::packed_choices(const Saved& saved) const {
  const Tensor packed = rank_->statistic({saved.ids.rows(), 2 * k()});
  rank_->kernels().pack_choices(saved.ids, saved.weights, packed);
  return packed;
}

// From the rows that are here to all rows.
void ExpertParallel::share_choices(std::int64_t rows, Saved& saved) const {
  const Tensor all = tensor_parallel_.enter(packed_choices(saved), rows).get();
  saved.ids = integers({rows, k()});
  saved.weights = rank_->statistic({rows, k()});
  rank_->kernels().unpack_choices(all, {}, saved.ids, saved.weights);
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
  rank_->kernels().drop_over_capacity(ids, weights, {scopes, experts(), capacity, balancing_.drop}, kept);
  return kept;
}

// A scope's tokens lie on all cp ranks: each gathers all choices, in the order of their positions, and so
// decides like the others, and like a single rank.
Tensor ExpertParallel::keep_of_sequences(const Saved& saved) const {
  const std::int64_t rows = saved.ids.rows(), cp = rank_->size(Axis::cp), here = seq_len_ / cp;
  // The rows among whole sequences of those of one rank after another.
  std::vector<std::int64_t> places;
  for (std::int64_t r = 0; r < cp; ++r)
    for (std::int64_t i = 0; i < rows; ++i)
      places.push_back(i / here * seq_len_ + positions_[static_cast<std::size_t>(r * here + i % here)]);
  Tensor ids = integers({cp * rows, k()}), weights = rank_->statistic({cp * rows, k()});
  {
    const Tensor packed = packed_choices(saved), all = rank_->statistic({cp * rows, 2 * k()});
    const std::vector<std::int64_t> counts(static_cast<std::size_t>(cp), packed.numel());
    rank_->along(Axis::cp).all_gather(packed, all, counts).wait();
    rank_->kernels().unpack_choices(all, places, ids, weights);
  }
  const Tensor all_kept = keep_of_scopes(ids, weights, scopes(saved)), kept = integers(saved.ids.shape());
  const std::span<const std::int64_t> mine(places.data() + rank_->coordinate(Axis::cp) * rows,
                                           static_cast<std::size_t>(rows));
  rank_->kernels().take_ids(all_kept, mine, kept);
  return kept;
}

void ExpertParallel::route_backward(const Tensor& normed_here, Saved& saved, Backward& backward,
                                    const Tensor& d_normed_here, const SequenceSums& sums,
                                    const WeightGradient& weight_gradient) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t rows = saved.ids.rows();
  const Range here = tensor_parallel_.rows_here(rows);
  const Tensor d_weights = tensor_parallel_.enter_backward(std::exchange(backward.d_weights, {}), rows).get();
  RouterLosses terms = losses(saved);
  terms.first_row = here.begin;
  const Tensor d_logits = rank_->statistic({here.size(), experts()});
  kernels.route_backward(router_, saved.logits, saved.ids.row_range(here.begin, here.end), d_weights, terms,
                         loss_scale_, d_logits);
  if (balancing_.has_losses()) add_losses(saved, terms, sums);
  shared_gate_backward(normed_here, saved, backward, d_normed_here, sums, weight_gradient);
  saved = {};
  kernels.matmul(d_logits, Transpose::no, weights_.gate.value, Transpose::no, d_normed_here, true);
  if (weights_.gate_bias.gradient.defined())
    weight_gradient([sums, bias = weights_.gate_bias, d = d_logits] { sums.add_bias(bias, d); });
  if (!weights_.gate.gradient.defined()) return;
  weight_gradient(
      [sums, gate = weights_.gate, x = normed_here, d = d_logits] { sums.add_product(gate, d, x); });
}

void ExpertParallel::shared_gate_backward(const Tensor& normed_here, const Saved& saved, Backward& backward,
                                          const Tensor& d_normed_here, const SequenceSums& sums,
                                          const WeightGradient& weight_gradient) const {
  if (!saved.shared_weights.defined()) return;
  Kernels& kernels = rank_->kernels();
  const std::int64_t rows = saved.shared_ids.rows();
  const Range here = tensor_parallel_.rows_here(rows);
  const Tensor d_weights =
                   tensor_parallel_.enter_backward(std::exchange(backward.d_shared_weights, {}), rows).get(),
               d_logits = rank_->statistic({here.size(), 1});
  kernels.route_backward(shared_gate_, saved.shared_logits.row_range(here.begin, here.end),
                         saved.shared_ids.row_range(here.begin, here.end), d_weights, {}, 1, d_logits);
  kernels.matmul(d_logits, Transpose::no, weights_.shared_gate.value, Transpose::no, d_normed_here, true);
  if (weights_.shared_gate.gradient.defined())
    weight_gradient(
        [sums, gate = weights_.shared_gate, x = normed_here, d = d_logits] { sums.add_product(gate, d, x); });
}

// Of the rows that are here, at once, or sequence by sequence, whose rows then come together for one rank.
void ExpertParallel::add_losses(const Saved& saved, RouterLosses terms, const SequenceSums& sums) const {
  Kernels& kernels = rank_->kernels();
  if (!sums.by_sequence()) return kernels.add_router_losses(router_, saved.logits, terms, loss_sums_);
  Tensor logits = saved.logits;
  bool counts = true;
  if (whole_rows_.are_cut()) {
    const int cp = rank_->size(Axis::cp);
    logits = whole_rows_.gather(logits, cp * saved.ids.rows(), false);
    terms.rows_per_scope *= cp;
    counts = rank_->coordinate(Axis::cp) == 0 &&
             (!tensor_parallel_.sequence_parallel() || tensor_parallel_.index() == 0);
  }
  for (const Range& rows : sums.runs()) {
    terms.first_row = rows.begin;
    if (counts)
      kernels.add_router_losses(router_, logits.row_range(rows.begin, rows.end), terms,
                                loss_sums_.flat_range(next_loss_, next_loss_ + 1));
    ++next_loss_;
  }
}

void ExpertParallel::begin_step() const {
  next_loss_ = 0;
  batch_counts_.assign(static_cast<std::size_t>(num_routing_counts(experts(), router_.spec())), 0);
  batch_is_known_ = false;
}

void ExpertParallel::count_forward(const Saved& saved) const {
  moved_ += {.forward_sent = saved.route.away,
             .forward_received = saved.route.from_others,
             .forward_rows = saved.route.room};
  if (balancing_.scope == BalanceScope::batch && !batch_counts_.empty() && !batch_is_known_)
    std::transform(batch_counts_.begin(), batch_counts_.end(), saved.routed.begin(), batch_counts_.begin(),
                   std::plus<>());
}

void ExpertParallel::count_again(const Saved& saved) const { moved_ += {.again_sent = saved.route.away}; }

void ExpertParallel::count_back_again(const Saved& saved) const {
  moved_ += {.again_received = saved.route.from_others, .again_rows = saved.route.room};
}

// The first backward pass of a step adds up those of all ranks.
std::span<const double> ExpertParallel::batch_counts() const {
  if (!batch_is_known_) {
    batch_counts_ = HostGroup(rank_->dp_cp()).sum(batch_counts_);
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
  std::vector<double> counts = saved.routed;
  const auto of_scope = [&](std::int64_t s) {
    return std::span(counts.data() + s * width, static_cast<std::size_t>(width));
  };
  if (rank_->size(Axis::cp) > 1) counts = HostGroup(rank_->along(Axis::cp)).sum(counts);
  const auto tokens = static_cast<double>(saved.sequences * seq_len_ / number);
  for (std::int64_t s = 0; s < number; ++s)
    add_balance_factors(balancing_, router_.spec(), experts(), k(), tokens, of_scope(s), terms.factors);
  return terms;
}

// Every choice is kept or dropped, expert by expert.
void ExpertParallel::count(const Saved& saved) const {
  const std::int64_t width = num_routing_counts(experts(), router_.spec());
  for (std::int64_t e = 0; e < experts(); ++e) {
    const auto at = static_cast<std::size_t>(e);
    double routed = 0;
    for (std::int64_t i = e; i < std::ssize(saved.routed); i += width)
      routed += saved.routed[static_cast<std::size_t>(i)];
    const auto kept = static_cast<double>(saved.bounds[at + 1] - saved.bounds[at]);
    check(kept <= routed, "what is routed to an expert is kept or dropped");
    counts_.routed[at] += routed;
    counts_.dropped[at] += routed - kept;
  }
  counts_.away += static_cast<double>(saved.route.away);
  moved_ += {.backward_sent = saved.route.away,
             .backward_received = saved.route.from_others,
             .backward_rows = saved.route.room};
}

}  // namespace echelon
