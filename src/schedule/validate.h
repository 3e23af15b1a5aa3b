// Whether a schedule computes one training step (or, with optimizer steps inside, several), whoever wrote it.
#pragma once

#include "schedule/schedule.h"

namespace echelon {

// Every stage and microbatch has one F and one BW, or one F, one B and one W, in that order on one rank; a
// stage is on one rank, or every stage on two (DualPipe); F and its backward pass read the same version of
// the weights, one that is there. Throws RequestError with rank, instruction and why.
void check_rules(const Schedule& schedule);

// check_rules(), and a proof that the lowered program finishes under the law of messages (lower.h).
void validate(const Schedule& schedule);

}  // namespace echelon
