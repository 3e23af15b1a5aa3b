// A product that the threads of a team compute together, rather than one part each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor/matmul_product.h"
#include "tensor/matmul_simd.h"
#include "tensor/thread_team.h"

namespace echelon {

// Whether our kernel does better so than with one part for each thread.
bool is_worth_a_team(const MicroKernel& kernel, const Product& product, int threads);

// By a kernel that supports the operands' types. k > 0, and no blocks. Each thread has `scratch_per_thread`
// bytes of scratch, at least ProductScratch::bytes, aligned to 64.
void multiply_together(const MicroKernel& kernel, const Product& product, std::byte* scratch,
                       std::int64_t scratch_per_thread, const ThreadTeam& team);

}  // namespace echelon
