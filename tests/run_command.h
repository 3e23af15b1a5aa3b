// Runs a command of the shell and takes what it prints.
#pragma once

#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

#include "temporary_directory.h"

namespace echelon::checks {

struct CommandResult {
  int status = -1;  // negative: the signal that ended it
  std::string output;
};

// Its standard output. Temporary files that it leaves, such as flight records, go with the test.
inline CommandResult output_of(const std::string& command) {
  static const TemporaryDirectory temporary;
  CommandResult result;
  const std::string there = "export TMPDIR='" + temporary.path().string() + "'; ";
  std::FILE* const pipe = ::popen((there + command).c_str(), "r");
  std::array<char, 4096> room{};
  for (std::size_t got = 0; (got = std::fread(room.data(), 1, room.size(), pipe)) > 0;)
    result.output.append(room.data(), got);
  const int status = ::pclose(pipe);
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return result;
}

// Both streams.
inline CommandResult run_command(const std::string& command) { return output_of("exec 2>&1; " + command); }

}  // namespace echelon::checks
