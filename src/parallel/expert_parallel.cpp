#include "parallel/expert_parallel.h"

#include <algorithm>
#include <utility>

#include "base/halving_tree.h"
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

// The rows of experts; those behind them are neither read nor written.
Tensor used(const Tensor& x, const ExpertBounds& bounds) { return x.row_range(0, bounds.back()); }

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
      by_sequence_(plan.numerics == Numerics::invariant),
      loss_scale_(1.0 / static_cast<double>(plan.global_batch * plan.seq_len)),
      router_(plan.model.router, plan.model.num_experts, plan.model.experts_per_token),
      exchange_(rank, plan.model.num_experts),
      activation_(plan.model.expert_activation()),
      clamp_(plan.model.clamp),
      weights_(std::move(weights)),
      counts_(empty_counts()),
      bias_(plan.balancing.bias_rate > 0 ? counts_.routed : std::vector<double>()) {
  if (!balancing_.has_losses()) return;
  loss_sums_ = Tensor(rank.arena(), MemoryCategory::other, DType::f64,
                      {by_sequence_ ? plan.global_batch / plan.mesh.size(Axis::dp) : 1});
  begin_losses();
}

void ExpertParallel::begin_losses() const {
  copy_from_host(std::vector<double>(static_cast<std::size_t>(loss_sums_.numel())), loss_sums_);
  next_loss_ = 0;
}

RoutingCounts ExpertParallel::take_counts() const {
  RoutingCounts counts = std::exchange(counts_, empty_counts());
  if (!loss_sums_.defined()) return counts;
  const std::vector<double> sums = copy_to_host(loss_sums_, 0.0);
  counts.loss_sum = halving_sum(sums, 0, std::ssize(sums));
  begin_losses();
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
  if (const Tensor& in = weights_.shared_in.value; in.defined()) {  // while copies travel
    saved.shared_hidden = rank_->activation({normed.rows(), in.rows()});
    kernels.matmul(normed, Transpose::no, in, Transpose::yes, saved.shared_hidden, false);
  }
  if (!exchange_.is_local()) co_await Pause{};
  const Tensor taken = exchange_.arrange(std::move(arriving), saved.route);
  saved.hidden = rank_->activation({saved.route.room, weights_.in.front().value.rows()});
  multiply(kernels, weights_.in, Transpose::yes, saved.route.bounds, taken, saved.hidden);
  add_biases(kernels, weights_.in_bias, saved.route.bounds, saved.hidden);
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
  const std::int64_t room = saved.route.room, rows = saved.ids.rows(), width = weights_.gate.value.cols();
  const Tensor y = rank_->activation({rows, width});
  Tensor out = rank_->activation({room, width}),
         activated = rank_->activation({room, weights_.out.front().value.cols()});
  const ExpertBounds& bounds = saved.route.bounds;
  kernels.gated(activation_, used(saved.hidden, bounds), used(activated, bounds), clamp_);
  multiply(kernels, weights_.out, Transpose::yes, bounds, activated, out);
  if (!weights_.out_bias.empty()) add_biases(kernels, weights_.out_bias, bounds, out_bias_columns(out));
  activated = Tensor();
  InFlight coming = exchange_.begin_combine(std::exchange(out, {}), saved.route, saved.copies.numel());
  if (!exchange_.is_local()) co_await Pause{};
  out = coming.get();
  kernels.combine_rows(out, saved.places, saved.weights, y);
  out = Tensor();
  const Tensor& shared_out = weights_.shared_out.value;
  if (!shared_out.defined()) co_return y;
  activated = rank_->activation({rows, shared_out.cols()});
  out = rank_->activation({rows, width});
  kernels.gated(Activation::swiglu, saved.shared_hidden, activated);
  kernels.matmul(activated, Transpose::no, shared_out, Transpose::yes, out, false);
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
                                                              SequenceSums sums,
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
         d_activated = rank_->activation({route.room, weights_.out.front().value.cols()});
  multiply(kernels, weights_.out, Transpose::no, route.bounds, d_out, d_activated);
  Tensor weights = exchange_.dispatch(by_place(saved.weights, saved), route),
         d_weights = rank_->statistic({route.room, 1});
  // In place: hidden becomes its gradient and d_activated the weighted activation. d_out is the gradient of a
  // weighted row, so the weights of both products are right with them, and the rows are not needed again.
  kernels.weighted_gated_backward(activation_, used(saved.hidden, route.bounds),
                                  used(d_activated, route.bounds), used(weights, route.bounds),
                                  used(d_weights, route.bounds), clamp_);
  if (!weights_.out_bias.empty()) {  // a part of the weighted row too
    add_bias_products(kernels, weights_.out_bias, route.bounds, out_bias_columns(d_out), d_weights);
    if (any_trained(weights_.out_bias))
      weight_gradient([this, add = adder(saved, sums), w = weights,
                       d = out_bias_columns(d_out)] { add.products(weights_.out_bias, d, w); });
  }
  weights = Tensor();
  backward.d_hidden = std::exchange(saved.hidden, {});
  d_weights = exchange_.combine(std::exchange(d_weights, {}), route, copies);
  kernels.combine_rows(d_weights, saved.places.reshape({rows * k(), 1}), {},
                       backward.d_weights.reshape({rows * k(), 1}));
  d_weights = Tensor();
  if (any_trained(weights_.out))
    weight_gradient([this, add = adder(saved, sums), x = d_activated, d = d_out] {
      add.products(weights_.out, x, d);
    });
  d_out = d_activated = Tensor();
  d_out = rank_->activation({route.room, width});
  multiply(kernels, weights_.in, Transpose::no, route.bounds, backward.d_hidden, d_out);
  InFlight coming = exchange_.begin_combine(std::exchange(d_out, {}), route, copies);
  if (!exchange_.is_local()) co_await Pause{};
  d_out = coming.get();
  kernels.combine_rows(d_out, saved.places, {}, backward.d_normed);
  d_out = Tensor();
  const Weight &in = weights_.shared_in, &out = weights_.shared_out;
  if (!out.defined()) co_return backward;
  d_activated = rank_->activation({rows, out.value.cols()});
  kernels.matmul(dy, Transpose::no, out.value, Transpose::no, d_activated, false);
  kernels.gated_backward(Activation::swiglu, saved.shared_hidden,
                         d_activated);  // which becomes the activation again
  backward.d_shared_hidden = std::exchange(saved.shared_hidden, {});
  if (out.gradient.defined())
    weight_gradient([sums, out, x = std::exchange(d_activated, {}), d = dy] { sums.add_product(out, d, x); });
  d_activated = Tensor();
  kernels.matmul(backward.d_shared_hidden, Transpose::no, in.value, Transpose::no, backward.d_normed, true);
  co_return backward;
}

