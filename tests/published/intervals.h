// How far predictions are off where a group of runs, or a whole program, had no part in finding them: what
// the intervals of configs/software are made of (split conformal prediction, by kind of configuration and by
// distance from what was measured; Vovk et al. 2005).
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "published/tables.h"

namespace echelon::published {

// Tables whose rows tell nothing of the program that prices them: another one's, or one row alone.
bool is_of_its_program(const std::string& table);

// Of one program, in the logarithm of published over predicted time.
struct ProgramIntervals {
  std::size_t rows = 0, others = 0;  // others: that nothing was fitted on
  double mean_error = 0;             // of the others
  // Half-widths that hold 80% of the rows of dense models on one node, on several, of mixtures; 0: no rows.
  std::array<double, 3> half_width{};
  double far_half_width = 0;
  double inside = 0;  // part of the others that is inside, each with its own group left out
  std::vector<std::string> measured_on;
  std::array<std::int64_t, 2> gpus{}, parameters{}, seq_len{};
  // Priced with the means of the other programs' fitted numbers:
  double mean_error_left_out = 0, half_width_left_out = 0;
  double inside_left_out = 0;  // of dense models, of the widest of the other programs' half-widths
};

struct Intervals {
  std::map<std::string, ProgramIntervals> programs;
  // Of a program without rows: the widest of those that were left out; and of mixtures of experts, and where
  // layers have a state space, of the one program that was measured with them, left out.
  double unknown_half_width = 0, unknown_expert_half_width = 0, unknown_scan_half_width = 0;
};
Intervals intervals(const std::vector<Table>& tables);

// For configs/machines/fit/fit.py: lines "software.current.low = 0.93" for each number of each program.
std::string interval_lines(const Intervals& intervals);
// What docs/planning.md prints: a line for each program.
std::vector<std::string> interval_scores(const Intervals& intervals);

}  // namespace echelon::published
