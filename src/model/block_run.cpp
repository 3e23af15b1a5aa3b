#include "model/block_run.h"

#include <algorithm>

#include "base/error.h"

namespace echelon {

SequenceRows BlockRun::whole_sequences() const {
  const std::int64_t batch = microbatch_.sequences.batch, all = rows() * rank_.size(Axis::cp);
  return {
      batch, batch == 0 ? 0 : all / batch,
      microbatch_.whole_starts.defined() ? microbatch_.whole_starts : microbatch_.sequences.first_positions};
}

Tensor BlockRun::take(int number) {
  Tensor& slot = state_.values[static_cast<std::size_t>(number)];
  check(slot.defined(), "an op reads values that are there");
  return sequence_->lets_go(number, place_) ? std::exchange(slot, {}) : slot;
}

Tensor BlockRun::take_input(const BlockOp& op, std::size_t input) {
  return bring(take(op.inputs[input]), program_.value(op.inputs[input]).home, op.wants[input]);
}

bool BlockRun::next_takes_product(const BlockOp& product) const {
  const auto next = static_cast<std::size_t>(place_) + 1;
  const bool travels =
      program_.value(product.outputs.front()).home == Home::partial_sum && tensor_parallel_.size() > 1;
  return !travels && next < sequence_->ops.size() &&
         takes_product(program_.ops[static_cast<std::size_t>(sequence_->ops[next])], product);
}

const BlockOp* BlockRun::activation_before(const BlockOp& product) const {
  const int made_by = program_.producer(product.inputs.front());
  if (made_by < 0) return nullptr;
  const BlockOp& before = program_.ops[static_cast<std::size_t>(made_by)];
  return gives_input(before, product) && value(before.outputs.front()).defined() ? &before : nullptr;
}

Tensor BlockRun::take_output() {
  return bring(std::exchange(state_.values[static_cast<std::size_t>(program_.output)], {}),
               program_.value(program_.output).home, program_.output_home());
}

Tensor BlockRun::bring(Tensor x, Home from, Home to) const {
  if (from == to) return x;
  InFlight moving =
      from == Home::partial_sum ? tensor_parallel_.leave(x, rows()) : tensor_parallel_.enter(x, rows());
  x = Tensor();
  return rounded(moving.get());
}

Tensor BlockRun::rounded(Tensor sum) const {
  if (sum.dtype() == rank_.precision().activations) return sum;
  const Tensor value = activation({sum.rows(), sum.cols()});
  kernels().copy(sum, value);
  return value;
}

Tensor BlockRun::take_kept(int number) {
  Tensor& slot = state_.values[static_cast<std::size_t>(number)];
  check(slot.defined(), "a backward pass reads values that were kept or made again");
  return std::find(done_->begin(), done_->end(), number) != done_->end() ? std::exchange(slot, {}) : slot;
}

Tensor BlockRun::take_kept_input(const BlockOp& op, std::size_t input) {
  return bring(take_kept(op.inputs[input]), program_.value(op.inputs[input]).home, op.wants[input]);
}

Tensor BlockRun::take_gradient(int number) {
  Gradient& g = gradient(number);
  Tensor d = std::exchange(g.tensor, {});
  check(d.defined(), "an op's backward pass comes behind those that read its outputs");
  if (program_.value(number).home == g.home) return d;
  check(g.home == Home::residual, "only the residual stream's gradients are left where they are");
  InFlight moving = tensor_parallel_.leave_backward(d, rows());
  d = Tensor();
  return moving.get();
}

Tensor BlockRun::gradient_to_add_to(int number) {
  Gradient& g = gradient(number);
  if (!g.tensor.defined()) {
    const Tensor& x = value(number);
    set_gradient(number, activation({x.rows(), x.cols()}));
    kernels().fill(g.tensor, 0.0);
    return g.tensor;
  }
  // A deferred weight gradient still reads what is there, except rows that were gathered, which products of
  // this rank's own rows do not contain.
  const auto is_of_own_rows = [&](const BlockOp& op) {
    if (op.kind != OpKind::residual || program_.value(op.inputs[1]).home != Home::residual) return false;
    const int made_by = program_.producer(op.inputs[1]);
    return program_.ops[static_cast<std::size_t>(made_by)].kind == OpKind::linear;
  };
  if (when_ == Weights::deferred && (!tensor_parallel_.sequence_parallel() ||
                                     std::any_of(program_.ops.begin(), program_.ops.end(), is_of_own_rows))) {
    const Tensor own = activation({g.tensor.rows(), g.tensor.cols()});
    kernels().copy(g.tensor, own);
    g.tensor = own;
  }
  return g.tensor;
}

void BlockRun::add_gradient(int number, const Tensor& d) {
  if (!gradient(number).tensor.defined()) return set_gradient(number, d);
  kernels().add(d, gradient_to_add_to(number));
}

void BlockRun::weight_gradient(std::function<void()> take) {
  if (when_ == Weights::now)
    take();
  else
    state_.deferred.push_back(std::move(take));
}

void BlockRun::weight_gradient(int number, std::function<void(const Tensor&)> take) {
  if (value(number).defined())
    weight_gradient([take = std::move(take), x = take_kept(number)] { take(x); });
  else
    waiting_[number].push_back(std::move(take));
}

void BlockRun::provide(int number, Tensor made) {
  auto waiting = waiting_.extract(number);
  if (waiting.empty()) return;
  for (auto& take : waiting.mapped()) weight_gradient([take = std::move(take), made] { take(made); });
}

}  // namespace echelon
