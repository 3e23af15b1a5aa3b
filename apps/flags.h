// The flags that verbs share, and how they become a Plan.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "apps/flag_values.h"
#include "apps/verbs.h"
#include "checkpoint/starting_weights.h"
#include "spec/plan.h"
#include "train/session.h"

namespace echelon {

// Model, mesh, batch, precision: the flags of train and verify. A flag that is given wins over the --plan
// file.
class PlanFlags {
 public:
  // `defaults` hold where neither flag nor file says anything.
  void add_to(CLI::App& app, const Plan& defaults);
  // With `weights`, what is trained is their model: RequestError where flag or file say another. With
  // `resumed`, it is this one where neither flag nor file says one. `document_end` is asked for the token
  // that ends a document, where the mask needs one that neither says; -1: it knows none. `choose_mesh` sets
  // the mesh where none is given.
  Plan plan(const StartingWeights* weights = nullptr, const ModelSpec* resumed = nullptr,
            const std::function<std::int32_t()>& document_end = {},
            const std::function<void(Plan&)>& choose_mesh = {}) const;
  // Whether an axis of the mesh is given, or a plan, which has one.
  bool gives_mesh() const;

 private:
  CLI::App* app_ = nullptr;
  Plan defaults_;
  std::string plan_file_;
  std::map<std::string, std::string> values_;  // as they stand on the line
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

// --device, and the driver of what it names: null of the cpu, and why where that is what auto came to is
// said. RequestError where there is no such device.
void add_device(CLI::App& app, std::string& device);
std::shared_ptr<DeviceDriver> driver_of(const std::string& device);
// What a dry run imagines, which needs none to be here.
Device imagined(const std::string& device);

class RunFlags {
 public:
  void add_to(CLI::App& app);
  // Of a verb that runs one rank.
  void add_threads_to(CLI::App& app);
  // Compute threads of a rank: as given, or the cores shared out over the ranks.
  RunOptions options(const Plan& plan, const ProcessWorld* processes = nullptr) const;
  std::shared_ptr<DeviceDriver> driver() const;
  Device imagined_device() const { return imagined(device_); }
  std::chrono::milliseconds timeout() const;

 private:
  std::optional<int> threads_;
  std::string device_ = "cpu";
  mutable std::optional<std::shared_ptr<DeviceDriver>> driver_;  // once it was asked for
  std::string collectives_ = "direct";
  double timeout_seconds_ = 60;
};

}  // namespace echelon
