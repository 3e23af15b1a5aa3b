// What the measurements have in common.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/clock.h"

namespace echelon {

struct Spread {
  double least, median, most;
};
Spread spread_of(std::vector<double> values);

std::string cpu_name();
// Without the instruction sets and the number of cores.
std::string processor_name();

inline constexpr int most_repeats = 1'000'000;
inline constexpr int most_bench_ranks = 256;  // threads of this process

// Adds `comm` to the verb bench.
void add_bench_comm(CLI::App& bench, int& status);
// Adds `kernels`.
void add_bench_kernels(CLI::App& bench, int& status);
// Adds `context`.
void add_bench_context(CLI::App& bench, int& status);

}  // namespace echelon
