#include "apps/launched.h"

#include <algorithm>
#include <cstdlib>

namespace echelon {

int launched_rank() {
  // The names in Open MPI, PMIx, and MPICH and srun.
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"})
    if (const char* const text = std::getenv(name)) return std::atoi(text);
  return -1;
}

int launched_processes() {
  int processes = launched_rank() + 1;
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
    if (const char* const text = std::getenv(name)) processes = std::max(processes, std::atoi(text));
  return processes;
}

bool is_another_process() { return launched_rank() > 0; }

}  // namespace echelon
