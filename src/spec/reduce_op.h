// How a reduction combines the elements of several ranks.
#pragma once

namespace echelon {

enum class ReduceOp { sum, max };

}  // namespace echelon
