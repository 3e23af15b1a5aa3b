// What verify compares a mesh with: the same training on one rank, on the cpu, so that what another device
// computes is held to kernels that are not its own; under invariant numerics, whose bits are those of the
// kernels that make them, on the mesh's device. Of a schedule that does not flush it is a
// plain emulation of the stated delay, which knows nothing of instructions and pipelines.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "checkpoint/logical_tensors.h"
#include "tensor/rounding_noise.h"
#include "train/session.h"
#include "train/trainer.h"
#include "verify/routing_decisions.h"

namespace echelon {

// The plan's model, batch and dtype on one rank, with nothing computed again.
Plan one_rank_plan(Plan plan);

// The plan in f32, where it is narrower and its schedule flushes: how far that is from it. In f64 in a build
// without kernels for f32.
std::optional<Plan> wide_plan(Plan plan);

// What these take of memory, with the copies of state that verify() makes.
double reference_bytes(const Plan& plan);

class ReferenceRun {
 public:
  // `plan` is the mesh's.
  ReferenceRun(const Plan& plan, const OptimizerOptions& optimizer, const RunOptions& run,
               std::uint64_t seed);

  // The loss of the step; the gradients of its last update are in parameters(), with all updates before that
  // one made.
  double compute_gradients(std::int64_t step, const SampleSource& samples);
  // The step's last update. Returns the factor by which the gradients were clipped.
  double apply_gradients(std::int64_t step);

  // Decides which experts take which tokens; it outlives this.
  void follow(RoutingJudge& judge);
  // Everything that steps change, copied.
  struct State {
    std::vector<Tensor> tensors;  // of each parameter
    std::deque<Tensor> versions;
    std::int64_t updates = 0;
    RouterBiases biases;
  };
  State state() const;
  void set_state(const State& state);
  Tensor tensor_in(const State& state, const std::string& name, ParameterTensor which) const;
  // Off until begin().
  RoundingNoise& noise() { return *noise_; }

  const Rank& rank() const { return *rank_; }
  const ParameterStore& parameters() const { return trainer_->parameters(); }

 private:
  double delayed_gradients(std::int64_t step, std::int64_t update, const SampleSource& samples);
  void keep_version();
  void apply_update(std::int64_t step);
  int version_of(const ParamSpec& spec, std::int64_t update) const;
  std::vector<std::int64_t> samples_of(std::int64_t update_in_step) const;

  Plan given_, plan_;
  OptimizerOptions optimizer_;
  PipelineLayout pipeline_;
  ThreadWorld world_;
  Arena arena_;
  std::unique_ptr<Kernels> kernels_;
  const std::shared_ptr<RoundingNoise> noise_;
  Kernels noisy_;
  std::unique_ptr<Rank> rank_;
  std::unique_ptr<Trainer> trainer_;
  // Where gradients are late: the newest versions of all parameters, flat; the last one is the present one.
  std::deque<Tensor> versions_;
  std::int64_t updates_ = 0;  // made
  RoutingJudge* judge_ = nullptr;
};

}  // namespace echelon
