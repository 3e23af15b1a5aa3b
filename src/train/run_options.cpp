#include "train/run_options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/units.h"
#include "train/this_machine.h"

namespace echelon {

int RunOptions::device_of(int rank) const {
  if (!driver) return 0;
  return (processes != nullptr ? processes->rank_on_node(rank) : rank) % driver->num_devices();
}

int RunOptions::most_ranks_on_a_device(int ranks) const {
  const int here = processes != nullptr ? processes->ranks_on_this_node() : ranks;
  return driver ? (here + driver->num_devices() - 1) / driver->num_devices() : here;
}

int RunOptions::devices_in_use(int ranks) const {
  const int here = processes != nullptr ? processes->ranks_on_this_node() : ranks;
  return driver ? std::min(here, driver->num_devices()) * std::max(1, ranks / here) : 0;
}

static bool shares_node(const ProcessWorld* processes, int a, int b) {
  return processes == nullptr ||
         processes->nodes()[static_cast<std::size_t>(a)] == processes->nodes()[static_cast<std::size_t>(b)];
}

std::function<void(int rank)> naming_lost_ranks(const RunOptions& run, int ranks,
                                                std::function<void(int rank)> body) {
  return [run, ranks, body = std::move(body)](int rank) {
    try {
      body(rank);
    } catch (const DeviceLost& lost) {
      std::vector<int> there;
      for (int r = 0; r < ranks; ++r)
        if (run.device_of(r) == lost.device && shares_node(run.processes, r, rank)) there.push_back(r);
      fail("{}; {} {} on it", lost.what(), there.size() == 1 ? "rank" : "ranks",
           fmt::format("{} {}", fmt::join(there, ", "), there.size() == 1 ? "was" : "were"));
    }
  };
}

void refuse_beyond_memory(const Plan& plan, double bytes, const RunOptions& run) {
  const int ranks = run.processes != nullptr ? run.processes->ranks_on_this_node() : plan.mesh.num_ranks();
  const int together = run.most_ranks_on_a_device(plan.mesh.num_ranks());
  const double needed = run.driver ? bytes * together / ranks : bytes;
  const double limit =
      run.driver ? static_cast<double>(run.driver->properties(0).memory_bytes) : memory_limit();
  if (needed <= limit) return;
  std::string less;
  if (plan.mesh.num_ranks() > 1) less += "fewer ranks, ";
  if (plan.micro_batch > 1) less += "a smaller --micro-batch, ";
  if (plan.seq_len > 1) less += "a shorter --seq-len, ";
  refuse("--model {}: needs {} on {} of {}, which has {}; take {}a smaller model", plan.model.name,
         format_bytes(needed), counted(run.driver ? together : plan.mesh.num_ranks(), "rank"),
         run.driver ? "device 0" : "this machine", format_bytes(limit),
         less.empty() ? "" : less.substr(0, less.size() - 2) + " or ");
}

}  // namespace echelon
