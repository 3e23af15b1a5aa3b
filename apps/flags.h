// Flags that several verbs share, and how they become a Plan.
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

// Told to a training by launch --elastic: --dp as the user gave it.
inline constexpr const char* asked_dp_flag = "--asked-dp";

// Model, mesh, batch, precision: the flags of train and verify. Flags override the --plan file.
class PlanFlags {
 public:
  // `defaults` apply to what neither flags nor file set.
  void add_to(CLI::App& app, const Plan& defaults);
  // Then asked_dp_flag too, which no help shows.
  void add_asked_dp();
  // With `weights`, the model is theirs: RequestError if flags or file set another. With `resumed`, it is
  // this one unless flags or file set one. `document_end` is called for the token that ends a document if the
  // mask needs one and neither sets it; it returns -1 if it knows none. `choose_mesh` sets the mesh if none
  // is given.
  Plan plan(const StartingWeights* weights = nullptr, const ModelSpec* resumed = nullptr,
            const std::function<std::int32_t()>& document_end = {},
            const std::function<void(Plan&)>& choose_mesh = {}) const;
  // Whether an axis of the mesh is given, or a plan, which includes a mesh.
  bool gives_mesh() const;

 private:
  CLI::App* app_ = nullptr;
  Plan defaults_;
  std::string plan_file_;
  std::map<std::string, std::string> values_;  // as given on the command line
  int asked_dp_ = 0;                           // before launch --elastic lowered --dp; 0: it did not
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

// How many ranks of the plan are on this machine, and the cores that they share.
struct RanksHere {
  int ranks = 1, cores = 1;
};
RanksHere ranks_here(const Plan& plan, const ProcessWorld* processes);

// --device, and its driver: null for the cpu. If auto chose the cpu, the reason is printed. RequestError if
// there is no such device.
void add_device(CLI::App& app, std::string& device);
std::shared_ptr<DeviceDriver> driver_of(const std::string& device);
// The device of a dry run, which need not exist here.
Device imagined(const std::string& device);

class RunFlags {
 public:
  void add_to(CLI::App& app);
  // For a verb that runs one rank.
  void add_threads_to(CLI::App& app);
  // Compute threads for each rank: as given, or the cores divided over the ranks.
  RunOptions options(const Plan& plan, const ProcessWorld* processes = nullptr) const;
  std::shared_ptr<DeviceDriver> driver() const;
  Device imagined_device() const { return imagined(device_); }
  std::chrono::milliseconds timeout() const;

 private:
  std::optional<int> threads_;
  std::string device_ = "cpu";
  mutable std::optional<std::shared_ptr<DeviceDriver>> driver_;  // set once it was asked for
  std::string collectives_ = "direct";
  double timeout_seconds_ = 60;
};

}  // namespace echelon
