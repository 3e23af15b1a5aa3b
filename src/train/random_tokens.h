// Random training samples, for verification, timing and measurements.
#pragma once

#include "model/microbatch.h"

namespace echelon {

// Under a document mask, documents have 16 tokens on average.
SampleSource random_tokens(const Plan& plan, std::uint64_t seed);

}  // namespace echelon
