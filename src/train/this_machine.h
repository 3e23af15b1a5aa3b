// What the machine that runs this has: cores, memory, and how fast it multiplies.
#pragma once

#include "spec/plan.h"

namespace echelon {

// FLOP/s of `threads` compute threads together on a square matrix product of this dtype, best of a few tries.
double measure_matmul_flops(DType dtype, int threads);

// What the ranks of a plan will hold in memory, and the refusal of what this machine cannot hold.
double predicted_bytes(const Plan& plan);  // of one rank
double memory_limit();                     // of this process: the machine's memory, or its container's
void refuse_beyond_memory(const Plan& plan, double bytes);

// Cores that this process may use.
int available_cores();
// Cores of the machine: a launcher may have given each of several processes its own.
int machine_cores();

}  // namespace echelon
