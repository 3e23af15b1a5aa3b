// The flags of plan: a flag that is given pins its axis.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "plan/search.h"

namespace echelon {

struct PlanSearchFlags {
  void add_to(CLI::App& app);
  // Throws RequestError for what no plan could mean.
  SearchRequest request() const;
  // For --against: the same request with other pins.
  SearchRequest against(const SearchRequest& request) const;

  std::string out, html, sweep, sweep_out, against_text;
  bool explain = false, json = false;
  double target_seconds = 0;

 private:
  CLI::App* app_ = nullptr;
  std::string plan_file_, model_ = "llama-3-8b", machine_ = "h100", software_ = "current", sp_, schedule_,
                          dtype_ = "bf16", recompute_, cp_kind_, cp_balance_, compress_, layers_per_stage_,
                          objective_ = "time";
  std::optional<int> dp_, tp_, pp_, cp_, ep_, etp_, zero_, hsdp_, chunks_, gpus_, nodes_of_;
  std::optional<std::int64_t> global_batch_, micro_batch_, seq_len_;
  int top_ = 10;
  double margin_ = 0;
};

}  // namespace echelon
