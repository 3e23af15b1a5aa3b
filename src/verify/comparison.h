// Compares one rank of the mesh with the one-rank run, step by step: what verify() does on every rank.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/logical_tensors.h"
#include "tensor/host.h"
#include "verify/reference_run.h"
#include "verify/routing_decisions.h"
#include "verify/verify.h"

namespace echelon {

// difference / magnitude. 0 for no difference; infinite for a difference from 0, or NaN.
inline double over(double difference, double magnitude) {
  if (difference == 0) return 0;
  return difference > 0 && magnitude > 0 ? difference / magnitude : std::numeric_limits<double>::infinity();
}

class Comparison {
 public:
  struct Bounds {
    double gradient = 0, loss = 0;  // as in the report
  };
  // `report` is used on rank 0 only.
  Comparison(const VerifyRequest& request, const Rank& rank, const Bounds& bounds, VerifyReport& report);

  // Compares one step. False if training cannot go on from the result: a number is not finite.
  bool step(std::int64_t step);

  // On rank 0, after the last step: why agreement proves nothing; otherwise empty.
  const std::string& unproved() const { return unproved_; }

  const PipelineRun& last_run() const { return trainer_.last_run(); }

 private:
  struct Worst {
    double difference = 0;  // max |a - b|
    double share = 0;       // max |a - b| / tolerance
  };
  // A tensor whose difference exceeds its tolerance.
  struct Beyond {
    std::size_t parameter = 0;
    double rel_diff = 0, share = 0;
  };
  // By how much rounding changes results; on rank 0.
  struct Rounding {
    std::vector<std::vector<double>> tensors;  // by element
    // For each part of a gradient that a rank of the mesh may hold, the noise along the gradient as a
    // fraction of it.
    std::vector<std::vector<double>> shares;
    double loss = 0;
  };

  bool leads() const { return rank_.index() == 0; }
  std::size_t count() const { return trainer_.parameters().model().size(); }
  const ParamSpec& at(std::size_t i) const { return trainer_.parameters().model()[i]; }
  // nullptr on a pipeline rank without the parameter.
  const Parameter* here(std::size_t i) const { return trainer_.parameters().find_here(at(i).name); }

  bool run_on(std::int64_t step);
  void begin_stretch(std::int64_t step);
  void compute_reference(std::int64_t step);
  // Whether the comparison ends because rank 0's result is not finite.
  bool ends_at(std::int64_t step, const std::string& what, bool is_finite);
  using Numbers = std::vector<double>;
  void share(Numbers& numbers) const;
  double from_rank_0(double value) const;
  bool agree(bool on_rank_0) const { return from_rank_0(on_rank_0 ? 1 : 0) != 0; }
  Numbers reference_numbers(std::size_t i, ParameterTensor which) const {  // on rank 0
    return copy_numbers_to_host(
        local_tensor(reference_->rank(), reference_->parameters().find(at(i).name), which));
  }
  Numbers reference_tensor(std::size_t i, ParameterTensor which) const;
  Worst worst_difference(std::size_t i, ParameterTensor which, const Numbers& expected,
                         const Numbers& tolerances) const;
  void found(std::int64_t step, const std::string& tensor, const std::string& kind, double rel_diff);

  // Compares `which` of all parameters; `clip`: the factor that the update's gradients were multiplied by.
  void compare(std::int64_t step, ParameterTensor which, double clip = 1);
  void check_widths(std::int64_t step);
  bool has_no_sums(std::size_t i, const std::function<bool(double)>& fits) const;
  void compare_wide(std::int64_t step);
  void compare_loss(std::int64_t step, double loss);
  Numbers muon_tolerances(std::size_t i, std::int64_t step, double clip, const Numbers& expected) const;
  Numbers tolerances(std::size_t i, ParameterTensor which, std::int64_t step, double clip,
                     const Numbers& expected) const;
  Numbers parameter_tolerances(std::size_t i, std::int64_t step, double clip, const Numbers& expected) const;

  bool may_judge() const;  // on rank 0
  void judge(std::int64_t step, ParameterTensor which, double clip, const std::vector<Beyond>& beyond);
  void judge_proof(std::int64_t step, std::size_t num_hidden, const std::string& first);
  std::size_t num_parts() const {
    return static_cast<std::size_t>(rank_.size(Axis::pp)) * static_cast<std::size_t>(rank_.size(Axis::tp));
  }
  Numbers shares_of_parts(std::size_t i, const Numbers& gradient, const Numbers& change) const;
  double worst_share(std::size_t i, const Numbers& expected, const Numbers& allowed) const;
  void judge_loss(std::int64_t step, double difference, double rel_diff);
  void judge_routing(std::int64_t step);
  void note_judged(std::int64_t step, const std::string& tensor, const std::string& kind,
                   double share_of_allowed);
  Rounding measure_rounding(std::int64_t step, ParameterTensor which, const std::vector<Beyond>& beyond);
  double run_trial(int trial, std::int64_t last, bool updates);

  double updates_since_compared() const;
  void keep_squares();
  void add_earlier_tolerance(std::size_t i, std::int64_t step, Numbers& tolerance) const;
  void take_reference_state();

  const VerifyRequest& request_;
  const Rank& rank_;
  double bound_, loss_bound_;
  VerifyReport& report_;
  Trainer trainer_;
  RoutingRecorder recorder_;
  // First step of the current stretch of steps: the mesh takes over the reference's state only after the last
  // of them.
  std::int64_t stretch_ = 0;
  std::vector<double> gradient_sizes_;  // by parameter, of the last step compared
  bool finite_ = true, ended_ = false;  // agreed by all ranks
  bool has_earlier_squares_ = false;
  // On rank 0.
  std::string unproved_;
  RoutingJudge judge_;
  std::unique_ptr<ReferenceRun> reference_;
  std::unique_ptr<ReferenceRun> wide_;                     // in f32, if the plan is narrower
  std::vector<double> expected_;                           // losses, by step
  std::vector<double> wide_losses_;                        // by step
  std::map<std::int64_t, ReferenceRun::State> stretches_;  // the state before each of the last two stretches
  std::vector<Numbers> earlier_squares_;                   // by parameter
};

}  // namespace echelon
