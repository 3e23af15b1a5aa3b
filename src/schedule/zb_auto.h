// Automatic zero-bubble schedules (Qi et al. 2023, https://arxiv.org/abs/2401.10241, section 3): a search
// over the orders of F, B and W on every rank, for stages that differ in time and memory, under a memory
// limit. Small cases are solved exactly; large ones get the best of many constructed orders, with a proven
// bound. The search depends on the costs alone, not on its running time, so every rank of a run finds the
// same schedule.
#pragma once

#include <vector>

#include "schedule/schedule.h"
#include "schedule/simulate.h"

namespace echelon {

// What F, B and W add to a stage's memory (negative: free), in activations of a full stage. Additions count
// from the start of an instruction, frees from its end. The three sum to 0.
struct StageMemory {
  double forward = 1, backward_input = 0, backward_weight = -1;
};

struct AutoCosts {
  SimulationCosts times;                           // one stage per rank; overlap_factor is unused
  std::vector<StageMemory> memory{StageMemory{}};  // by stage; one entry stands for all
  // By rank, in activations; one entry stands for all, none means no limit.
  std::vector<double> limit;
};

struct AutoResult {
  Schedule schedule;  // "zb-auto": stage r on rank r, with F, B and W separate
  // Times from simulate(). The span is the largest time over ranks from first F to last W: the cost of a step
  // if steps follow one another without a barrier. The search minimizes the span, and then the makespan.
  double span = 0, makespan = 0;
  // No order that keeps the limit has less.
  double lower_bound = 0, makespan_lower_bound = 0;
  bool optimal = false;             // the span is proven minimal
  bool makespan_optimal = false;    // so is the makespan, among orders with this span
  std::vector<double> peak_memory;  // by rank, in the unit of the limit

  double gap() const { return lower_bound > 0 ? span / lower_bound - 1 : 0; }  // relative to the bound
};

// Never worse in span than 1f1b, zb-h1 and zb-h2 where these keep the limit. RequestError, naming the flag of
// `simulate`, if a limit does not hold one microbatch or a cost is not usable.
AutoResult zb_auto(int ranks, int microbatches, const AutoCosts& costs);

}  // namespace echelon
