// Vocabulary parallelism (Yeung et al. 2024, https://arxiv.org/abs/2411.05288): the output layer costs as
// much as several layers, and a schedule that leaves it to the last stage keeps all other ranks waiting. Here
// it is cut by vocabulary over the pipeline's ranks, and its passes (V and VW, schedule.h) are put among the
// others.
#pragma once

#include <string>

#include "schedule/simulate.h"

namespace echelon {

// Why the output layer cannot be cut in this schedule; empty where it can. It takes one that flushes, whose
// stages are on one rank each and whose passes run alone.
std::string vocabulary_problem(const Schedule& schedule);

// `schedule` with one part of the output layer on each rank. Times are those of stages without the output
// layer, and of its parts. A rank runs V before all else, since all ranks wait for it, then what comes first
// in `schedule` of what is ready, then weight gradients; but it keeps no more than two microbatches' logits
// from V to VW. Between F and B of the last stage is now the time of V, so that a rank may hold more
// microbatches of its stages than in `schedule`: one, or up to three if each shortens the step by more than
// 2%. It holds still more only where every rank would wait for ever otherwise, which no schedule of
// schedules.h does. Every rank of a run finds the same order by itself. Throws RequestError with
// vocabulary_problem().
Schedule with_vocabulary_parallelism(const Schedule& schedule, const SimulationCosts& costs);

}  // namespace echelon
