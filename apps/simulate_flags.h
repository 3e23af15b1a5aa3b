// The flags of simulate, and the times and memory that they give.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "apps/colours.h"
#include "schedule/zb_auto.h"

namespace echelon {

struct SimulateFlags {
  std::string schedule, compare, times = "1,1,1", stage_times, output_layer, stage_memory, activation_limit;
  std::string format = "text", out;
  ColourFlag colour;
  std::optional<int> given_ranks, given_microbatches;
  int chunks = 0, group = 0, steps = 1, width = 0;
  double message = 0, overlap_factor = 1;
  bool vocabulary_parallel = false;
  bool is_format_given = false, is_steps_given = false, json = false;

  // Set by read().
  StageTimes full_stage;
  std::vector<StageTimes> stages;   // of each stage, if given
  StageTimes head{0, 0, 0};         // of the whole output layer
  std::vector<StageMemory> memory;  // of each stage, or one for all
  std::vector<double> limits;       // of each rank, or one for all, if given

  void add_to(CLI::App& app);
  // RequestError for what no schedule could mean.
  void read(const CLI::App& app);

  // RequestError for a flag without effect together with the others.
  void refuse_idle(const CLI::App& app) const;

  int ranks() const { return given_ranks.value_or(4); }
  int microbatches() const { return given_microbatches.value_or(8); }
  std::vector<std::string> names() const;  // of the requested schedules
};

}  // namespace echelon
