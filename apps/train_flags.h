// The flags of train, and the run that they ask for.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/colours.h"
#include "apps/data_flags.h"
#include "apps/flags.h"
#include "apps/job.h"
#include "apps/timeline_flags.h"
#include "train/session.h"

namespace echelon {

struct TrainFlags {
  // Stores what the flags ask for in `request`. The data is returned, as the request has no member for it.
  // RequestError naming what is impossible.
  std::unique_ptr<TokenData> read();
  // The plan alone, checked by all that is known without the data, of which `document_end` is asked as by
  // PlanFlags::plan().
  Plan read_plan(const std::function<std::int32_t()>& document_end);
  // A dry run's plan. RequestError for a flag without effect there.
  Plan read_dry() const;
  // How that plan is run dry. RequestError for what a run would refuse.
  DryRunOptions dry_options(const Plan& of, const PipelineLayout& pipeline) const;
  std::int64_t limit_of_memory() const;  // in bytes; 0: none

  PlanFlags plan;
  RunFlags run;
  Job job;
  OptimizerFlags optimizer;
  TrainRequest request;
  std::vector<std::string> data;
  DataFlags reading;
  std::shared_ptr<const Tokenizer> tokenizer;  // of the data, and for showing it
  TimelineFlags timeline;
  std::string report;  // the run's page
  std::int64_t steps = 100, sample = 200;
  std::string from, machine, staleness, straggle, plant_expert, memory_limit,
      on_nan = "stop", async_save = "on", cuda_graphs = "off", die, flip;
  ColourFlag colour;
  int servers = 1;
  bool json = false, dry_run = false;
  Progress reading_progress;  // of the data; empty: a line on standard error
  CLI::App* app = nullptr;
};
void add_train_flags(CLI::App& app, const std::shared_ptr<TrainFlags>& flags);
// Whether a dry run takes this flag of train, named without dashes.
bool is_of_dry_run(const std::string& flag);

}  // namespace echelon
