#include "train/run_options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/units.h"
#include "train/this_machine.h"

namespace echelon {

static int device_in_turn(const ProcessWorld* processes, int rank, DeviceDriver& driver) {
  return (processes != nullptr ? processes->rank_on_node(rank) : rank) % driver.num_devices();
}

std::vector<std::string> gather_device_ids(ProcessWorld& processes, DeviceDriver* driver) {
  if (driver == nullptr) return processes.gather("");
  return processes.gather(driver->properties(device_in_turn(&processes, processes.rank(), *driver)).id);
}

int RunOptions::device_of(int rank) const { return driver ? device_in_turn(processes, rank, *driver) : 0; }

std::vector<int> RunOptions::own_devices(int ranks) const {
  if (processes != nullptr) return {device_of(processes->rank())};
  std::vector<int> devices(static_cast<std::size_t>(std::min(ranks, driver->num_devices())));
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

// How many ranks each device has, by its id.
static std::map<std::string, int> ranks_by_device(const RunOptions& run, int ranks) {
  check(run.processes == nullptr || static_cast<int>(run.device_ids.size()) == ranks,
        "processes have told each other their devices");
  std::map<std::string, int> found;
  for (int rank = 0; rank < ranks; ++rank)
    ++found[run.processes != nullptr ? run.device_ids[static_cast<std::size_t>(rank)]
                                     : std::to_string(run.device_of(rank))];
  return found;
}

int RunOptions::most_ranks_on_a_device(int ranks) const {
  int most = 0;
  for (const auto& [device, count] : ranks_by_device(*this, ranks)) most = std::max(most, count);
  return most;
}

int RunOptions::devices_in_use(int ranks) const {
  return static_cast<int>(ranks_by_device(*this, ranks).size());
}

std::vector<int> RunOptions::ranks_on(int device, int rank, int ranks) const {
  const auto is_there = [&](int other) {
    return processes == nullptr
               ? device_of(other) == device
               : device_ids[static_cast<std::size_t>(other)] == device_ids[static_cast<std::size_t>(rank)];
  };
  std::vector<int> there;
  for (int other = 0; other < ranks; ++other)
    if (is_there(other)) there.push_back(other);
  return there;
}

std::function<void(int rank)> naming_lost_ranks(const RunOptions& run, int ranks,
                                                std::function<void(int rank)> body) {
  return [run, ranks, body = std::move(body)](int rank) {
    try {
      body(rank);
    } catch (const DeviceLost& lost) {
      const std::vector<int> there = run.ranks_on(lost.device, rank, ranks);
      fail("{}; {} {} on it", lost.what(), there.size() == 1 ? "rank" : "ranks",
           fmt::format("{} {}", fmt::join(there, ", "), there.size() == 1 ? "was" : "were"));
    }
  };
}

void refuse_beyond_memory(const Plan& plan, double bytes, const RunOptions& run) {
  const int ranks = plan.mesh.num_ranks(), here = run.ranks_here(ranks), device = run.own_device(0);
  const int together = run.driver ? run.most_ranks_on_a_device(ranks) : here;
  const double needed = bytes * together / here;
  const double limit =
      run.driver ? static_cast<double>(run.driver->properties(device).memory_bytes) : memory_limit();
  if (needed <= limit) return;
  std::string less;
  if (plan.mesh.num_ranks() > 1) less += "fewer ranks, ";
  if (plan.micro_batch > 1) less += "a smaller --micro-batch, ";
  if (plan.seq_len > 1) less += "a shorter --seq-len, ";
  refuse("--model {}: needs {} on {} of {}, which has {}; take {}a smaller model", plan.model.name,
         format_bytes(needed), counted(together, "rank"),
         run.driver ? fmt::format("device {}", device) : "this machine", format_bytes(limit),
         less.empty() ? "" : less.substr(0, less.size() - 2) + " or ");
}

}  // namespace echelon
