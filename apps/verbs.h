// The verbs of the program.
#pragma once

#include <CLI/CLI.hpp>

namespace echelon {

// Each adds its verb to the program, and stores the exit status in `status` when the verb has run.
void add_train(CLI::App& program, int& status);
void add_verify(CLI::App& program, int& status);
void add_devices(CLI::App& program, int& status);
void add_calibrate(CLI::App& program, int& status);
void add_plan(CLI::App& program, int& status);
void add_simulate(CLI::App& program, int& status);
void add_checkpoint(CLI::App& program, int& status);
void add_launch(CLI::App& program, int& status);
void add_data(CLI::App& program, int& status);
void add_generate(CLI::App& program, int& status);
void add_bench(CLI::App& program, int& status);
void add_view(CLI::App& program, int& status);

// The verbs of this build: all, or the planner's (CMake chooses the file).
void add_verbs(CLI::App& program, int& status);

// Thrown to main() if everything has been reported already, here or by another process.
struct AlreadySaid {
  int status = 3;
};

}  // namespace echelon