void ExpertParallel::Adder::products(const std::vector<Weight>& weights, const Tensor& x,
                                     const Tensor& dy) const {
  if (sums.by_sequence())
    add_gradients(*kernels, sums, weights, bounds, x, dy);
  else
    add_gradients(*kernels, weights, bounds, x, dy);
}

void ExpertParallel::Adder::biases(const std::vector<Weight>& biases, const Tensor& dy) const {
  if (sums.by_sequence())
    add_bias_gradients(*kernels, sums, biases, bounds, dy);
  else
    add_bias_gradients(*kernels, biases, bounds, dy);
}

ExpertParallel::Adder ExpertParallel::adder(const Saved& saved, const SequenceSums& sums) const {
  if (!sums.by_sequence()) return {&rank_->kernels(), sums, saved.route.bounds};
  return {&rank_->kernels(), sums.of_ranks(rank_->size(Axis::ep)), saved.route.of_sequences};
}

void ExpertParallel::in_backward_weight(std::shared_ptr<InputAgain> normed, Saved& saved, Backward& backward,
                                        const SequenceSums& sums,
                                        const WeightGradient& weight_gradient) const {
  Tensor d_hidden = std::exchange(backward.d_hidden, {});
  if (any_trained(weights_.in_bias))
    weight_gradient([this, add = adder(saved, sums), d = d_hidden] {
      add.biases(weights_.in_bias, d);
    });
  if (!any_trained(weights_.in)) {
    saved.taken = Tensor();
  } else if (exchange_.is_local()) {
    weight_gradient(
        [this, normed, copies = saved.copies, add = adder(saved, sums), d = d_hidden] {
          const Tensor& rows = normed->whole();
          const Tensor taken = rank_->activation({copies.numel(), rows.cols()});
          rank_->kernels().embedding(copies, rows, 0, taken);
          add.products(weights_.in, taken, d);
        });
  } else {
    weight_gradient([this, add = adder(saved, sums), taken = std::exchange(saved.taken, {}), d = d_hidden] {
      add.products(weights_.in, taken, d);
    });
  }
  d_hidden = Tensor();
  if (!weights_.shared_in.gradient.defined()) return;
  weight_gradient(
      [sums, in = weights_.shared_in, normed = std::move(normed),
       d = std::exchange(backward.d_shared_hidden, {})] { sums.add_product(in, d, normed->whole()); });
}

}  // namespace echelon
