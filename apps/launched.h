// What a launcher, mpirun or srun, says of the processes that it started.
#pragma once

namespace echelon {

// The rank that one gave this process; -1: none did.
int launched_rank();
// How many one started, as far as it says; 0 or 1 where this one is alone.
int launched_processes();
// Whether this process is one that a launcher started beside others, and not the first of them: it does not
// repeat what they all would say.
bool is_another_process();

}  // namespace echelon
