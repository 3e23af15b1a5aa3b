#include "parallel/expert_parallel.h"

#include <algorithm>
#include <utility>

#include "base/halving_tree.h"
#include "spec/routing_balance.h"
#include "tensor/host.h"
#include "tensor/layer_products.h"
#include "tensor/sum_by_blocks.h"

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
      shared_gate_({.scores = RouterScores::sigmoid, .normalise = false}, 1, 1),
      exchange_(rank, plan.model.num_experts),
      activation_(plan.model.expert_activation()),
      clamp_(plan.model.clamp),
      formats_(plan.precision),
      weights_(std::move(weights)),
      whole_rows_(rank, plan),
      runs_(plan),
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
    multiply(kernels, {normed, Transpose::no, in, Transpose::yes, saved.shared_hidden}, formats_.forward());
    weigh_shared(normed, saved);
  }
  if (!exchange_.is_local()) co_await Pause{};
  const Tensor taken = exchange_.arrange(std::move(arriving), saved.route);
  saved.hidden = rank_->activation({saved.route.room, weights_.in.front().value.rows()});
  multiply(kernels, weights_.in, Transpose::yes, saved.route.bounds, taken, saved.hidden, {},
           formats_.forward());
  add_biases(kernels, weights_.in_bias, saved.route.bounds, saved.hidden);
  if (!exchange_.is_local()) saved.taken = taken;
}

// By a router of one expert, to which all tokens go.
void ExpertParallel::weigh_shared(const Tensor& normed, Saved& saved) const {
  const Tensor& gate = weights_.shared_gate.value;
  if (!gate.defined()) return;
  saved.shared_logits = rank_->statistic({normed.rows(), 1});
  saved.shared_ids = integers({normed.rows(), 1});
  saved.shared_weights = rank_->statistic({normed.rows(), 1});
  rank_->kernels().matmul(normed, Transpose::no, gate, Transpose::yes, saved.shared_logits, false);
  rank_->kernels().route(shared_gate_, saved.shared_logits, {}, saved.shared_ids, saved.shared_weights);
}

Tensor ExpertParallel::weighed(const Tensor& shared, const Saved& saved) const {
  if (!saved.shared_weights.defined()) return shared;
  const std::int64_t rows = shared.rows();
  const Tensor places = integers({rows, 1}), tokens = integers({rows}), count = integers({1}),
               weighed = rank_->activation(shared.shape());
  rank_->kernels().sort_by_expert(saved.shared_ids, places, tokens, count);  // each stays where it is
  rank_->kernels().combine_rows(shared, places, saved.shared_weights, weighed);
  return weighed;
}

// The copies of the normed rows.
Tensor ExpertParallel::take(const Tensor& normed, const Saved& saved) const {
  const Tensor taken = rank_->activation({saved.copies.numel(), normed.cols()});
  rank_->kernels().embedding(saved.copies, normed, 0, taken);
  return taken;
}

Work<Tensor> ExpertParallel::out_forward(const Saved& saved) const {
  Kernels& kernels = rank_->kernels();
  const std::int64_t room = saved.route.room, rows = saved.ids.rows(),
                     width = weights_.out.front().value.rows();
  const Tensor y = rank_->activation({rows, columns_here(width).size()});
  Tensor out = make_sum({room, width}),
         activated = rank_->activation({room, weights_.out.front().value.cols()});
  const ExpertBounds& bounds = saved.route.bounds;
  activate(used(saved.hidden, bounds), used(activated, bounds));
  multiply(kernels, weights_.out, Transpose::yes, bounds, activated, out, weights_.out_sums,
           formats_.forward());
  activated = Tensor();
  out = rounded_columns(out);
  if (!weights_.out_bias.empty())
    add_biases(kernels, weights_.out_bias, bounds, sums_rows() ? out : out_bias_columns(out));
  InFlight coming = exchange_.begin_combine(std::exchange(out, {}), saved.route, saved.copies.numel());
  if (!exchange_.is_local()) co_await Pause{};
  out = coming.get();
  kernels.combine_rows(out, saved.places, saved.weights, y);
  out = Tensor();
  const Tensor& shared_out = weights_.shared_out.value;
  if (!shared_out.defined()) co_return all_columns(y, width);
  activated = rank_->activation({rows, shared_out.cols()});
  out = make_sum({rows, width});
  activate(saved.shared_hidden, activated);
  multiply(kernels,
           {activated, Transpose::no, shared_out, Transpose::yes, out, false, weights_.shared_out_sums},
           formats_.forward());
  kernels.add(weighed(rounded_columns(out), saved), y);
  co_return all_columns(y, width);
}

