#include "parallel/expert_parallel.h"

#include <utility>

#include "spec/routing_balance.h"
#include "tensor/host.h"

namespace echelon {
namespace {

// Positions of a sequence's tokens, one rank of the cp group after another.
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
      bias_(plan.balancing.bias_rate > 0 ? counts_.routed : std::vector<double>()) {
  if (!balancing_.has_losses()) return;
  loss_sum_ = Tensor(rank.arena(), MemoryCategory::other, DType::f64, {1});
  copy_from_host(std::vector<double>{0}, loss_sum_);
}

RoutingCounts ExpertParallel::take_counts() const {
  RoutingCounts counts = std::exchange(counts_, empty_counts());
  if (!loss_sum_.defined()) return counts;
  counts.loss_sum = copy_to_host(loss_sum_, 0.0).front();
  copy_from_host(std::vector<double>{0}, loss_sum_);
  return counts;
}

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
  const Tensor placed = rank_->statistic({saved.copies.numel(), 1});
  rank_->kernels().place_weights(weights, saved.places, placed);
  return placed;
}

Work<ExpertParallel::Backward> ExpertParallel::backward_input(const Tensor& dy, Saved& saved,
                                                              const WeightGradient& weight_gradient) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t copies = saved.copies.numel(), rows = dy.rows(), width = dy.cols();
  const ExpertExchange::Route& route = saved.route;
  count(saved);
  Backward backward;
  backward.d_weights = rank_->statistic({rows, k()});
  backward.d_normed = rank_->activation({rows, width});
  // The gradient of a row's sum, by copy.
  InFlight arriving = exchange_.begin_dispatch(take(dy, saved), route);
  if (!exchange_.is_local()) co_await Pause{};
  Tensor d_out = exchange_.arrange(std::move(arriving), route),
         d_activated = rank_->activation({route.room, experts_.activated_width()});
  experts_.out_backward_input(kernels, route.bounds, d_out, d_activated);
  Tensor weights = exchange_.dispatch(by_place(saved.weights, saved), route),
         d_weights = rank_->statistic({route.room, 1});
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

void ExpertParallel::in_backward_weight(std::shared_ptr<InputAgain> normed, Saved& saved, Backward& backward,
                                        const WeightGradient& weight_gradient) const {
  Tensor d_hidden = std::exchange(backward.d_hidden, {});
  if (exchange_.is_local()) {
    weight_gradient([this, normed, copies = saved.copies, bounds = saved.bounds, d = d_hidden] {
      const Tensor& rows = normed->whole();
      const Tensor taken = rank_->activation({copies.numel(), rows.cols()});
      rank_->kernels().embedding(copies, rows, 0, taken);
      experts_.in_backward_weight(rank_->kernels(), bounds, taken, d);
    });
  } else {
    weight_gradient([this, bounds = saved.route.bounds, taken = std::exchange(saved.taken, {}),
                     d = d_hidden] { experts_.in_backward_weight(rank_->kernels(), bounds, taken, d); });
  }
  d_hidden = Tensor();
  if (!shared_) return;
  weight_gradient(
      [&kernels = rank_->kernels(), in = shared_->in(), normed = std::move(normed),
       d = std::exchange(backward.d_shared_hidden, {})] { in.backward_weight(kernels, normed->whole(), d); });
}

}  // namespace echelon
