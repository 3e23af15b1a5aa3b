// Seconds of a training step, before anything runs. The measured twin is StepRecord::step_seconds.
#pragma once

#include "spec/plan.h"

namespace echelon {

// Model FLOPs of the step over `peak_flops`, the measured rate of all compute threads together on matrix
// products, lengthened by the recomputed attention scores of the backward pass. It leaves out what moves
// memory only (norms, activations, optimizer, collectives), so it is a lower bound that a good run comes
// close to.
double predict_step_seconds(const Plan& plan, double peak_flops);

}  // namespace echelon
