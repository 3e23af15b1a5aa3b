// Sums and copies of runs of elements: the innermost loops of every collective. They know no ranks and no
// threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/communicator.h"

namespace echelon {

// The sources' elements i, reduced by halves (halving_tree.h), are written to every destination, for `count`
// elements from source_begin (in the sources) and destination_begin (in the destinations). A destination may
// be a source at the same place. max propagates NaN; i32 sums wrap around; bf16 is summed in f32, and each
// sum rounded once.
void reduce_elements(ReduceOp op, DType dtype, std::span<const std::byte* const> sources,
                     std::int64_t source_begin, std::span<std::byte* const> destinations,
                     std::int64_t destination_begin, std::int64_t count);

// Copies `bytes` bytes of `source` to offset `destination_begin` of every destination, except where that is
// `source` itself. `stream`: with stores that go past the caches, for copies too large to be found there by
// their reader.
void copy_bytes(const std::byte* source, std::span<std::byte* const> destinations,
                std::int64_t destination_begin, std::int64_t bytes, bool stream);

}  // namespace echelon
