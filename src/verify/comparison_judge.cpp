// What is further apart than the bound that is known beforehand: held to what rounding does to these very
// numbers.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "checkpoint/router_biases.h"
#include "tensor/host.h"
#include "verify/comparison.h"

namespace echelon {
namespace {

// Of each element the largest of its row: rows are of one token, or one output of a matrix, and a row's
// rounding is of one size where that of single elements may be small by chance.
void take_largest_of_rows(const ParamSpec& spec, std::vector<double>& values) {
  const std::int64_t width = spec.shape.empty() ? 1 : spec.shape.back();
  for (auto row = values.begin(); width > 0 && std::distance(row, values.end()) >= width; row += width)
    std::fill(row, row + width, *std::max_element(row, row + width));
}

}  // namespace

// What has failed has failed, whatever rounding does; and where every bit is promised rounding excuses
// nothing.
bool Comparison::may_judge() const { return report_.pass && finite_ && bound_ > 0; }

void Comparison::judge(std::int64_t step, ParameterTensor which, double clip,
                       const std::vector<Beyond>& beyond) {
  const bool is_gradient = which == ParameterTensor::gradient;
  const bool differs = is_gradient && leads() && judge_.has_differences(stretch_, step);
  if (differs && bound_ == 0) found(step, "a router", "choice", 0);
  const bool measured = agree((!beyond.empty() || differs) && may_judge());
  Rounding rounding;
  if (measured) rounding = measure_rounding(step, which, beyond);
  for (std::size_t n = 0; n < beyond.size(); ++n) {
    const std::size_t i = beyond[n].parameter;
    double share_of_allowed = beyond[n].share;
    if (measured) {
      const Numbers expected = reference_tensor(i, which);
      Numbers allowed = tolerances(i, which, step, clip, expected);
      if (leads()) {
        std::vector<double>& moves = rounding.tensors[n];
        take_largest_of_rows(at(i), moves);
        for (std::size_t k = 0; k < moves.size(); ++k)
          if (std::isfinite(moves[k])) allowed[k] = std::max(allowed[k], multiple() * moves[k]);
      }
      share(allowed);
      share_of_allowed = worst_difference(i, which, expected, allowed).share;
    }
    if (!leads()) continue;
    const char* kind = is_gradient ? "grad" : "param";
    if (!is_gradient) report_.param_worst = std::max(report_.param_worst, share_of_allowed);
    if (measured) note_judged(step, at(i).name, kind, share_of_allowed);
    if (!(share_of_allowed <= 1)) found(step, at(i).name, kind, beyond[n].rel_diff);
  }
  if (leads() && measured && is_gradient) judge_routing(step);
}

void Comparison::judge_loss(std::int64_t step, double difference, double rel_diff) {
  const bool measured = agree(may_judge());
  const Rounding rounding = measured ? measure_rounding(step, ParameterTensor::gradient, {}) : Rounding();
  if (!leads()) return;
  const double share_of_allowed = over(difference, multiple() * rounding.loss);
  if (measured) note_judged(step, "loss", "loss", share_of_allowed);
  if (!(share_of_allowed <= 1)) found(step, "loss", "loss", rel_diff);
}

void Comparison::judge_routing(std::int64_t step) {
  for (std::int64_t s = stretch_; s <= step; ++s)
    for (RoutingDifference& d : judge_.differences(s, multiple())) {
      if (!d.ties()) found(s, router_weight_name(request_.plan.model, d.layer), d.kind, d.shift);
      report_.routing_differences.push_back(std::move(d));
    }
}

void Comparison::note_judged(std::int64_t step, const std::string& tensor, const std::string& kind,
                             double share_of_allowed) {
  ++report_.judged;
  if (report_.judged > 1 && share_of_allowed <= report_.worst_judged.rel_diff) return;
  report_.worst_judged = Difference{step, tensor, kind, share_of_allowed};
}

// The stretch again, with rounding noise: how far results move, as the root of their mean square. Every rank
// waits for each trial by itself, so that no wait is longer than that for a stretch.
Comparison::Rounding Comparison::measure_rounding(std::int64_t step, ParameterTensor which,
                                                  const std::vector<Beyond>& beyond) {
  Rounding rounding;
  ReferenceRun::State clean;
  if (leads()) clean = reference_->state();
  for (const Beyond& b : beyond)
    rounding.tensors.emplace_back(static_cast<std::size_t>(at(b.parameter).numel()));
  for (int trial = 0; trial < rounding_trials; ++trial) {
    if (leads()) {
      const double loss = run_trial(trial, step, which == ParameterTensor::value);
      rounding.loss += std::pow(loss - expected_.at(static_cast<std::size_t>(step)), 2);
      for (std::size_t n = 0; n < beyond.size(); ++n) {
        const std::string& name = at(beyond[n].parameter).name;
        const Numbers numbers = reference_numbers(beyond[n].parameter, which),
                      before = copy_numbers_to_host(reference_->tensor_in(clean, name, which));
        for (std::size_t k = 0; k < rounding.tensors[n].size(); ++k)
          rounding.tensors[n][k] += std::pow(numbers[k] - before[k], 2);
      }
    }
    (void)agree(true);
  }
  if (leads()) reference_->set_state(clean);
  const auto root_mean = [](double squares) { return std::sqrt(squares / rounding_trials); };
  rounding.loss = root_mean(rounding.loss);
  for (auto& tensor : rounding.tensors)
    std::transform(tensor.begin(), tensor.end(), tensor.begin(), root_mean);
  return rounding;
}

// Returns the loss of the last step.
double Comparison::run_trial(int trial, std::int64_t last, bool updates) {
  const auto& [first, state] = *std::prev(stretches_.upper_bound(last));
  reference_->set_state(state);
  reference_->noise().begin(
      request_.seed + static_cast<std::uint64_t>(trial + rounding_trials * last),
      rounds_otherwise(request_.plan, takes_other_kernels(request_.plan, request_.run)));
  judge_.begin_trial();
  double loss = 0;
  for (std::int64_t s = first; s <= last; ++s) {
    loss = reference_->compute_gradients(s, request_.samples);
    if (s < last || updates) reference_->apply_gradients(s);
  }
  judge_.end_trial();
  reference_->noise().end();
  return loss;
}

}  // namespace echelon
