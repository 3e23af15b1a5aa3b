// Packs part of a gradient bucket into the narrow format in which it travels (spec/compression.h,
// tensor/codecs.h). Plain loops; F is float or double.
#pragma once

#include <cstddef>
#include <span>

#include "base/philox.h"
#include "spec/compression.h"

namespace echelon {

// Packs the elements of `part` of the bucket that begins at x into quantized_bytes(). int8 rounds with each
// section's generator in `rounding`, indexed by the element within the section.
template <class F>
void pack_part(CompressionKind kind, const GradientBucket& bucket, Range part,
               std::span<const Philox> rounding, const F* x, std::byte* out);

// y[i] = or += the packed element part.begin + i.
template <class F>
void unpack_part(CompressionKind kind, const GradientBucket& bucket, Range part, const std::byte* in,
                 bool accumulate, F* y);

}  // namespace echelon
