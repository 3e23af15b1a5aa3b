// What a pipeline runs in each training step: the lowered schedule or, if the schedule does not flush, the
// next piece of an endless one.
#pragma once

#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace echelon {

// A stream of steps (PipeDream, 2BW) starts and ends with an empty pipeline. In between, a rank starts
// microbatches of later steps before a step ends. The piece for one step extends on every rank to the
// optimizer step of its last microbatch, and includes the receives of everything that other ranks send in
// theirs: no message is in flight between two steps.
class StepPrograms {
 public:
  // `barrier`: the optimizer step waits for all ranks, so that all know the gradient norm. Without it, a rank
  // steps on what it knows and goes on. In the next step, after its first forward passes, it validates the
  // step (post-validation: Qi et al. 2023, section 4, https://arxiv.org/abs/2401.10241); if the step was
  // wrong, these passes run again.
  explicit StepPrograms(const Schedule& flushing, bool barrier = true);
  // For "pipedream" or "2bw". Throws as make_schedule() does.
  StepPrograms(const std::string& name, int ranks, int microbatches);

  // For schedules that flush: the program of one rank without repeated passes. The other ranks' programs are
  // empty.
  StepPrograms of_rank(int rank) const;

  struct Program {
    const Schedule* lowered = nullptr;
    // The microbatches and versions before the program's start; the program counts from 0.
    int first_microbatch = 0, first_version = 0;
    bool drains = true;  // the pipeline is empty after it
  };
  // `step` counts from the start of the stream; `steps_left` includes this step.
  Program program(int step, int steps_left) const;

  bool flushes() const { return reach_ == 0; }
  int microbatches() const { return microbatches_; }
  // Optimizer steps in one training step: 1, or one per microbatch (PipeDream).
  int updates_per_step() const { return updates_; }
  // The schedule to show: a step, or a whole stream long enough for its steady state.
  const Schedule& schedule() const { return schedule_; }
  // Steps of schedule(), and how many of them are between warm-up and drain.
  int shown_steps() const { return begin_ + 1 + reach_; }

 private:
  StepPrograms() = default;

  Schedule schedule_;
  int microbatches_ = 0, updates_ = 1;
  int begin_ = 0;                                // from this step on, all programs are alike
  int reach_ = 0;                                // how many steps ahead a program starts microbatches
  std::vector<std::vector<Schedule>> programs_;  // [min(step, begin_)][min(steps_left, reach_ + 1) - 1]
};

// Several steps of a schedule that flushes, one after another, without a barrier between them.
Schedule repeated(const Schedule& flushing, int steps);

// The staleness of each rank's gradients, at most: optimizer steps between the weights that a gradient was
// computed with and those that it changes.
std::vector<int> staleness(const Schedule& schedule);

}  // namespace echelon
