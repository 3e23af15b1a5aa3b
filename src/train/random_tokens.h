// Training samples where there is no text: to prove, to time and to measure.
#pragma once

#include "model/microbatch.h"

namespace echelon {

// Where documents are kept apart, they have 16 tokens on average.
SampleSource random_tokens(const Plan& plan, std::uint64_t seed);

}  // namespace echelon
