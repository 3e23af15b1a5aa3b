// Runs a schedule on paper: every rank in its own order, each instruction as soon as what it reads is there.
//
// What runs together (DualPipe's F&B) hides messages behind computation. Its parts take their turns: each
// starts when the part before it is done and its own inputs are there, so the input of the second part may
// travel while the first computes. What a part writes leaves at the part's own end, so the output of the
// first travels while the second computes, but arrives no earlier than the end of all parts: without message
// time they count as one unit, as in the papers. A rank that runs the lowered program part by part is never
// later than this.
#pragma once

#include <compare>
#include <vector>

#include "schedule/schedule.h"
#include "schedule/timeline.h"

namespace echelon {

// Seconds, or any one unit.
struct StageTimes {
  double forward = 1, backward_input = 1, backward_weight = 1;
};

struct SimulationCosts {
  // Times of each stage. One entry stands for all stages.
  std::vector<StageTimes> stages{StageTimes{}};
  StageTimes vocabulary_part{0, 0, 0};  // of each part of the output layer: V and VW, the first and the last
  // Time that a message between two ranks takes. Messages of one directed pair of ranks follow one another.
  double message = 0;
  // Time of an overlapped pair over the sum of its two parts.
  double overlap_factor = 1;

  const StageTimes& of(int stage) const {
    return stages.size() == 1 ? stages[0] : stages[static_cast<std::size_t>(stage)];
  }
  // What the instruction takes where it runs alone; 0 where it computes nothing.
  double of(const Instruction& instruction) const;
};

// The times that the instructions of a timeline took: the median of each stage's, of those that ran alone;
// and the overlap factor of those that ran beside another. The weight part of BW is taken from W where the
// stage has both.
SimulationCosts measured_costs(const Timeline& timeline);

struct Simulation {
  Timeline timeline;
  std::vector<double> peak_activations;  // of each rank, in activations of one full stage
  std::vector<int> weight_versions;      // of each rank: most versions of one stage's weights alive at once
  int parameter_copies = 1;              // ranks that hold one stage, at most
  std::int64_t messages = 0;             // between ranks
};

// What the order alone says, whatever the times.
std::vector<double> peak_activations(const Schedule& schedule);
// What each rank holds where it may hold most: of each stage that it runs, in their order, the microbatches
// whose backward pass comes, those of which only W is left, and whether gradients of weights were made. Which
// of these moments is the peak depends on how large the stages are, and on what W needs of what F keeps; none
// holds as much of everything as another one does.
struct HeldOfStage {
  int whole = 0, weight_input = 0, gradients = 0;
  auto operator<=>(const HeldOfStage&) const = default;
};
using HeldByStage = std::vector<HeldOfStage>;
bool covers(const HeldByStage& a, const HeldByStage& b);  // a is as much of everything
std::vector<std::vector<HeldByStage>> held_at_peaks(const Schedule& schedule);
std::vector<int> weight_versions(const Schedule& schedule);
int parameter_copies(const Schedule& schedule);

// Throws RequestError naming rank, instruction and missing value when the schedule cannot finish.
Simulation simulate(const Schedule& schedule, const SimulationCosts& costs);

}  // namespace echelon
