#include "verify/comparison.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/bf16.h"
#include "base/philox.h"
#include "comm/host_group.h"
#include "spec/fp8.h"
#include "tensor/host.h"
#include "tensor/reference_view.h"
#include "train/muon.h"

namespace echelon {
namespace {

double max_magnitude(const std::vector<double>& numbers) {
  double largest = 0;
  for (double x : numbers) largest = std::max(largest, std::abs(x));
  return largest;
}

// The relative distance of neighbouring numbers.
double unit_of(DType dtype) { return dtype == DType::f64 ? 0x1p-52 : dtype == DType::f32 ? 0x1p-23 : 0x1p-7; }

// Of numbers of up to 26 bits, so that products of two are exact.
bool is_column_times_row(const std::vector<double>& matrix, std::int64_t width) {
  const auto num_columns = static_cast<std::size_t>(width);
  if (matrix.empty()) return true;
  const auto largest = std::max_element(matrix.begin(), matrix.end(),
                                        [](double a, double b) { return std::abs(a) < std::abs(b); });
  const auto at = static_cast<std::size_t>(largest - matrix.begin());
  const double* const row = &matrix[at - at % num_columns];
  for (std::size_t k = 0; k < matrix.size(); ++k)
    if (matrix[k] * *largest != matrix[k - k % num_columns + at % num_columns] * row[k % num_columns])
      return false;
  return true;
}

// Zero biases would hide a bias that is added twice, and norms of one a weight that is left out.
void perturb_constants(const Rank& rank, const ParameterStore& parameters, std::uint64_t seed) {
  for (const Parameter& p : parameters.all()) {
    if (p.spec.init == Init::normal) continue;
    const Tensor values = local_tensor(rank, p, ParameterTensor::value);
    const Philox random(seed, Stream::test, name_hash(p.spec.name.c_str()));
    with_stored_type(values, [&]<class F>(F) {
      std::vector<F> numbers = copy_to_host<F>(values);
      for_each_run(p.spec, rank.size(Axis::tp), rank.coordinate(Axis::tp),
                   [&](std::int64_t logical, std::int64_t local, std::int64_t count) {
                     for (std::int64_t i = 0; i < count; ++i) {
                       F& number = numbers[static_cast<std::size_t>(local + i)];
                       const double noise = 0.05 * random.normal(static_cast<std::uint64_t>(logical + i));
                       number = static_cast<F>(number + static_cast<Wide<F>>(noise));
                     }
                   });
      copy_from_host(numbers, values);
    });
    store_local(rank, values, p, ParameterTensor::value);
  }
}

}  // namespace

Comparison::Comparison(const VerifyRequest& request, const Rank& rank, const Bounds& bounds,
                       VerifyReport& report)
    : request_(request),
      rank_(rank),
      bound_(bounds.gradient),
      loss_bound_(bounds.loss),
      report_(report),
      trainer_(rank, request.plan, request.optimizer, request.seed, {request.faults}),
      recorder_(request.plan) {
  const auto prepare = [&](const Rank& of, const ParameterStore& parameters) {
    perturb_constants(of, parameters, request.seed);
    if (request.prepare) request.prepare(parameters);
  };
  prepare(rank, trainer_.parameters());
  trainer_.stages().watch_routing(&recorder_);
  if (!leads()) return;
  reference_ = std::make_unique<ReferenceRun>(request.plan, request.optimizer, request.run, request.seed);
  prepare(reference_->rank(), reference_->parameters());
  reference_->follow(judge_);
  const std::optional<Plan> wide = wide_plan(request.plan);
  if (!wide) return;
  wide_ = std::make_unique<ReferenceRun>(*wide, request.optimizer, request.run, request.seed);
  wide_->follow(judge_);
  report_.wide.emplace().precision = wide->precision.name;
}

// The step once more from the reference's weights, before it is stepped on.
void Comparison::compare_wide(std::int64_t step) {
  if (!wide_) return;
  for (const Parameter& p : reference_->parameters().all()) {
    const Parameter& q = wide_->parameters().find(p.spec.name);
    copy_numbers_from_host(copy_numbers_to_host(own_weights(reference_->rank(), p)), q.own_value);
  }
  judge_.begin_wide();
  const double loss = wide_->compute_gradients(step, request_.samples), narrow = expected_.back();
  judge_.end_wide();
  VerifyReport::Wide& wide = *report_.wide;
  wide.loss_rel_diff = std::max(wide.loss_rel_diff, over(std::abs(loss - narrow), std::abs(loss)));
  for (const Parameter& p : reference_->parameters().all()) {
    if (p.spec.frozen) continue;
    const std::vector<double> of_narrow = copy_numbers_to_host(p.own_gradient),
                              of_wide =
                                  copy_numbers_to_host(wide_->parameters().find(p.spec.name).own_gradient);
    double largest = 0, apart = 0;
    for (std::size_t k = 0; k < of_wide.size(); ++k) {
      largest = std::max(largest, std::abs(of_wide[k]));
      apart = std::max(apart, std::abs(of_wide[k] - of_narrow[k]));
    }
    if (apart > 0) wide.grad_rel_diff = std::max(wide.grad_rel_diff, over(apart, largest));
  }
  wide_losses_.push_back(loss);
}

// Where gradients are promised to be wider than what they are sums of: a matrix's whose every element fits
// into the narrower type was kept in it. A row of a table that one token has looked up has no sum.
// Nor has what one token alone gives to a matrix in fp8: a product of two such numbers fits.
void Comparison::check_widths(std::int64_t step) {
  const auto fits = [](double x) { return static_cast<double>(static_cast<float>(bf16(x))) == x; };
  const PrecisionRecipe& precision = rank_.precision();
  if (precision.gradients == precision.activations) return;
  constexpr double enough = 256;            // elements: of a sum one in 2^16 is so by chance
  std::vector<double> counts(2 * count());  // of each parameter: elements other than zero; those that fit
  for (std::size_t i = 0; i < count(); ++i)
    if (const Parameter* p = here(i); p != nullptr && p->spec.multiplies && !p->spec.frozen)
      for (double x : copy_numbers_to_host(p->own_gradient))
        if (x != 0) {
          counts[2 * i] += 1;
          counts[2 * i + 1] += fits(x) ? 1 : 0;
        }
  for (Axis axis : all_axes) counts = HostGroup(rank_.along(axis)).sum(counts);
  for (std::size_t i = 0; i < count(); ++i) {
    if (counts[2 * i] < enough || counts[2 * i + 1] < counts[2 * i]) continue;
    if (multiplies_in_fp8(precision) && has_no_sums(i, fits)) continue;
    if (leads()) found(step, at(i).name, "width", 0);
  }
}

// Whether each element of a gradient in fp8 is one product: on one rank every element fits as well, or what
// each rank of the mesh holds is exactly a column times a row, an output gradient times an input. The one
// rank may have the rounding of a second token: the first query of a sequence has no gradient but that.
bool Comparison::has_no_sums(std::size_t i, const std::function<bool(double)>& fits) const {
  bool on_one_rank = false;
  if (leads()) {
    const Numbers expected = reference_numbers(i, ParameterTensor::gradient);
    on_one_rank = std::all_of(expected.begin(), expected.end(), fits);
  }
  if (agree(on_one_rank)) return true;
  Numbers num_others(1);  // ranks on which it is no such product
  if (const Parameter* p = here(i)) {
    const Tensor local = local_tensor(rank_, *p, ParameterTensor::gradient);
    num_others[0] = is_column_times_row(copy_numbers_to_host(local), local.shape().back()) ? 0 : 1;
  }
  for (Axis axis : all_axes) num_others = HostGroup(rank_.along(axis)).sum(num_others);
  return num_others[0] == 0;
}

bool Comparison::step(std::int64_t step) {
  if (!trainer_.flushes() || !request_.plan.optimizer_barrier) return run_on(step);
  begin_stretch(step);
  const double loss = trainer_.compute_gradients(step, request_.samples);
  compute_reference(step);
  if (ends_at(step, "the loss", !leads() || std::isfinite(expected_.back()))) return false;
  compare(step, ParameterTensor::gradient);
  if (ended_) return false;
  compare_loss(step, loss);
  if (!finite_) return false;
  const double clip = from_rank_0(leads() ? reference_->apply_gradients(step) : 1);
  trainer_.apply_gradients(step);
  compare(step, ParameterTensor::value, clip);
  has_earlier_squares_ = false;
  take_reference_state();
  return !ended_;
}

// A step that the mesh does not end before it begins the next one.
bool Comparison::run_on(std::int64_t step) {
  // Without the optimizer's barrier a step is unfinished until the next one validates it: two go together.
  const std::int64_t left = request_.steps - step;
  const std::int64_t together = trainer_.flushes() ? std::min<std::int64_t>(left, 2 - step % 2) : left;
  const bool is_whole = !trainer_.flushes() || together == 1;
  if (!trainer_.flushes() || step % 2 == 0) begin_stretch(step);
  const std::vector<StepResult> results = trainer_.step(step, request_.samples, together);
  compute_reference(step);
  if (ends_at(step, "the loss", !leads() || std::isfinite(expected_.back()))) return false;
  for (const StepResult& result : results) compare_loss(result.step, result.loss);
  // The gradients of the last update stay until the next one begins.
  if (is_whole) compare(step, ParameterTensor::gradient);
  if (ended_ || !finite_) return false;
  const double clip = from_rank_0(leads() ? reference_->apply_gradients(step) : 1);
  if (!is_whole) {
    if (trainer_.flushes()) keep_squares();
    return true;
  }
  compare(step, ParameterTensor::value, clip);
  has_earlier_squares_ = false;
  take_reference_state();
  return !ended_;
}

void Comparison::begin_stretch(std::int64_t step) {
  stretch_ = step;
  if (!leads()) return;
  // Where the schedule does not flush, a step's loss is known one step later.
  while (stretches_.size() > (trainer_.flushes() ? 0u : 1u)) stretches_.erase(stretches_.begin());
  judge_.forget_before(stretches_.empty() ? step : stretches_.begin()->first);
  stretches_.emplace(step, reference_->state());
}

// With the experts that the mesh has chosen.
void Comparison::compute_reference(std::int64_t step) {
  RoutingRecorder::Gathered routing = recorder_.gather(rank_, step);
  if (!leads()) return;
  judge_.impose(step, std::move(routing));
  expected_.push_back(reference_->compute_gradients(step, request_.samples));
  compare_wide(step);
}

// Whatever the mesh has. A difference that was found before is an answer all the same.
bool Comparison::ends_at(std::int64_t step, const std::string& what, bool is_finite) {
  if (!agree(!is_finite && report_.pass)) return false;
  ended_ = true;
  report_.pass = false;
  report_.incomparable =
      fmt::format("step {}: {} of one rank is not finite (learning rate {}): nothing can be compared with it",
                  step, what, request_.optimizer.lr);
  return true;
}

// From rank 0 to everyone.
void Comparison::share(Numbers& numbers) const {
  const bool first_stage = rank_.coordinate(Axis::pp) == 0;
  if (first_stage && rank_.dp_cp().rank() == 0) HostGroup(rank_.along(Axis::tp)).broadcast(numbers, 0);
  if (first_stage) HostGroup(rank_.dp_cp()).broadcast(numbers, 0);
  HostGroup(rank_.along(Axis::pp)).broadcast(numbers, 0);
}

double Comparison::from_rank_0(double value) const {
  Numbers said{value};
  share(said);
  return said.front();
}

// Of the reference's logical tensor, on every rank.
Comparison::Numbers Comparison::reference_tensor(std::size_t i, ParameterTensor which) const {
  Numbers numbers = leads() ? reference_numbers(i, which) : Numbers(static_cast<std::size_t>(at(i).numel()));
  share(numbers);
  return numbers;
}

// Over what every rank holds of the tensor, replicas included.
Comparison::Worst Comparison::worst_difference(std::size_t i, ParameterTensor which, const Numbers& expected,
                                               const Numbers& tolerances) const {
  Numbers worst(2);
  if (const Parameter* parameter = here(i)) {
    const Numbers local = copy_numbers_to_host(local_tensor(rank_, *parameter, which));
    for_each_run(parameter->spec, rank_.size(Axis::tp), rank_.coordinate(Axis::tp),
                 [&](std::int64_t logical, std::int64_t begin, std::int64_t n) {
                   for (std::int64_t k = 0; k < n; ++k) {
                     const auto there = static_cast<std::size_t>(logical + k);
                     double d = std::abs(expected[there] - local[static_cast<std::size_t>(begin + k)]);
                     if (std::isnan(d)) d = std::numeric_limits<double>::infinity();
                     worst[0] = std::max(worst[0], d);
                     worst[1] = std::max(worst[1], over(d, tolerances[there]));
                   }
                 });
  }
  for (Axis axis : all_axes) worst = HostGroup(rank_.along(axis)).max(worst);
  return {worst[0], worst[1]};
}

void Comparison::found(std::int64_t step, const std::string& tensor, const std::string& kind,
                       double rel_diff) {
  report_.pass = false;
  if (!report_.first_difference) report_.first_difference = Difference{step, tensor, kind, rel_diff};
}

void Comparison::compare(std::int64_t step, ParameterTensor which, double clip) {
  const bool is_gradient = which == ParameterTensor::gradient;
  if (is_gradient) gradient_sizes_.clear();
  std::vector<Beyond> beyond;
  for (std::size_t i = 0; i < count(); ++i) {
    if (is_gradient && at(i).frozen) {
      gradient_sizes_.push_back(0);
      continue;
    }
    const Numbers expected = reference_tensor(i, which);
    const bool is_finite =
        std::all_of(expected.begin(), expected.end(), [](double x) { return std::isfinite(x); });
    if (!is_finite && ends_at(step, (is_gradient ? "the gradient of " : "") + at(i).name, false)) return;
    const double size = max_magnitude(expected);
    if (is_gradient) gradient_sizes_.push_back(size);
    const Worst worst = worst_difference(i, which, expected, tolerances(i, which, step, clip, expected));
    if (is_gradient) finite_ &= std::isfinite(worst.difference);
    const double rel = over(worst.difference, size);
    if (!(worst.share <= 1)) beyond.push_back({i, rel, worst.share});
    if (!leads()) continue;
    double& largest = is_gradient ? report_.grad_max_rel_diff : report_.param_max_rel_diff;
    largest = std::max(largest, rel);
    report_.bitwise &= worst.difference == 0;
    if (!is_gradient && worst.share <= 1) report_.param_worst = std::max(report_.param_worst, worst.share);
  }
  judge(step, which, clip, beyond);
  if (is_gradient) check_widths(step);
}

// Of each element, so far as it is known beforehand.
Comparison::Numbers Comparison::tolerances(std::size_t i, ParameterTensor which, std::int64_t step,
                                           double clip, const Numbers& expected) const {
  if (bound_ == 0) return Numbers(expected.size());  // equal to the last bit
  if (which == ParameterTensor::value) return parameter_tolerances(i, step, clip, expected);
  return Numbers(expected.size(), bound_ * gradient_sizes_[i]);
}

void Comparison::compare_loss(std::int64_t step, double loss) {
  double difference = 0, rel = 0;
  if (leads()) {
    const double expected = expected_.at(static_cast<std::size_t>(step));
    report_.reference_losses.push_back(expected);
    report_.mesh_losses.push_back(loss);
    difference = std::abs(expected - loss);
    rel = over(difference, std::abs(expected));
    report_.bitwise &= expected == loss;
    report_.loss_max_rel_diff = std::max(report_.loss_max_rel_diff, rel);
    if (wide_) {
      const double exact = wide_losses_.at(static_cast<std::size_t>(step));
      double& mesh = report_.wide->mesh_loss_rel_diff;
      mesh = std::max(mesh, over(std::abs(exact - loss), std::abs(exact)));
    }
  }
  if (agree(!(rel <= loss_bound_))) judge_loss(step, difference, rel);
}

double Comparison::updates_since_compared() const {
  return request_.plan.optimizer_barrier ? static_cast<double>(trainer_.updates(1)) : 2;
}

// Of the first of two updates that are compared together.
void Comparison::keep_squares() {
  has_earlier_squares_ = true;
  earlier_squares_.clear();
  if (!leads()) return;
  for (std::size_t i = 0; i < count(); ++i)
    earlier_squares_.push_back(at(i).frozen ? Numbers() : reference_numbers(i, ParameterTensor::exp_avg_sq));
}

// What the first of two updates may have added to the tolerance of a parameter: its gradient was another
// one, which left (1 - beta2) g^2 or more.
void Comparison::add_earlier_tolerance(std::size_t i, std::int64_t step, Numbers& tolerance) const {
  if (!has_earlier_squares_) return;
  const OptimizerOptions& o = request_.optimizer;
  Numbers squares = leads() ? earlier_squares_[i] : Numbers(tolerance.size());
  share(squares);
  const double correction = 1.0 - std::pow(o.beta2, static_cast<double>(trainer_.updates(step)));
  const double gradient_error = bound_ * std::sqrt(max_magnitude(squares) / (1 - o.beta2));
  for (std::size_t k = 0; k < squares.size(); ++k)
    tolerance[k] += 4 * learning_rate(o, step - 1) *
                    std::min(1.0, gradient_error / (std::sqrt(squares[k] / correction) + o.eps));
}

Comparison::Numbers Comparison::parameter_tolerances(std::size_t i, std::int64_t step, double clip,
                                                     const Numbers& expected) const {
  if (at(i).frozen) return Numbers(expected.size());  // no step moves it
  if (is_updated_whole(request_.plan.optimizer, at(i))) return muon_tolerances(i, step, clip, expected);
  const double lr = learning_rate(request_.optimizer, step);
  const double correction =
      1.0 - std::pow(request_.optimizer.beta2, static_cast<double>(trainer_.updates(step + 1)));
  const double epsilon = unit_of(rank_.precision().master);
  const Numbers squares = reference_tensor(i, ParameterTensor::exp_avg_sq);
  Numbers tolerance(expected.size());
  // Where a step has several updates the last one's gradient may be none at all, as that of an expert
  // without tokens: each g of the others left (1 - beta2) g^2 or more, but for beta2 to the number of
  // updates since.
  const double earlier =
      trainer_.flushes()
          ? 0
          : std::sqrt(max_magnitude(squares) / (1 - request_.optimizer.beta2) /
                      std::pow(request_.optimizer.beta2, static_cast<double>(trainer_.updates(1) - 1)));
  const double gradient_error = bound_ * std::max(gradient_sizes_[i], earlier) * clip;
  for (std::size_t k = 0; k < expected.size(); ++k) {
    const double scale = std::sqrt(squares[k] / correction) + request_.optimizer.eps;
    tolerance[k] = updates_since_compared() *
                   (4 * lr * std::min(1.0, gradient_error / scale) + 4 * epsilon * std::abs(expected[k]));
  }
  add_earlier_tolerance(i, step, tolerance);
  return tolerance;
}

// What is orthogonalized differs by no more than its gradient may, and by rounding on the way; no element of
// a step is above 1.25, so no two are further apart than twice that. Of several updates only the last one's
// gradient is known.
Comparison::Numbers Comparison::muon_tolerances(std::size_t i, std::int64_t step, double clip,
                                                const Numbers& expected) const {
  constexpr double furthest = 2 * 1.25, roundings = 16;
  const Numbers gradient = reference_tensor(i, ParameterTensor::gradient),
                momentum = reference_tensor(i, ParameterTensor::exp_avg);
  double squares = 0;
  for (std::size_t k = 0; k < expected.size(); ++k) {
    const double ahead = clip * gradient[k] + muon_momentum * momentum[k];
    squares += ahead * ahead;
  }
  const double norm = std::max(std::sqrt(squares), muon_least_norm);
  // Of the gradient and of the mean that it is part of; and the norm that it is divided by moves as far.
  const double error = 2 * (1 + muon_momentum) * bound_ * gradient_sizes_[i] * clip *
                       std::sqrt(static_cast<double>(expected.size())) / norm;
  const double apart =
      orthogonalization_slope() * (error + roundings * unit_of(rank_.precision().activations));
  const double step_size = learning_rate(request_.optimizer, step) * muon_scale(at(i));
  const double moved = step_size * (apart < furthest ? apart : furthest) +
                       (updates_since_compared() - 1) * step_size * furthest;
  const double epsilon = unit_of(rank_.precision().master);
  Numbers tolerance(expected.size());
  for (std::size_t k = 0; k < expected.size(); ++k)
    tolerance[k] = moved + updates_since_compared() * 4 * epsilon * std::abs(expected[k]);
  return tolerance;
}

// AdamW turns the rounding of a small gradient into a step of any size up to lr, so parameters that each
// lie within their tolerance make gradients of the next step that differ by more than rounding. The mesh
// goes on from the reference's state: every step is compared from the same weights.
void Comparison::take_reference_state() {
  for (std::size_t i = 0; i < count(); ++i)
    for (ParameterTensor which :
         {ParameterTensor::value, ParameterTensor::exp_avg, ParameterTensor::exp_avg_sq}) {
      if (at(i).frozen) continue;
      if (which == ParameterTensor::exp_avg_sq && is_updated_whole(request_.plan.optimizer, at(i))) continue;
      const Numbers reference = reference_tensor(i, which);
      if (here(i) == nullptr) continue;
      const Parameter& p = *here(i);
      const PrecisionRecipe& precision = rank_.precision();
      const DType kept = which == ParameterTensor::value ? precision.master : precision.moments;
      const Tensor local(rank_.arena(), MemoryCategory::other, kept, p.value.shape());
      std::vector<double> numbers(static_cast<std::size_t>(local.numel()));
      for_each_run(p.spec, rank_.size(Axis::tp), rank_.coordinate(Axis::tp),
                   [&](std::int64_t logical, std::int64_t begin, std::int64_t n) {
                     std::copy_n(reference.data() + logical, n, numbers.data() + begin);
                   });
      copy_numbers_from_host(numbers, local);
      store_local(rank_, local, *here(i), which);
    }
}

}  // namespace echelon
