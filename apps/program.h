// The program behind main(): finds the verb that its words ask for and runs it.
#pragma once

#include <string>

namespace echelon {

// The exit status. Requests that are wrong are said on standard error (2); other failures are thrown.
int run_program(int argc, char** argv);
// One sentence on standard error, behind the program's name.
void complain(const std::string& message);

}  // namespace echelon
