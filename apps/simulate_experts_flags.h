// The flags of simulate --moe. They exclude the flags for schedules, except those of both kinds: --compare,
// --steps, --format, --out, --width, --colour and --json.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "apps/simulate_flags.h"
#include "plan/routing_request.h"
#include "spec/model_spec.h"

namespace echelon {

struct ExpertsFlags {
  bool moe = false;

  void add_to(CLI::App& app);
  // RequestError for a flag of the other kind of simulation than the requested one.
  void refuse_strangers(const CLI::App& app) const;

  struct Request {
    RoutingRequest routing;
    std::vector<BalanceMethod> methods;
    std::int64_t hidden = 0;  // C
    double element_bytes = 0;
    bool shows_devices = false;  // in the heat map, instead of experts
  };
  // RequestError for what cannot be simulated.
  Request read(SimulateFlags& shared) const;

 private:
  std::vector<double> popularities(std::int64_t experts) const;
  void refuse_idle(const Request& request) const;
  void read_router(const ModelSpec& model, RoutingRequest& request) const;
  bool is_given(const char* name) const { return app_->get_option(name)->count() > 0; }

  const CLI::App* app_ = nullptr;
  std::vector<std::string> names_;  // of its flags except --moe
  std::string model_, scores_ = "softmax", popularity_, popular_expert_, capacities_ = "1,1.25,1.5,2", drop_,
                      dtype_ = "bf16", heat_ = "experts";
  std::int64_t experts_ = 8, top_k_ = 2, groups_ = 1, most_groups_ = 1, hidden_ = 4096, tokens_ = 2048;
  int ep_ = 1;
  std::uint64_t seed_ = 1;
  double zipf_ = 1, router_lr_ = 10;
  // The values used in the papers, for each method by itself.
  Balancing balancing_{.expert_loss = 0.01,
                       .device_loss = 0.05,
                       .communication_loss = 0.02,
                       .bias_rate = 0.001,
                       .capacity = 1.25};
};

}  // namespace echelon
