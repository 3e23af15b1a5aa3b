// The verbs of the program.
#pragma once

#include <CLI/CLI.hpp>

namespace echelon {

// Each adds its verb to the program and returns the exit status through `status` when the verb ran.
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

// Those that this build has: all of them, or the planner's (CMake chooses the file).
void add_verbs(CLI::App& program, int& status);

// Thrown to main(): what there is to say has been said, here or by another process.
struct AlreadySaid {
  int status = 3;
};

}  // namespace echelon
