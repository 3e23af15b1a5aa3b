// The program behind main(): finds and runs the verb that its arguments ask for.
#pragma once

#include <string>

namespace echelon {

// Returns the exit status. Wrong requests are reported on standard error (2); other failures are thrown.
int run_program(int argc, char** argv);
// Prints one sentence on standard error, after the program's name.
void complain(const std::string& message);

}  // namespace echelon
