// Normal numbers as weights start with.
#pragma once

#include <cstdint>
#include <span>

#include "base/philox.h"

namespace echelon {

// out[i] = deviation * random.normal(first + i), rounded to f32: the same bits as one by one, several at once
// where the CPU kernels are built.
void fill_normals(const Philox& random, double deviation, std::uint64_t first, std::span<float> out);

}  // namespace echelon
