// A mixture of experts (parallel/expert_parallel.h) as two ops: up to the experts' hidden values, and from
// these to the output.
#include <utility>

#include "model/op.h"
#include "spec/sum_blocks.h"

namespace echelon {

std::shared_ptr<const ExpertParallel> make_experts(const BlockOp& op, const OpSetting& s) {
  // The router, then gate, up and down of each expert (or up and down), then those of the shared expert, and
  // its gate.
  const std::vector<ParamSpec>& list = op.weights;
  const auto each = static_cast<std::size_t>(s.plan.model.matrices_per_expert()), last = each - 1;
  const auto before = [last](const std::vector<ParamSpec>& of, std::size_t first) {
    const auto begin = of.begin() + static_cast<std::ptrdiff_t>(first);
    return std::vector<ParamSpec>(begin, begin + static_cast<std::ptrdiff_t>(last));
  };
  const auto gate_up = [&](std::size_t first) { return s.stacked(before(list, first)); };
  const auto down = [&](std::size_t first) { return s.stacked({list[first + last]}); };
  ExpertParallel::Weights weights{s.stacked({list[0]}), {}, {}, {}, {}};
  const Range here = experts_of(s.plan, s.rank.mesh().ep_index(s.rank.coordinates()));
  for (std::int64_t e = here.begin; e < here.end; ++e) {
    const auto first = 1 + each * static_cast<std::size_t>(e);
    weights.in.push_back(gate_up(first));
    weights.out.push_back(down(first));
  }
  const auto shared = 1 + each * static_cast<std::size_t>(s.plan.model.num_experts);
  if (shared < list.size()) {
    weights.shared_in = gate_up(shared);
    weights.shared_out = down(shared);
    if (shared + each < list.size()) weights.shared_gate = s.stacked({list[shared + each]});
  }
  if (!op.biases.empty()) {  // in the same order
    weights.gate_bias = s.stacked({op.biases[0]});
    for (std::int64_t e = here.begin; e < here.end; ++e) {
      const auto first = 1 + each * static_cast<std::size_t>(e);
      weights.in_bias.push_back(s.stacked(before(op.biases, first)));
      weights.out_bias.push_back(s.stacked({op.biases[first + last]}));
    }
    weights.out_bias_columns =
        local_ranges(op.biases[each], s.tensor_parallel.size(), s.tensor_parallel.index()).front();
  }
  if (s.plan.numerics == Numerics::invariant) {
    const auto sums = [&](std::vector<ParamSpec> of) {
      return sum_blocks(of, s.tensor_parallel.size(), s.tensor_parallel.index());
    };
    weights.in_sums = sums(before(list, 1));
    weights.out_sums = sums({list[each]});
    if (shared < list.size()) {
      weights.shared_in_sums = sums(before(list, shared));
      weights.shared_out_sums = sums({list[shared + last]});
    }
    if (!op.biases.empty()) weights.out_bias_sums = sums({op.biases[each]});
  }
  auto experts = std::make_shared<ExpertParallel>(s.rank, s.plan, s.tensor_parallel, std::move(weights));
  if (s.faults.router_bias != 0) {
    std::vector<double> bias(static_cast<std::size_t>(s.plan.model.num_experts));
    bias.front() = s.faults.router_bias;
    experts->set_bias(bias);
  }
  return experts;
}

namespace {

RoutedTokens tokens_of(const Microbatch& m) {
  return {m.sequences.batch, m.step, m.first_sample, m.positions};
}

// Of what the router reads, or of that and of what is sent to the experts in its place.
class ExpertsInOp final : public OpRunner {
 public:
  ExpertsInOp(const BlockOp& op, const OpSetting& s) : OpRunner(op), experts_(s.experts) {}

  Work<void> forward(BlockRun& run) const override {
    const RoutedTokens tokens = tokens_of(run.microbatch());
    Tensor normed = run.take(in());
    run.routed() = experts_->route(normed, run.rows(), tokens);
    if (!run.is_first())
      experts_->count_again(run.routed());
    else  // without a sequence of its own too: others' copies come here
      experts_->count_forward(run.routed());
    if (sent() != in()) normed = run.take(sent());
    normed = run.tensor_parallel().enter(normed, run.rows()).get();
    co_await experts_->in_forward(normed, run.routed());
  }
  Work<void> again(BlockRun& run) const override { return forward(run); }

 protected:
  void run_backward(BlockRun& run) const override {
    ExpertParallel::Backward& d = run.routed_gradient();
    InFlight entering = run.tensor_parallel().enter_backward(std::exchange(d.d_normed, {}), run.rows());
    const auto take = [&](std::function<void()> gradient) { run.weight_gradient(std::move(gradient)); };
    auto input = std::make_shared<InputAgain>(run.tensor_parallel(), run.take_kept(sent()), run.rows());
    const Tensor sent_here = input->here();
    experts_->in_backward_weight(std::exchange(input, {}), run.routed(), d, run.sums(), take);
    const Tensor d_sent = entering.get();
    if (sent() == in()) {
      experts_->route_backward(sent_here, run.routed(), d, d_sent, run.sums(), take);
      run.add_gradient(in(), d_sent);  // to the residual stream's, where no norm is before
    } else {
      run.set_gradient(sent(), d_sent);
      const Tensor d_normed = run.gradient_to_add_to(in()), normed = run.take_kept(in());
      experts_->route_backward(normed, run.routed(), d, d_normed, run.sums(), take);
    }
    d = {};
  }

 private:
  int sent() const { return op().inputs.back(); }

  std::shared_ptr<const ExpertParallel> experts_;
};

class ExpertsOutOp final : public OpRunner {
 public:
  ExpertsOutOp(const BlockOp& op, const OpSetting& s) : OpRunner(op), experts_(s.experts) {}

  Work<void> forward(BlockRun& run) const override {
    if (!run.is_first()) experts_->count_back_again(run.routed());
    Tensor y = co_await experts_->out_forward(run.routed());
    run.set(out(), std::move(y));
  }
  Work<void> again(BlockRun& run) const override { return forward(run); }
  Work<void> backward(BlockRun& run) const override {
    const Tensor dy = run.take_gradient(out());
    const ExpertParallel::WeightGradient take = [&run](std::function<void()> gradient) {
      run.weight_gradient(std::move(gradient));
    };
    ExpertParallel::Backward d = co_await experts_->backward_input(dy, run.routed(), run.sums(), take);
    run.routed_gradient() = std::move(d);
  }

 private:
  std::shared_ptr<const ExpertParallel> experts_;
};

}  // namespace

std::unique_ptr<OpRunner> make_experts_in_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<ExpertsInOp>(op, s);
}

std::unique_ptr<OpRunner> make_experts_out_op(const BlockOp& op, const OpSetting& s) {
  return std::make_unique<ExpertsOutOp>(op, s);
}

}  // namespace echelon
