// What the tests share that run the program as its users do, alone or under mpirun.
#pragma once

#include <fmt/core.h>

#include <string>

#include "run_command.h"

namespace echelon::checks {

// mpirun with these words, also as root. `within`: a command that runs it, as "timeout 300".
inline std::string mpirun(const std::string& words, const char* within = "") {
  return fmt::format("OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 {} mpirun --oversubscribe {}",
                     within, words);
}

// The program on `ranks` processes. When one dies mpirun ends the others a second later, unless it is told
// not to: then its status says nothing.
inline std::string under_mpirun(int ranks, const std::string& arguments, const char* flags = "") {
  return mpirun(fmt::format("-n {} {} {} {}", ranks, flags, ECHELON_BINARY, arguments));
}

}  // namespace echelon::checks
