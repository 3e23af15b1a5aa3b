// Only the planner half, which needs just a compiler and header-only libraries.
#include "apps/verbs.h"

namespace echelon {

void add_verbs(CLI::App& program, int& status) {
  add_plan(program, status);
  add_simulate(program, status);
  add_calibrate(program, status);
}

}  // namespace echelon
