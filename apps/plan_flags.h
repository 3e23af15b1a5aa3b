// The flags of plan: a given flag pins its field.
#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "apps/colours.h"
#include "plan/run_life.h"
#include "plan/search.h"

namespace echelon {

struct PlanSearchFlags {
  void add_to(CLI::App& app);
  // RequestError for what no plan could mean.
  SearchRequest request() const;
  // For --against: the same request with other pins.
  SearchRequest against(const SearchRequest& request) const;
  // Each of its pins by itself, if there are several.
  std::vector<std::pair<std::string, SearchRequest>> against_alone(const SearchRequest& request) const;

  std::string out, html, sweep, sweep_out, against_text, launch_for, launch_out;
  bool explain = false, json = false;
  double target_seconds = 0;
  ColourFlag colour;
  // What --tokens and related flags ask for; no value without --tokens.
  std::optional<RunRequest> life(const SearchRequest& request) const;
  const CLI::App& app() const { return *app_; }

 private:
  CLI::App* app_ = nullptr;
  std::string plan_file_, machine_ = "h100", software_ = "current", dtype_ = "bf16", objective_ = "time";
  std::map<std::string, std::string> values_;  // of the plan's fields, as given on the command line
  void read_expert_load(Workload& work) const;

  std::optional<int> gpus_, nodes_of_;
  std::optional<double> imbalance_;
  std::string expert_load_, document_lengths_, expert_placement_ = "order";
  std::optional<int> expert_replicas_;
  bool dynamic_context_ = false;
  int top_ = 10;
  double margin_ = 0;
  std::optional<double> tokens_, price_, mtbf_hours_, restart_, save_, write_, repair_hours_;
  std::optional<int> spares_;
};

}  // namespace echelon
