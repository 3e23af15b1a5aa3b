#include "verify/reference_run.h"

#include <algorithm>
#include <array>

#include "base/error.h"
#include "spec/tf32.h"
#include "train/this_machine.h"

namespace echelon {

Plan one_rank_plan(Plan plan) {
  // As many sequences at once as the ranks of the mesh have, which one of them may have more of.
  plan.micro_batch = std::min(plan.micro_batch, microbatches(plan, 0).front().size());
  plan.mesh = Mesh{};
  plan.sequence_parallel = false;
  plan.layers_per_stage.clear();
  plan.balance_layers = false;
  plan.recompute = Recompute::none;
  plan.optimizer_barrier = true;
  plan.zero = 0;
  plan.hsdp = 1;
  plan.offload = Offload::none;
  // Its host multiplies f32 as it is: what TF32 makes of it is in the bound, and in the noise.
  if (multiplies_in_tf32(plan.precision)) plan.precision = DType::f32;
  // One microbatch, after which all tokens are counted.
  if (plan.balancing.scope == BalanceScope::batch) plan.micro_batch = plan.global_batch;
  return plan;
}

std::optional<Plan> wide_plan(Plan plan) {
  if (plan.precision.gradients == plan.precision.activations || !flushes(plan)) return {};
  plan.precision = has_cpu_kernels() ? DType::f32 : DType::f64;
  return plan;
}

double reference_bytes(const Plan& plan) {
  double state = 0;  // values, gradients and moments
  for (const ParamSpec& spec : all_parameters(plan.model))
    state += 4 * static_cast<double>(spec.numel() * element_bytes(plan.precision.master));
  const int copies = flushes(plan) ? 2 : 3;  // before the stretches that are compared, and the present one
  const std::optional<Plan> wide = wide_plan(plan);
  return predicted_bytes(one_rank_plan(plan)) + copies * state +
         (wide ? predicted_bytes(one_rank_plan(*wide)) : 0);
}

ReferenceRun::ReferenceRun(const Plan& plan, const OptimizerOptions& optimizer, const RunOptions& run,
                           std::uint64_t seed)
    : given_(plan),
      plan_(one_rank_plan(plan)),
      optimizer_(optimizer),
      pipeline_(plan),
      world_(1, run.timeout),
      // Bits are those of a mesh where the same kernels make them: the host's math library is another.
      arena_(plan.numerics == Numerics::invariant ? run.driver.get() : nullptr, run.device_of(0)),
      kernels_(make_kernels(arena_, plan_.precision, run.threads_per_rank, plan.numerics)),
      noise_(make_rounding_noise(*kernels_, arena_, multiplies_in_tf32(plan.precision) ? tf32_epsilon : 0)),
      noisy_(noise_) {
  // Noise is the host's; every bit is compared without.
  Kernels& kernels = arena_.device() == Device::cpu ? noisy_ : *kernels_;
  rank_ = std::make_unique<Rank>(world_, plan_.mesh, 0, plan_.precision, arena_, kernels);
  if (!flushes(given_)) plan_.global_batch = static_cast<std::int64_t>(samples_of(0).size());
  trainer_ = std::make_unique<Trainer>(*rank_, plan_, optimizer, seed);
}

double ReferenceRun::compute_gradients(std::int64_t step, const SampleSource& samples) {
  if (flushes(given_)) return trainer_->compute_gradients(step, samples);
  const int updates = pipeline_.programs(0).updates_per_step();
  double loss_sum = 0, num_targets = 0;
  for (int update = 0; update < updates; ++update) {
    if (update > 0) apply_update(step);
    const double loss = delayed_gradients(step, update, samples), targets = trainer_->num_targets();
    loss_sum += loss * targets;
    num_targets += targets;
  }
  return loss_sum / num_targets;
}

double ReferenceRun::apply_gradients(std::int64_t step) {
  if (flushes(given_)) return clip_factor(trainer_->apply_gradients(step).gradient_norm, optimizer_.clip);
  apply_update(step);
  return 1;
}

// The samples of an update: microbatch m of every data-parallel rank, or the whole step.
std::vector<std::int64_t> ReferenceRun::samples_of(std::int64_t update_in_step) const {
  std::vector<std::int64_t> samples;
  for (int dp = 0; dp < given_.mesh.size(Axis::dp); ++dp) {
    const std::vector<Range> ranges = microbatches(given_, dp);
    const bool one = pipeline_.programs(0).updates_per_step() > 1;
    for (std::size_t m = 0; m < ranges.size(); ++m)
      if (!one || static_cast<std::int64_t>(m) == update_in_step)
        for (std::int64_t k = ranges[m].begin; k < ranges[m].end; ++k) samples.push_back(k);
  }
  return samples;
}

// Which version of its weights a stage uses for an update, both counted from 0. PipeDream: stage r of P is
// P-1-r updates behind. 2BW: every stage is one behind.
int ReferenceRun::version_of(const ParamSpec& spec, std::int64_t update) const {
  const int stage = pipeline_.holders_of(spec).front();
  const int delay = given_.schedule == "pipedream" ? given_.mesh.size(Axis::pp) - 1 - stage : 1;
  return static_cast<int>(std::max<std::int64_t>(0, update - delay));
}

double ReferenceRun::delayed_gradients(std::int64_t step, std::int64_t update, const SampleSource& samples) {
  const Tensor& values = parameters().values();
  if (versions_.empty()) keep_version();
  const auto oldest = updates_ - static_cast<std::int64_t>(versions_.size()) + 1;
  for (std::size_t i = 0; i < parameters().all().size(); ++i) {
    const Parameter& p = parameters().all()[i];
    if (p.spec.frozen) continue;
    const std::int64_t begin = parameters().layout().offsets[i];
    const Tensor& version = versions_[static_cast<std::size_t>(version_of(p.spec, updates_) - oldest)];
    kernels_->copy(version.flat_range(begin, begin + p.value.numel()), p.value.flat());
  }
  const std::vector<std::int64_t> chosen = samples_of(update);
  if (judge_ != nullptr) judge_->of_samples(chosen);
  const double loss = trainer_->compute_gradients(
      step, [&](std::int64_t, std::int64_t k, std::int32_t* tokens, std::int32_t* targets) {
        if (k < static_cast<std::int64_t>(chosen.size()))
          return samples(step, chosen[static_cast<std::size_t>(k)], tokens, targets);
        // A smaller last microbatch: what is missing has no targets.
        std::fill_n(tokens, plan_.seq_len, 0);
        std::fill_n(targets, plan_.seq_len, -1);
      });
  kernels_->copy(versions_.back(), values);
  return loss;
}

void ReferenceRun::follow(RoutingJudge& judge) {
  judge_ = &judge;
  trainer_->stages().watch_routing(judge_);
}

// In the order of ParameterTensor, and behind them what the value is rounded off by.
static std::array<Tensor, 5> tensors_of(const Parameter& p) {
  return {p.value, p.gradient, p.exp_avg, p.exp_avg_sq, p.own_remainder};
}

ReferenceRun::State ReferenceRun::state() const {
  // A version is written once, and then only read.
  State s{{}, versions_, updates_, trainer_->stages().router_biases()};
  const auto copy_of = [&](const Tensor& t) {
    if (!t.has_memory()) return Tensor();  // as before the first gradients
    Tensor copy(rank_->arena(), MemoryCategory::other, t.dtype(), t.shape());
    kernels_->copy(t, copy);
    return copy;
  };
  for (const Parameter& p : parameters().all())
    for (const Tensor& t : tensors_of(p)) s.tensors.push_back(copy_of(t));
  return s;
}

void ReferenceRun::set_state(const State& s) {
  auto from = s.tensors.begin();
  for (const Parameter& p : parameters().all())
    for (const Tensor& t : tensors_of(p)) {
      if (from->defined()) kernels_->copy(*from, t);
      ++from;
    }
  versions_ = s.versions;
  updates_ = s.updates;
  trainer_->stages().set_router_biases(s.biases);
}

Tensor ReferenceRun::tensor_in(const State& s, const std::string& name, ParameterTensor which) const {
  const Parameter& p = parameters().find(name);
  const Tensor* const of_p = s.tensors.data() + std::ssize(tensors_of(p)) * (&p - parameters().all().data());
  if (which != ParameterTensor::value) return of_p[static_cast<std::size_t>(which)];
  Parameter then = p;
  then.own_value = of_p[0].flat();
  then.own_remainder = of_p[4];
  return own_weights(*rank_, then);
}

void ReferenceRun::keep_version() {
  const Tensor& values = parameters().values();
  versions_.emplace_back(arena_, MemoryCategory::parameters, values.dtype(), values.shape());
  kernels_->copy(values, versions_.back());
}

void ReferenceRun::apply_update(std::int64_t step) {
  optimizer_step(*rank_, parameters(), optimizer_, learning_rate(optimizer_, step), updates_, 1.0);
  ++updates_;
  keep_version();
  if (static_cast<int>(versions_.size()) > std::max(2, given_.mesh.size(Axis::pp))) versions_.pop_front();
}

}  // namespace echelon
