// What a pipeline runs in each training step: the lowered schedule, or, where the schedule does not flush,
// the next piece of one that goes on for ever.
#pragma once

#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace echelon {

// A stream of steps (PipeDream, 2BW) starts where the pipeline is empty and ends where it is emptied again.
// In between a rank starts microbatches of the next steps before a step ends. The piece of one step reaches
// on every rank to the optimizer step of its last microbatch, and holds the receives of all that other ranks
// send in theirs: no message is under way between two steps.
class StepPrograms {
 public:
  // `barrier`: the optimizer's step waits for all ranks, so that all know the gradient norm. Without it a
  // rank steps on what it knows and goes on; in the next step it validates what it did (Qi et al. 2023,
  // section 4, https://arxiv.org/abs/2401.10241) after its first forward passes, which are run again if it
  // was wrong.
  explicit StepPrograms(const Schedule& flushing, bool barrier = true);
  // For "pipedream" or "2bw". Throws what make_schedule() throws.
  StepPrograms(const std::string& name, int ranks, int microbatches);

  // Of a schedule that flushes what one rank runs, without what it repeats; the others run nothing.
  StepPrograms of_rank(int rank) const;

  struct Program {
    const Schedule* lowered = nullptr;
    // What the stream has done where the program counts from 0.
    int first_microbatch = 0, first_version = 0;
    bool drains = true;  // the pipeline is empty after it
  };
  // `step` counts from the beginning of the stream; `steps_left` of it, this one included.
  Program program(int step, int steps_left) const;

  bool flushes() const { return reach_ == 0; }
  int microbatches() const { return microbatches_; }
  // Optimizer steps in one step: 1, or one a microbatch (PipeDream).
  int updates_per_step() const { return updates_; }
  // What one sees of it: a step, or a stream from empty to empty that is long enough for its steady state.
  const Schedule& schedule() const { return schedule_; }
  // Steps of schedule(), and how many of them are between warm-up and drain.
  int shown_steps() const { return begin_ + 1 + reach_; }

 private:
  StepPrograms() = default;

  Schedule schedule_;
  int microbatches_ = 0, updates_ = 1;
  int begin_ = 0;                                // first step whose program is that of every later one
  int reach_ = 0;                                // steps ahead that a program starts microbatches of
  std::vector<std::vector<Schedule>> programs_;  // [min(step, begin_)][min(steps_left, reach_ + 1) - 1]
};

// Steps of a schedule that flushes one after another, no rank waiting for another between them.
Schedule repeated(const Schedule& flushing, int steps);

// How many optimizer steps a gradient is late at most, on each rank: between the weights that it was computed
// with and those that it changes.
std::vector<int> staleness(const Schedule& schedule);

}  // namespace echelon
