// The flags of verify, and the comparison that they ask for.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "apps/colours.h"
#include "apps/data_flags.h"
#include "apps/flags.h"
#include "apps/job.h"
#include "apps/timeline_flags.h"
#include "verify/verify.h"

namespace echelon {

struct VerifyFlags {
  // Stores what the flags ask for in `request`, and the tokens from which it takes samples in `sampled`.
  // RequestError naming what is impossible.
  void read();

  PlanFlags plan;
  RunFlags run;
  Job job;
  OptimizerFlags optimizer;
  VerifyRequest request;
  TimelineFlags timeline;
  std::vector<std::string> data;
  std::optional<TokenData> sampled;
  DataFlags reading;
  std::string staleness;
  ColourFlag colour;
  bool json = false;
  CLI::App* app = nullptr;
};
void add_verify_flags(CLI::App& app, const std::shared_ptr<VerifyFlags>& flags);

}  // namespace echelon
