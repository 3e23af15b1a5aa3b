// The parts of launch_files(): a file for each program.
#pragma once

#include <fmt/format.h>

#include "base/error.h"
#include "plan/launch.h"

namespace echelon {

struct LaunchRequest {
  std::string program;
  const Estimate& best;
  const Workload& work;

  const Plan& plan() const { return best.plan; }
  const ModelSpec& model() const { return best.plan.model; }
  int nodes() const {
    const int host = work.machine.devices_of_host();
    return std::max(1, static_cast<int>((plan().mesh.num_ranks() + host - 1) / host));
  }
  int ranks_of_node() const {
    return std::min<int>(work.machine.devices_of_host(), static_cast<int>(plan().mesh.num_ranks()));
  }
  bool is_recompute(std::string_view name) const {
    return plan().recompute == parse_recompute(std::string(name), "recompute");
  }
};

// RequestError: "--launch-for torchtitan: does not run ZeRO 1; legal: ..."
template <class... Args>
[[noreturn]] void not_launched(const LaunchRequest& r, fmt::format_string<Args...> form, Args&&... args) {
  refuse("--launch-for {}: {}", r.program, fmt::format(form, std::forward<Args>(args)...));
}

// Refuses, for every program, what only Echelon's own trainer runs.
void check_launched(const LaunchRequest& r);
// Checks that the model is a decoder in Llama's form. RequestError for what the flags of these programs
// cannot say. `is_megatron`: Megatron, which also runs layers of one part each, latent attention and sigmoid
// routers; its own checks decide which of these.
void check_plain_llama(const LaunchRequest& r, bool is_megatron = false);

// The first lines of launch.sh.
std::string launch_head(const LaunchRequest& r);
// "torchrun --nnodes 8 --nproc-per-node 8 ..."
std::string torchrun(const LaunchRequest& r);

std::vector<LaunchFile> launch_megatron_core(const LaunchRequest& r);
std::vector<LaunchFile> launch_megatron_bridge(const LaunchRequest& r);
std::vector<LaunchFile> launch_torchtitan(const LaunchRequest& r);
std::vector<LaunchFile> launch_nanotron(const LaunchRequest& r);
std::vector<LaunchFile> launch_deepspeed(const LaunchRequest& r);

}  // namespace echelon
