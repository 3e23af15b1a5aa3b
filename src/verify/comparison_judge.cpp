// What is further apart than the bound that is known beforehand: held to what rounding does to these very
// numbers.
#include <fmt/core.h>

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
  std::size_t num_hidden = 0;
  std::string first_hidden;
  const auto note_hidden = [&](std::size_t i, const Numbers& shares) {
    const double most = rounding_multiple * *std::max_element(shares.begin(), shares.end());
    if (most < all_of_it) return;
    report_.hidden.push_back({step, at(i).name, "grad", most});
    if (num_hidden++ == 0) first_hidden = at(i).name;
  };
  Rounding rounding;
  if (measured) rounding = measure_rounding(step, which, beyond);
  for (std::size_t n = 0; n < beyond.size(); ++n) {
    const std::size_t i = beyond[n].parameter;
    double share_of_allowed = beyond[n].share;
    if (measured) {
      const Numbers expected = reference_tensor(i, which);
      Numbers allowed = tolerances(i, which, step, clip, expected);
      Numbers shares(is_gradient ? num_parts() : 0);
      if (leads()) {
        std::vector<double>& moves = rounding.tensors[n];
        if (is_gradient) note_hidden(i, shares = rounding.shares[n]);
        take_largest_of_rows(at(i), moves);
        for (std::size_t k = 0; k < moves.size(); ++k)
          if (std::isfinite(moves[k])) allowed[k] = std::max(allowed[k], rounding_multiple * moves[k]);
        for (double& x : shares) x = std::isfinite(x) ? std::max(bound_, rounding_multiple * x) : bound_;
      }
      share(allowed);
      share_of_allowed = worst_difference(i, which, expected, allowed).share;
      if (is_gradient) {
        share(shares);
        share_of_allowed = std::max(share_of_allowed, worst_share(i, expected, shares));
      }
    }
    if (!leads()) continue;
    const char* kind = is_gradient ? "grad" : "param";
    if (!is_gradient) report_.param_worst = std::max(report_.param_worst, share_of_allowed);
    if (measured) note_judged(step, at(i).name, kind, share_of_allowed);
    if (!(share_of_allowed <= 1)) found(step, at(i).name, kind, beyond[n].rel_diff);
  }
  if (leads() && measured && is_gradient) judge_routing(step);
  if (leads() && num_hidden > 0) judge_proof(step, num_hidden, first_hidden);
}

// In a precision that could be wider: whether enough is left of the gradients of a step.
void Comparison::judge_proof(std::int64_t step, std::size_t num_hidden, const std::string& first) {
  const PrecisionRecipe& precision = rank_.precision();
  std::size_t num_trained = 0;
  for (std::size_t i = 0; i < count(); ++i) num_trained += at(i).frozen ? 0 : 1;
  if (precision.gradients == precision.activations || 2 * num_hidden <= num_trained || !unproved_.empty())
    return;
  unproved_ = fmt::format(
      "step {}: {} of {} gradients could be rounding in {} as a whole, that of {} first: wrong ones would "
      "not show; legal: a wider --precision, fewer layers, or more tokens",
      step, num_hidden, num_trained, precision.name, first);
}

// Of each part of a logical gradient that a rank may hold how much of it `change` is, along it.
Comparison::Numbers Comparison::shares_of_parts(std::size_t i, const Numbers& gradient,
                                                const Numbers& change) const {
  Numbers shares(num_parts());
  ParamSpec spec = here(i) != nullptr ? here(i)->spec : at(i);  // rank 0 has a part of what is cut over pp
  const int tp = rank_.size(Axis::tp);
  for (std::size_t part = 0; part < num_parts(); ++part) {
    if (spec.parts > 1) spec.part = static_cast<int>(part) / tp;
    double along = 0, size = 0;
    for_each_run(
        spec, tp, static_cast<int>(part) % tp, [&](std::int64_t logical, std::int64_t, std::int64_t n) {
          for (auto k = static_cast<std::size_t>(logical); k < static_cast<std::size_t>(logical + n); ++k) {
            along += change[k] * gradient[k];
            size += gradient[k] * gradient[k];
          }
        });
    shares[part] = over(std::abs(along), size);
  }
  return shares;
}

