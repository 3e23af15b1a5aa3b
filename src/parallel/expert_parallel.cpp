#include "parallel/expert_parallel.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "layer/router_balance.h"
#include "layer/router_capacity.h"
#include "tensor/reference_view.h"

namespace echelon {
namespace {

// Of a sequence's tokens, rank of the cp group after rank.
std::vector<std::int64_t> positions_of_ranks(const Plan& plan) {
  const ContextLayout layout(plan);
  std::vector<std::int64_t> all;
  for (int r = 0; r < plan.mesh.size(Axis::cp); ++r)
    for (std::int64_t position : layout.positions(r)) all.push_back(position);
  return all;
}

}  // namespace

ExpertParallel::ExpertParallel(const Rank& rank, const Plan& plan, TensorParallel tensor_parallel,
                               Weights weights)
    : rank_(&rank),
      tensor_parallel_(tensor_parallel),
      balancing_(plan.balancing),
      room_([plan](std::int64_t sequences) {
        const bool bounded = plan.balancing.capacity > 0;
        return Room{room_for_copies(plan, sequences), bounded ? room_for_received(plan, sequences) : 0};
      }),
      seq_len_(plan.seq_len),
      positions_(positions_of_ranks(plan)),
      loss_scale_(1.0 / static_cast<double>(plan.global_batch * plan.seq_len)),
      router_(Linear(weights.gate, {}, WeightOrder::out_in), plan.model.router, plan.model.experts_per_token),
      exchange_(rank, plan.model.num_experts),
      experts_(std::move(weights.in), std::move(weights.out)),
      shared_(std::move(weights.shared)),
      counts_(empty_counts()),
      bias_(plan.balancing.bias_rate > 0 ? counts_.routed : std::vector<double>()) {}

void ExpertParallel::balance(const std::vector<double>& routed) const {
  if (balancing_.bias_rate > 0) update_bias(routed, balancing_.bias_rate, bias_);
}

void ExpertParallel::set_bias(const std::vector<double>& bias) const {
  check(std::ssize(bias) == experts(), "a router has a bias of each expert");
  bias_ = bias;
}

RoutingCounts ExpertParallel::empty_counts() const {
  const std::vector<double> none(static_cast<std::size_t>(experts()));
  return {0, none, none};
}

Tensor ExpertParallel::integers(std::vector<std::int64_t> shape) const {
  return {rank_->arena(), MemoryCategory::activations, DType::i32, std::move(shape)};
}

ExpertParallel::Saved ExpertParallel::route(const Tensor& normed_here, std::int64_t rows,
                                            std::int64_t sequences) const {
  const std::int64_t here = normed_here.rows();
  Saved saved;
  saved.sequences = sequences;
  saved.logits = rank_->activation({here, experts()});
  router_.gate().forward(rank_->kernels(), normed_here, saved.logits);
  saved.ids = integers({here, k()});
  saved.weights = rank_->activation({here, k()});
  router_.choose(saved.logits, bias_, saved.ids, saved.weights);
  if (tensor_parallel_.sequence_parallel()) share_choices(rows, saved);
  saved.places = integers({rows, k()});
  // What generation takes is what comes.
  const Room room = sequences == 0 ? Room{rows * k(), 0} : room_(sequences);
  saved.copies = integers({room.copies});
  {
    const Tensor kept = keep(saved);
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
    const F* weight = saved.weights.data<F>();
    const std::int32_t* id = saved.ids.data<std::int32_t>();
    for (std::int64_t i = 0; i < packed.rows(); ++i) {
      F* row = packed.data<F>() + i * 2 * k();
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
      const F* row = packed.data<F>() + i * 2 * k();
      std::copy_n(row, k(), weights.data<F>() + place(i) * k());
      std::transform(row + k(), row + 2 * k(), ids.data<std::int32_t>() + place(i) * k(),
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
    std::copy_n(all_kept.data<std::int32_t>() + place(rank_->coordinate(Axis::cp), i) * k(), k(),
                kept.data<std::int32_t>() + i * k());
  return kept;
}

Work<void> ExpertParallel::in_forward(const Tensor& normed, Saved& saved) const {
  Kernels& kernels = rank_->kernels();
  InFlight arriving = exchange_.begin_dispatch(take(normed, saved), saved.route);
  if (shared_) {  // while copies travel
    saved.shared_hidden = rank_->activation({normed.rows(), shared_->hidden_width()});
    shared_->in().forward(kernels, normed, saved.shared_hidden);
  }
  if (!exchange_.is_local()) co_await Pause{};
  const Tensor taken = exchange_.arrange(std::move(arriving), saved.route);
  saved.hidden = rank_->activation({saved.route.room, experts_.hidden_width()});
  experts_.in_forward(kernels, saved.route.bounds, taken, saved.hidden);
  if (!exchange_.is_local()) saved.taken = taken;
}

// The copies of the normed rows.
Tensor ExpertParallel::take(const Tensor& normed, const Saved& saved) const {
  const Tensor taken = rank_->activation({saved.copies.numel(), normed.cols()});
  rank_->kernels().embedding(saved.copies, normed, 0, taken);
  return taken;
}

Work<Tensor> ExpertParallel::out_forward(const Saved& saved) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t room = saved.route.room, rows = saved.ids.rows(), width = router_.gate().in_features();
  const Tensor y = rank_->activation({rows, width});
  Tensor out = rank_->activation({room, width}),
         activated = rank_->activation({room, experts_.activated_width()});
  experts_.activate(kernels, saved.route.bounds, saved.hidden, activated);
  experts_.out_forward(kernels, saved.route.bounds, activated, out);
  activated = Tensor();
  InFlight coming = exchange_.begin_combine(std::exchange(out, {}), saved.route, saved.copies.numel());
  if (!exchange_.is_local()) co_await Pause{};
  out = coming.get();
  kernels.combine_rows(out, saved.places, saved.weights, y);
  out = Tensor();
  if (!shared_) co_return y;
  activated = rank_->activation({rows, shared_->activated_width()});
  out = rank_->activation({rows, width});
  shared_->activate(kernels, saved.shared_hidden, activated);
  shared_->out().forward(kernels, activated, out);
  kernels.add(out, y);
  co_return y;
}

// Weights of tokens' choices to where their copies stand: (M, 1).
Tensor ExpertParallel::by_place(const Tensor& weights, const Saved& saved) const {
  const Tensor placed = rank_->activation({saved.copies.numel(), 1});
  const std::int32_t* place = saved.places.data<std::int32_t>();
  with_float_type(weights, [&]<class F>(F) {
    const F* weight = weights.data<F>();
    for (std::int64_t i = 0; i < weights.numel(); ++i)
      if (place[i] >= 0) placed.data<F>()[place[i]] = weight[i];
  });
  return placed;
}

Work<ExpertParallel::Backward> ExpertParallel::backward_input(const Tensor& dy, Saved& saved,
                                                              const WeightGradient& weight_gradient) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t copies = saved.copies.numel(), rows = dy.rows(), width = dy.cols();
  const ExpertExchange::Route& route = saved.route;
  count(saved);
  Backward backward;
  backward.d_weights = rank_->activation({rows, k()});
  backward.d_normed = rank_->activation({rows, width});
  // The gradient of a row's sum, by copy.
  InFlight arriving = exchange_.begin_dispatch(take(dy, saved), route);
  if (!exchange_.is_local()) co_await Pause{};
  Tensor d_out = exchange_.arrange(std::move(arriving), route),
         d_activated = rank_->activation({route.room, experts_.activated_width()});
  experts_.out_backward_input(kernels, route.bounds, d_out, d_activated);
  Tensor weights = exchange_.dispatch(by_place(saved.weights, saved), route),
         d_weights = rank_->activation({route.room, 1});
  experts_.activate_backward(kernels, route.bounds, saved.hidden, d_activated, weights, d_weights);
  weights = Tensor();
  backward.d_hidden = std::exchange(saved.hidden, {});
  d_weights = exchange_.combine(std::exchange(d_weights, {}), route, copies);
  kernels.combine_rows(d_weights, saved.places.reshape({rows * k(), 1}), {},
                       backward.d_weights.reshape({rows * k(), 1}));
  d_weights = Tensor();
  weight_gradient([&kernels, experts = &experts_, bounds = route.bounds, x = d_activated, d = d_out] {
    experts->out_backward_weight(kernels, bounds, x, d);
  });
  d_out = d_activated = Tensor();
  d_out = rank_->activation({route.room, width});
  experts_.in_backward_input(kernels, route.bounds, backward.d_hidden, d_out);
  InFlight coming = exchange_.begin_combine(std::exchange(d_out, {}), route, copies);
  if (!exchange_.is_local()) co_await Pause{};
  d_out = coming.get();
  kernels.combine_rows(d_out, saved.places, {}, backward.d_normed);
  d_out = Tensor();
  if (!shared_) co_return backward;
  d_activated = rank_->activation({rows, shared_->activated_width()});
  shared_->out().backward_input(kernels, dy, d_activated);
  Mlp::Gradients shared = shared_->activate_backward(kernels, saved.shared_hidden, d_activated);
  saved.shared_hidden = d_activated = Tensor();
  weight_gradient(
      [&kernels, out = shared_->out(), x = shared.activated, d = dy] { out.backward_weight(kernels, x, d); });
  shared.activated = Tensor();
  backward.d_shared_hidden = shared.d_hidden;
  shared_->in().backward_input(kernels, backward.d_shared_hidden, backward.d_normed, true);
  co_return backward;
}

void ExpertParallel::in_backward_weight(const Tensor& normed, Saved& saved, Backward& backward,
                                        const WeightGradient& weight_gradient) const {
  Tensor d_hidden = std::exchange(backward.d_hidden, {});
  if (exchange_.is_local()) {
    weight_gradient([this, normed, copies = saved.copies, bounds = saved.bounds, d = d_hidden] {
      const Tensor taken = rank_->activation({copies.numel(), normed.cols()});
      rank_->kernels().embedding(copies, normed, 0, taken);
      experts_.in_backward_weight(rank_->kernels(), bounds, taken, d);
    });
  } else {
    weight_gradient([this, bounds = saved.route.bounds, taken = std::exchange(saved.taken, {}),
                     d = d_hidden] { experts_.in_backward_weight(rank_->kernels(), bounds, taken, d); });
  }
  d_hidden = Tensor();
  if (!shared_) return;
  weight_gradient(
      [&kernels = rank_->kernels(), in = shared_->in(), normed,
       d = std::exchange(backward.d_shared_hidden, {})] { in.backward_weight(kernels, normed, d); });
}

void ExpertParallel::route_backward(const Tensor& normed, Saved& saved, Backward& backward,
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
  weight_gradient([&kernels, gate = router_.gate(), x = normed.row_range(here.begin, here.end),
                   d = d_logits] { gate.backward_weight(kernels, x, d); });
}

void ExpertParallel::begin_step() const {
  batch_counts_.assign(static_cast<std::size_t>(num_routing_counts(experts(), router_.spec())), 0);
  batch_is_known_ = false;
}

void ExpertParallel::count_forward(const Saved& saved) const {
  if (balancing_.scope == BalanceScope::batch && !batch_counts_.empty() && !batch_is_known_)
    count_routed(saved.ids, experts(), router_.spec(), batch_counts_);
}

// The first backward pass of a step adds up those of all ranks.
std::span<const double> ExpertParallel::batch_counts() const {
  if (!batch_is_known_) {
    const Tensor counts(rank_->arena(), MemoryCategory::other, DType::f64, {std::ssize(batch_counts_)});
    std::copy(batch_counts_.begin(), batch_counts_.end(), counts.data<double>());
    rank_->dp_cp().all_reduce(counts).wait();
    std::copy_n(counts.data<double>(), counts.numel(), batch_counts_.begin());
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
  std::fill_n(counts.data<double>(), counts.numel(), 0.0);
  const auto of_scope = [&](std::int64_t s) {
    return std::span(counts.data<double>() + s * width, static_cast<std::size_t>(width));
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
  const std::int32_t *id = saved.ids.data<std::int32_t>(), *place = saved.places.data<std::int32_t>();
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
}

}  // namespace echelon