// Without a gate there is no bias to add to what is kept.
void ExpertParallel::activate(const Tensor& hidden, const Tensor& y) const {
  if (is_gated(activation_))
    rank_->kernels().gated(activation_, hidden, y, clamp_);
  else
    rank_->kernels().activate(activation_, hidden, {}, y);
}

// Of the sum over tp of terms (rows, C) this rank's columns.
Tensor ExpertParallel::own_columns(const Tensor& term) const {
  const std::int64_t rows = term.rows();
  const int tp = tensor_parallel_.size();
  const Tensor packed = rank_->statistic({term.numel()});
  std::vector<std::int64_t> counts;
  std::int64_t begin = 0;
  for (int r = 0; r < tp; ++r) {
    const Range columns = split_range(term.cols(), tp, r);
    counts.push_back(rows * columns.size());
    rank_->kernels().copy(term.column_range(columns.begin, columns.end),
                          packed.flat_range(begin, begin + counts.back()).reshape({rows, columns.size()}));
    begin += counts.back();
  }
  const Tensor own = rank_->statistic({rows, columns_here(term.cols()).size()});
  rank_->along(Axis::tp).reduce_scatter(packed, own.flat(), counts).wait();
  return own;
}

Tensor ExpertParallel::rounded_columns(const Tensor& term) const {
  if (!sums_rows()) return term;
  const Tensor own = own_columns(term), rounded = rank_->activation(own.shape());
  rank_->kernels().copy(own, rounded);
  return rounded;
}

// The other columns are filled with -0.0, which changes no sum: the sum over tp that follows brings the other
// ranks' columns.
Tensor ExpertParallel::all_columns(const Tensor& own, std::int64_t width) const {
  if (!sums_rows()) return own;
  const Tensor all = rank_->activation({own.rows(), width});
  const Range columns = columns_here(width);
  rank_->kernels().fill(all, -0.0);
  rank_->kernels().copy(own, all.column_range(columns.begin, columns.end));
  return all;
}

// In place: hidden becomes its gradient, and d_activated the weighted activation. The gradient of a row's
// weight is a sum over the hidden units and over the bias, which is part of the weighted row too; each in
// blocks if there are any. The tp ranks' contributions are summed after the exchange.
void ExpertParallel::activation_backward(const Saved& saved, const Tensor& d_out, const Tensor& d_activated,
                                         const Tensor& weights, const Tensor& d_weights) const {
  const ExpertBounds& bounds = saved.route.bounds;
  const auto add_bias = [&](Range columns, const Tensor& to) {
    std::vector<Weight> biases;
    for (const Weight& bias : weights_.out_bias) biases.push_back(part_of(bias, 0, columns));
    add_bias_products(rank_->kernels(), biases, bounds,
                      out_bias_columns(d_out).column_range(columns.begin, columns.end), to);
  };
  weighted_backward({used(saved.hidden, bounds), used(d_activated, bounds), saved.route.room,
                     weights_.in_sums, weights_.out_sums},
                    used(weights, bounds), used(d_weights, bounds), weights_.out_bias_sums,
                    weights_.out_bias.empty() ? BiasGradient() : add_bias);
}

