// Automatic zero-bubble schedule (Qi et al. 2023, https://arxiv.org/abs/2401.10241, section 3): a search over
// the orders of F, B and W on every rank for stages that differ in time and memory, under a memory limit.
// Small cases are solved exactly; large ones get the best of many constructed orders, with a proven bound
// beside it. What is searched depends on the costs alone, not on the time that it takes: every rank of a run
// finds the same schedule by itself.
#pragma once

#include <vector>

#include "schedule/schedule.h"
#include "schedule/simulate.h"

namespace echelon {

// What F, B and W add to a stage's memory (negative: free), in activations of a full stage. What an
// instruction adds is there from its start; what it frees is gone at its end. They sum to 0.
struct StageMemory {
  double forward = 1, backward_input = 0, backward_weight = -1;
};

struct AutoCosts {
  SimulationCosts times;                           // one stage a rank; overlap_factor is unused
  std::vector<StageMemory> memory{StageMemory{}};  // of each stage; one entry stands for all
  std::vector<double> limit;  // of each rank, in activations; one entry stands for all, none: no limit
};

struct AutoResult {
  Schedule schedule;  // "zb-auto": stage r on rank r, F, B and W apart
  // As simulate() runs it. The span is the largest over ranks of first F to last W: the cost of a step where
  // steps follow one another without a barrier. What is looked for is the least span, and of all orders with
  // that span the least makespan.
  double span = 0, makespan = 0;
  // No order whatever that keeps the limit has less.
  double lower_bound = 0, makespan_lower_bound = 0;
  bool optimal = false;             // the span is proven least
  bool makespan_optimal = false;    // and so is the makespan, of all orders with this span
  std::vector<double> peak_memory;  // of each rank, counted with the costs' memory

  double gap() const { return lower_bound > 0 ? span / lower_bound - 1 : 0; }  // part of the bound
};

// Never worse in span than 1f1b, zb-h1 and zb-h2 where these keep the limit. Throws RequestError, naming the
// flag of simulate, where a limit does not hold one microbatch or a cost is not usable.
AutoResult zb_auto(int ranks, int microbatches, const AutoCosts& costs);

}  // namespace echelon
