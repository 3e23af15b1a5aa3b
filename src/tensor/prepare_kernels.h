// What kernels make once in a process.
#pragma once

#include "spec/precision.h"

namespace echelon {

// On the main thread, before it starts ranks or a progress line: oneDNN writes its code then, and what it
// does where memory ends meanwhile is not to be relied on. RequestError where there are no kernels for the
// precision, RunError where memory is too little.
void prepare_kernels(const PrecisionRecipe& precision);

}  // namespace echelon
