// Checks that a schedule, from any source, computes one training step (or several, if it contains optimizer
// steps).
#pragma once

#include "schedule/schedule.h"

namespace echelon {

// What the other rules take for granted: that there are ranks, stages and microbatches, and that every
// instruction is a computation or a step of one of them. RequestError with rank, instruction and reason.
void check_shape(const Schedule& schedule);

// The rules. Every stage and microbatch has one F and one BW, or one F, one B and one W, in that order on one
// rank. A stage is on one rank, or every stage on two (DualPipe). F and its backward pass read the same
// version of the weights, and it exists. RequestError, as of check_shape().
void check_rules(const Schedule& schedule);

// check_rules(), and a proof that the lowered program finishes in the message model of lower.h.
void validate(const Schedule& schedule);

}  // namespace echelon
