// Sums and copies of runs of elements: the innermost loops of every collective, independent of ranks and
// threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/communicator.h"

namespace echelon {

// Reduces the sources elementwise by halves (halving_tree.h) and writes the result to every destination:
// `count` elements, from source_begin in the sources and destination_begin in the destinations. A destination
// may be a source at the same place. max propagates NaN; i32 sums wrap around; bf16 is summed in f32, and
// each sum rounded once.
void reduce_elements(ReduceOp op, DType dtype, std::span<const std::byte* const> sources,
                     std::int64_t source_begin, std::span<std::byte* const> destinations,
                     std::int64_t destination_begin, std::int64_t count);

// Copies `bytes` bytes of `source` to offset `destination_begin` of every destination, except where that is
// `source` itself. `stream`: with non-temporal stores, for copies too large to be still in the cache when
// they are read.
void copy_bytes(const std::byte* source, std::span<std::byte* const> destinations,
                std::int64_t destination_begin, std::int64_t bytes, bool stream);

}  // namespace echelon
