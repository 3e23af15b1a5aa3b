// The flags that verbs share, and how they become a Plan.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "apps/flag_values.h"
#include "apps/verbs.h"
#include "spec/plan.h"
#include "train/session.h"

namespace echelon {

// Model, mesh, batch, precision: the flags of train and verify. A flag that is given wins over the --plan
// file.
class PlanFlags {
 public:
  // `defaults` hold where neither flag nor file says anything.
  void add_to(CLI::App& app, const Plan& defaults);
  Plan plan() const;
  // Whether an axis of the mesh is given, or a plan, which has one.
  bool gives_mesh() const;

 private:
  // Flags that are named by the command line but not built yet: refused by name, not as unknown.
  struct Later {
    const char* name;
    const char* legal;  // the one value that changes nothing; null: none
    std::string value;
  };

  CLI::App* app_ = nullptr;
  Plan defaults_;
  std::string plan_file_, model_, sp_, dtype_, schedule_, layers_per_stage_, recompute_, optimizer_barrier_,
      offload_, offload_dir_, bucket_, compress_;
  double aux_loss_ = 0, device_loss_ = 0, communication_loss_ = 0, z_loss_ = 0, bias_rate_ = 0, capacity_ = 0;
  std::string balance_scope_, drop_;
  int dp_ = 1, tp_ = 1, pp_ = 1, cp_ = 1, cp_ulysses_ = 1, document_end_ = -1, chunks_ = 0, zero_ = 0,
      hsdp_ = 1, zero_prefetch_ = 1;
  std::optional<int> ep_;
  std::string cp_kind_, cp_balance_, mask_;
  std::int64_t global_batch_ = 0, micro_batch_ = 0, seq_len_ = 0;
  std::vector<Later> later_;
};

class OptimizerFlags {
 public:
  void add_to(CLI::App& app, OptimizerOptions& options);
  // For a run of this many steps of the plan.
  void finish(std::int64_t steps, const Plan& plan);

 private:
  OptimizerOptions* options_ = nullptr;
  std::optional<double> min_lr_, clip_;
};

// Ranks of the plan on this machine, and the cores that they share.
struct RanksHere {
  int ranks = 1, cores = 1;
};
RanksHere ranks_here(const Plan& plan, const ProcessWorld* processes);

class RunFlags {
 public:
  void add_to(CLI::App& app);
  // Of a verb that runs one rank.
  void add_threads_to(CLI::App& app);
  // Compute threads of a rank: as given, or the cores shared out over the ranks.
  RunOptions options(const Plan& plan, const ProcessWorld* processes = nullptr) const;
  std::chrono::milliseconds timeout() const;

 private:
  std::optional<int> threads_;
  std::string collectives_ = "direct";
  double timeout_seconds_ = 60;
};

}  // namespace echelon
