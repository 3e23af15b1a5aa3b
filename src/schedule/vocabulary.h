// Vocabulary parallelism (Yeung et al. 2024, https://arxiv.org/abs/2411.05288). The output layer costs as
// much as several layers; a schedule that leaves it to the last stage keeps all other ranks waiting. Here it
// is cut by vocabulary over the pipeline ranks, and its passes (V and VW, schedule.h) are inserted among the
// others.
#pragma once

#include <string>

#include "schedule/simulate.h"

namespace echelon {

// Why this schedule cannot have vocabulary parallelism; empty if it can. It must flush, have each stage on
// one rank, and run no passes together.
std::string vocabulary_problem(const Schedule& schedule);

// `schedule` with one part of the output layer on each rank. `costs` are of stages without the output layer,
// and of its parts. A rank runs V before all else, since all ranks wait for it; then whatever comes first in
// `schedule` of what is ready; then weight gradients. But it keeps at most two microbatches' logits from V to
// VW.
//
// The time of V now lies between F and B of the last stage, so a rank may hold more microbatches of its
// stages than in `schedule`: one more, or up to three if each shortens the step by more than 2%. It holds
// still more only if every rank would otherwise wait forever, which happens with no schedule of schedules.h.
// The result is deterministic, so every rank of a run computes the same order. RequestError with
// vocabulary_problem().
Schedule with_vocabulary_parallelism(const Schedule& schedule, const SimulationCosts& costs);

}  // namespace echelon
