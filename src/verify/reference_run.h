// The reference of verify: the same training on one rank. It runs on the CPU, so that what another device
// computes is compared with independent kernels; under invariant numerics, whose bits belong to the kernels,
// it runs on the mesh's device. For a schedule without a flush it is a plain emulation of the documented
// delay, without instructions or a pipeline.
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

// The plan's model, batch and dtype on one rank, without recomputation.
Plan one_rank_plan(Plan plan);

// The plan in f32, if it is narrower and its schedule flushes: to show how far the precision is from f32. In
// f64 in a build without f32 kernels.
std::optional<Plan> wide_plan(Plan plan);

// Bytes that these runs take, with the copies of state that verify() makes.
double reference_bytes(const Plan& plan);

class ReferenceRun {
 public:
  // `plan`: of the mesh.
  ReferenceRun(const Plan& plan, const OptimizerOptions& optimizer, const RunOptions& run,
               std::uint64_t seed);

  // Returns the loss of the step. All its updates but the last are applied; the gradients of the last one are
  // in parameters().
  double compute_gradients(std::int64_t step, const SampleSource& samples);
  // Applies the step's last update. Returns the factor by which gradients were clipped.
  double apply_gradients(std::int64_t step);

  // Lets `judge` decide which experts take which tokens; it outlives this.
  void follow(RoutingJudge& judge);
  // A copy of everything that steps change.
  struct State {
    std::vector<Tensor> tensors;  // of each parameter
    std::deque<Tensor> versions;
    std::int64_t updates = 0;
    RouterBiases biases;
  };
  State state() const;
  void set_state(const State& state);
  Tensor tensor_in(const State& state, const std::string& name, ParameterTensor which) const;
  // Switched off until begin().
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
  // With delayed gradients: the newest versions of all parameters, flat; the last one is current.
  std::deque<Tensor> versions_;
  std::int64_t updates_ = 0;  // applied so far
  RoutingJudge* judge_ = nullptr;
};

}  // namespace echelon
