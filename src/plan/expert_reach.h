// How many ranks or nodes a token's experts lie on, if tokens are spread evenly over experts.
#pragma once

#include "spec/model_spec.h"

namespace echelon {

// Experts are divided into `parts` equal runs (ranks, or nodes). Returns how many of the runs hold at least
// one of a token's experts, on average over all choices of experts that the router may make.
double reached_parts(const ModelSpec& model, double parts);

}  // namespace echelon
