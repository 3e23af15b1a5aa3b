// What the tests share that run the program as its users do, alone or under mpirun.
#pragma once

#include <fmt/core.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

namespace echelon::checks {

struct CommandResult {
  int status = -1;     // negative: the signal that ended it
  std::string output;  // both streams
};

inline CommandResult run_command(const std::string& command) {
  CommandResult result;
  std::FILE* const pipe = ::popen(("exec 2>&1; " + command).c_str(), "r");
  std::array<char, 4096> room{};
  for (std::size_t got = 0; (got = std::fread(room.data(), 1, room.size(), pipe)) > 0;)
    result.output.append(room.data(), got);
  const int status = ::pclose(pipe);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return result;
}

// The program on `ranks` processes.
inline std::string under_mpirun(int ranks, const std::string& arguments) {
  return fmt::format(
      "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun -n {} --oversubscribe {} {}", ranks,
      ECHELON_BINARY, arguments);
}

}  // namespace echelon::checks
