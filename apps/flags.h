// The flags that verbs share, and how they become a Plan.
#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

#include "spec/plan.h"
#include "train/session.h"

namespace echelon {

// Model, mesh, batch, precision: the flags of train and verify. A flag that is given wins over the --plan
// file.
class PlanFlags {
 public:
  void add_to(CLI::App& app);
  // The plan of the flags; `defaults` where neither flag nor file says anything.
  Plan plan(const Plan& defaults) const;

 private:
  std::string plan_file_, model_, sp_, dtype_, comm_ = "threads", device_ = "cpu";
  std::string schedule_, recompute_ = "none", compress_ = "none", cp_kind_, cp_balance_, layers_per_stage_;
  int dp_ = 0, tp_ = 0, pp_ = 0, cp_ = 0, ep_ = 0, zero_ = 0, hsdp_ = 0, chunks_ = 0;
  std::int64_t global_batch_ = 0, micro_batch_ = 0, seq_len_ = 0;
  CLI::Option* given(const char* name) const { return app_->get_option(name); }
  CLI::App* app_ = nullptr;
};

class OptimizerFlags {
 public:
  void add_to(CLI::App& app, OptimizerOptions& options);
};

class RunFlags {
 public:
  void add_to(CLI::App& app);
  // Compute threads of a rank: as given, or the cores shared out over the ranks.
  RunOptions options(const Plan& plan) const;

 private:
  int threads_ = 0;
  double timeout_seconds_ = 300;
};

// Each adds its verb to the program and returns the exit status through `status` when the verb ran.
void add_train(CLI::App& program, int& status);
void add_verify(CLI::App& program, int& status);
void add_generate(CLI::App& program, int& status);
void add_bench(CLI::App& program, int& status);

}  // namespace echelon
