// One-time preparation of kernels in a process.
#pragma once

#include "spec/precision.h"

namespace echelon {

// Call it on the main thread before starting ranks or a progress line: oneDNN generates its code then, and
// does not handle running out of memory reliably. RequestError if there are no kernels for the precision,
// RunError if memory is too small.
void prepare_kernels(const PrecisionRecipe& precision);

}  // namespace echelon