// `add_bias`: of so many columns; none where there is no bias.
void ExpertParallel::weighted_backward(const HiddenRows& rows, const Tensor& weights, const Tensor& d_weights,
                                       const SumBlocks& bias_sums, const BiasGradient& add_bias) const {
  Kernels& kernels = rank_->kernels();
  const Tensor &h = rows.hidden, &d = rows.d_activated;
  const std::size_t blocks = rows.out_sums.size();
  if (blocks < 2 || (add_bias && bias_sums.size() != blocks)) {
    kernels.weighted_activation_backward(activation_, h, d, weights, d_weights, clamp_);
    if (add_bias) add_bias({0, weights_.out_bias_columns.size()}, d_weights);
    return;
  }
  // There is room for what may come, whatever comes, as everywhere.
  const auto here = [&](const Tensor& all) { return all.row_range(0, h.rows()); };
  sum_by_blocks(
      kernels, static_cast<std::int64_t>(blocks), d_weights,
      [&] {
        return here(rank_->statistic({rows.room, 1}));
      },
      [&](std::int64_t b, const Tensor& to) {
        const auto block = static_cast<std::size_t>(b);
        const std::vector<Range>& in = rows.in_sums[block];  // of gate and of up, or of up
        const Range units = in.front();
        const Tensor part = here(rank_->activation({rows.room, std::ssize(in) * units.size()})),
                     d_part = here(rank_->activation({rows.room, units.size()}));
        const auto each = [&](const auto& visit) {
          visit(d.column_range(units.begin, units.end), d_part);
          for (std::size_t i = 0; i < in.size(); ++i) {
            const std::int64_t begin = static_cast<std::int64_t>(i) * units.size();
            visit(h.column_range(in[i].begin, in[i].end), part.column_range(begin, begin + units.size()));
          }
        };
        each([&](const Tensor& all, const Tensor& own) { kernels.copy(all, own); });
        kernels.weighted_activation_backward(activation_, part, d_part, weights, to, clamp_);
        each([&](const Tensor& all, const Tensor& own) { kernels.copy(own, all); });
        if (add_bias) add_bias(bias_sums[block].front(), to);
      });
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
  const Tensor d_normed = rank_->activation({rows, columns_here(width).size()});
  // The gradient of a row's sum, by copy.
  InFlight arriving = exchange_.begin_dispatch(take(dy, saved), route);
  if (!exchange_.is_local()) co_await Pause{};
  Tensor d_out = exchange_.arrange(std::move(arriving), route),
         d_activated = rank_->activation({route.room, weights_.out.front().value.cols()});
  multiply(kernels, weights_.out, Transpose::no, route.bounds, d_out, d_activated, {}, formats_.of_input());
  Tensor weights = exchange_.dispatch(by_place(saved.weights, saved), route),
         d_weights = rank_->statistic({route.room, 1});
  // d_out is the gradient of a weighted row, so the weights of both products are right with what becomes of
  // these, and the rows are not needed again.
  activation_backward(saved, d_out, d_activated, weights, d_weights);
  if (any_trained(weights_.out_bias))
    weight_gradient([this, add = adder(saved, sums), w = weights, d = out_bias_columns(d_out)] {
      add.products(weights_.out_bias, d, w, {});
    });
  weights = Tensor();
  backward.d_hidden = std::exchange(saved.hidden, {});
  d_weights = exchange_.combine(std::exchange(d_weights, {}), route, copies);
  kernels.combine_rows(d_weights, saved.places.reshape({rows * k(), 1}), {},
                       backward.d_weights.reshape({rows * k(), 1}));
  d_weights = Tensor();
  if (any_trained(weights_.out))
    weight_gradient([this, add = adder(saved, sums), x = d_activated, d = d_out] {
      add.products(weights_.out, x, d, formats_.of_weight());
    });
  d_out = d_activated = Tensor();
  d_out = make_sum({route.room, width});
  multiply(kernels, weights_.in, Transpose::no, route.bounds, backward.d_hidden, d_out, weights_.in_sums,
           formats_.of_input());
  d_out = rounded_columns(d_out);
  InFlight coming = exchange_.begin_combine(std::exchange(d_out, {}), route, copies);
  if (!exchange_.is_local()) co_await Pause{};
  d_out = coming.get();
  kernels.combine_rows(d_out, saved.places, {}, d_normed);
  d_out = Tensor();
  const Weight &in = weights_.shared_in, &out = weights_.shared_out;
  if (!out.defined()) {
    backward.d_normed = all_columns(d_normed, width);
    co_return backward;
  }
  d_activated = rank_->activation({rows, out.value.cols()});
  multiply(kernels, {dy, Transpose::no, out.value, Transpose::no, d_activated}, formats_.of_input());
  // Which becomes the activation again, weighed as what it made was.
  if (saved.shared_weights.defined()) {
    backward.d_shared_weights = rank_->statistic({rows, 1});
    weighted_backward(
        {saved.shared_hidden, d_activated, rows, weights_.shared_in_sums, weights_.shared_out_sums},
        saved.shared_weights, backward.d_shared_weights, {}, {});
  } else if (is_gated(activation_)) {
    kernels.gated_backward(activation_, saved.shared_hidden, d_activated);
  } else {
    kernels.activate_backward(activation_, saved.shared_hidden, d_activated);
    std::swap(saved.shared_hidden, d_activated);  // of which that is the gradient
  }
  backward.d_shared_hidden = std::exchange(saved.shared_hidden, {});
  if (out.gradient.defined())
    weight_gradient([sums, out, x = std::exchange(d_activated, {}), d = dy, formats = formats_.of_weight()] {
      sums.add_product(out, d, x, formats);
    });
  d_activated = Tensor();
  const Tensor d_shared = sums_rows() ? rank_->statistic({rows, width}) : d_normed;
  multiply(kernels,
           {backward.d_shared_hidden, Transpose::no, in.value, Transpose::no, d_shared, !sums_rows(),
            weights_.shared_in_sums},
           formats_.of_input());
  if (sums_rows()) kernels.add(own_columns(d_shared), d_normed);
  backward.d_normed = all_columns(d_normed, width);
  co_return backward;
}

