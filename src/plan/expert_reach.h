// How far a token's experts lie apart where tokens are spread evenly over experts.
#pragma once

#include "spec/model_spec.h"

namespace echelon {

// Of `parts` equal runs of experts (ranks, or nodes) those with at least one of a token's, on average over
// all choices of experts that the router may make.
double reached_parts(const ModelSpec& model, double parts);

}  // namespace echelon
