// What a launcher (mpirun or srun) says of the processes that it started.
#pragma once

namespace echelon {

// The rank that a launcher gave this process; -1: there is no launcher.
int launched_rank();
// How many processes it started, if it says so; 0 or 1 if this one is alone.
int launched_processes();
// Whether a launcher started this process together with others, and it is not the first: it does not repeat
// what all would print.
bool is_another_process();

}  // namespace echelon