// Of weights those parts that are this rank's; of what is frozen nothing.
static std::vector<Weight> parts_of(Kernels& kernels, const std::vector<Weight>& weights, int dim,
                                    Range part) {
  std::vector<Weight> parts;
  for (const Weight& w : weights) {
    if (w.gradient.defined()) fill_others(kernels, w, dim, part);
    parts.push_back(part_of(w, dim, part));
  }
  return parts;
}

void ExpertParallel::Adder::products(const std::vector<Weight>& weights, const Tensor& x, const Tensor& dy,
                                     const OperandFormats& formats) const {
  if (!sums.by_sequence()) return add_gradients(*kernels, weights, bounds, x, dy, formats);
  if (!copies) return add_gradients(*kernels, sums, weights, bounds, x, dy);
  const int dim = dy.cols() >= x.cols() ? 0 : 1;
  const Range part = rows.part((dim == 0 ? dy : x).cols(), true);
  const auto gathered = [&](const Tensor& one, bool in_parts) {
    return in_parts ? copies->gather_part(rows, one) : copies->gather(rows, one);
  };
  const Tensor all_x = gathered(x, dim == 1), all_dy = gathered(dy, dim == 0);
  const std::vector<Weight> own = parts_of(*kernels, weights, dim, part);
  if (part.size() > 0) add_gradients(*kernels, sums, own, bounds, all_x, all_dy);
}

void ExpertParallel::Adder::biases(const std::vector<Weight>& biases, const Tensor& dy) const {
  if (!sums.by_sequence()) return add_bias_gradients(*kernels, biases, bounds, dy);
  if (!copies) return add_bias_gradients(*kernels, sums, biases, bounds, dy);
  const Range part = rows.part(dy.cols(), true);
  const Tensor all = copies->gather_part(rows, dy);
  const std::vector<Weight> own = parts_of(*kernels, biases, 0, part);
  if (part.size() > 0) add_bias_gradients(*kernels, sums, own, bounds, all);
}

ExpertParallel::Adder ExpertParallel::adder(const Saved& saved, const SequenceSums& sums) const {
  Kernels* const kernels = &rank_->kernels();
  if (!sums.by_sequence()) return {kernels, sums, saved.route.bounds, whole_rows_, {}};
  if (saved.whole_copies)
    return {kernels, sums, saved.whole_copies->of_sequences(), whole_rows_, saved.whole_copies};
  // Of an expert group the cp groups, each of which has whole sequences.
  const int groups = std::max(1, rank_->size(Axis::ep) / rank_->size(Axis::cp));
  return {kernels, sums.of_ranks(groups), saved.route.of_sequences, whole_rows_, {}};
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
    weight_gradient([this, normed, copies = saved.copies, add = adder(saved, sums), d = d_hidden] {
      const Tensor& rows = normed->whole();
      const Tensor taken = rank_->activation({copies.numel(), rows.cols()});
      rank_->kernels().embedding(copies, rows, 0, taken);
      add.products(weights_.in, taken, d, formats_.of_weight());
    });
  } else {
    weight_gradient([this, add = adder(saved, sums), taken = std::exchange(saved.taken, {}), d = d_hidden] {
      add.products(weights_.in, taken, d, formats_.of_weight());
    });
  }
  d_hidden = Tensor();
  if (!weights_.shared_in.gradient.defined()) return;
  weight_gradient([sums, in = weights_.shared_in, normed = std::move(normed),
                   d = std::exchange(backward.d_shared_hidden, {}),
                   formats = formats_.of_weight()] { sums.add_product(in, d, normed->whole(), formats); });
}

}  // namespace echelon
