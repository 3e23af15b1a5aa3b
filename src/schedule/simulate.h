// Simulates a schedule: each rank runs its instructions in order, each as soon as its inputs are there.
//
// Instructions that run together (DualPipe's F&B) hide messages behind computation. Its parts run in turn:
// each starts when the part before it is done and its own inputs are there, so the second part's input may
// travel while the first computes. A part's output is sent at the part's own end, so the first part's output
// travels while the second computes; but it arrives no earlier than the end of all parts, so that without
// message time they count as one unit, as in the papers. A rank that runs the lowered program part by part is
// never later than this.
#pragma once

#include <compare>
#include <vector>

#include "schedule/schedule.h"
#include "schedule/timeline.h"

namespace echelon {

// In seconds, or in any other single unit.
struct StageTimes {
  double forward = 1, backward_input = 1, backward_weight = 1;
};

struct SimulationCosts {
  // By stage; one entry stands for all stages.
  std::vector<StageTimes> stages{StageTimes{}};
  // Of each part of the output layer: V is `forward`, VW is `backward_weight`.
  StageTimes vocabulary_part{0, 0, 0};
  // Time of a message between two ranks. Messages of one ordered pair of ranks follow one another.
  double message = 0;
  // Time of an overlapped pair divided by the sum of its two parts.
  double overlap_factor = 1;

  const StageTimes& of(int stage) const {
    return stages.size() == 1 ? stages[0] : stages[static_cast<std::size_t>(stage)];
  }
  // The time of the instruction when it runs alone; 0 if it computes nothing.
  double of(const Instruction& instruction) const;
};

// The costs that a timeline shows: for each stage, the medians of the instructions that ran alone; and the
// overlap factor of those that ran together. Where a stage has both BW and W, the weight part of BW is taken
// from W.
SimulationCosts measured_costs(const Timeline& timeline);

struct Simulation {
  Timeline timeline;
  std::vector<double> peak_activations;  // by rank, in activations of one full stage
  std::vector<int> weight_versions;      // by rank: the most versions of one stage's weights alive at once
  int parameter_copies = 1;              // the most ranks that hold one stage
  std::int64_t messages = 0;             // between ranks
};

// These depend on the order alone, not on times. The schedule has passed check_shape() (validate.h).
std::vector<double> peak_activations(const Schedule& schedule);
// What each rank holds at the moments that may be its memory peak. For each of its stages, in order:
// microbatches that wait for their backward pass, those of which only W is left, and whether gradients of
// weights exist. Which moment is the peak depends on the sizes of the stages and on what W needs of what F
// keeps. No moment listed holds at least as much of everything as another one.
struct HeldOfStage {
  int whole = 0, weight_input = 0, gradients = 0;
  auto operator<=>(const HeldOfStage&) const = default;
};
using HeldByStage = std::vector<HeldOfStage>;
bool covers(const HeldByStage& a, const HeldByStage& b);  // whether a holds at least as much of everything
std::vector<std::vector<HeldByStage>> held_at_peaks(const Schedule& schedule);
std::vector<int> weight_versions(const Schedule& schedule);
int parameter_copies(const Schedule& schedule);

// RequestError naming rank, instruction and missing value if the schedule cannot finish, or what
// check_shape() says; or if there are times of another number of stages, below 0, or not finite. It need not
// be a whole step (check_rules()).
Simulation simulate(const Schedule& schedule, const SimulationCosts& costs);

}  // namespace echelon
