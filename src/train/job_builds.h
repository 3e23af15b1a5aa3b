// Whether the processes of a job run the same program.
#pragma once

#include <string>

#include "comm/process_world.h"

namespace echelon {

// Collective if ranks are processes: a sentence if the file of some rank's program, or of the library in
// another program, has other bytes than rank 0's; empty if all have the same, or cannot be read. Builds that
// differ only by their compiler train the same model; those of other versions may train another, or wait for
// each other.
std::string note_on_builds(ProcessWorld* processes);

}  // namespace echelon
