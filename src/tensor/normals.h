// Normal numbers for initial weights.
#pragma once

#include <cstdint>
#include <span>

#include "base/philox.h"

namespace echelon {

// out[i] = deviation * random.normal(first + i), rounded to f32. The same bits as one by one, but vectorised
// if the CPU kernels are built.
void fill_normals(const Philox& random, double deviation, std::uint64_t first, std::span<float> out);

}  // namespace echelon