// How much too large or too small what each rank holds of a gradient is, as a share of what is allowed.
double Comparison::worst_share(std::size_t i, const Numbers& expected, const Numbers& allowed) const {
  Numbers worst(1);
  if (const Parameter* parameter = here(i)) {
    const Numbers local = copy_numbers_to_host(local_tensor(rank_, *parameter, ParameterTensor::gradient));
    const int tp_rank = rank_.coordinate(Axis::tp), tp = rank_.size(Axis::tp);
    double along = 0, size = 0;
    for_each_run(parameter->spec, tp, tp_rank, [&](std::int64_t logical, std::int64_t begin, std::int64_t n) {
      for (std::int64_t k = 0; k < n; ++k) {
        const double of_one = expected[static_cast<std::size_t>(logical + k)];
        along += (local[static_cast<std::size_t>(begin + k)] - of_one) * of_one;
        size += of_one * of_one;
      }
    });
    const auto part = static_cast<std::size_t>(rank_.coordinate(Axis::pp) * tp + tp_rank);
    worst[0] = over(over(std::abs(along), size), allowed[part]);
  }
  for (Axis axis : all_axes) worst = HostGroup(rank_.along(axis)).max(worst);
  return worst[0];
}

void Comparison::judge_loss(std::int64_t step, double difference, double rel_diff) {
  const bool measured = agree(may_judge());
  const Rounding rounding = measured ? measure_rounding(step, ParameterTensor::gradient, {}) : Rounding();
  if (!leads()) return;
  const double share_of_allowed = over(difference, rounding_multiple * rounding.loss);
  if (measured) note_judged(step, "loss", "loss", share_of_allowed);
  if (!(share_of_allowed <= 1)) found(step, "loss", "loss", rel_diff);
}

void Comparison::judge_routing(std::int64_t step) {
  for (std::int64_t s = stretch_; s <= step; ++s)
    for (RoutingDifference& d : judge_.differences(s, rounding_multiple)) {
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
  for (const Beyond& b : beyond) {
    rounding.tensors.emplace_back(static_cast<std::size_t>(at(b.parameter).numel()));
    rounding.shares.emplace_back(num_parts());
  }
  for (int trial = 0; trial < rounding_trials; ++trial) {
    if (leads()) {
      const double loss = run_trial(trial, step, which == ParameterTensor::value);
      rounding.loss += std::pow(loss - expected_.at(static_cast<std::size_t>(step)), 2);
      for (std::size_t n = 0; n < beyond.size(); ++n) {
        const std::string& name = at(beyond[n].parameter).name;
        const Numbers before = copy_numbers_to_host(reference_->tensor_in(clean, name, which));
        Numbers moves = reference_numbers(beyond[n].parameter, which);
        for (std::size_t k = 0; k < moves.size(); ++k) moves[k] -= before[k];
        const auto add_squares = [](const Numbers& of, Numbers& to) {
          for (std::size_t k = 0; k < of.size(); ++k) to[k] += of[k] * of[k];
        };
        add_squares(moves, rounding.tensors[n]);
        if (which == ParameterTensor::gradient)
          add_squares(shares_of_parts(beyond[n].parameter, before, moves), rounding.shares[n]);
      }
    }
    (void)agree(true);
  }
  if (leads()) reference_->set_state(clean);
  const auto root_mean = [](double squares) { return std::sqrt(squares / rounding_trials); };
  rounding.loss = root_mean(rounding.loss);
  for (auto* const all : {&rounding.tensors, &rounding.shares})
    for (auto& numbers : *all) std::transform(numbers.begin(), numbers.end(), numbers.begin(), root_mean);
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
