// Places experts by their loads, with additional copies of those with most load: the expert-parallel load
// balancer of DeepSeek (EPLB, https://github.com/deepseek-ai/EPLB).
#pragma once

#include <cstdint>
#include <vector>

namespace echelon {

struct ExpertPlacement {
  std::vector<int> copies;                     // of each expert, at least one; they share its load equally
  std::vector<std::vector<std::size_t>> held;  // the experts of each rank, equally many on each
  double busiest = 1;                          // load of the busiest rank over the mean

  // The most slots of any rank whose experts are on other ranks too.
  std::int64_t shared_slots() const;
  int most_copies() const;
};

// Places `slots` experts on each of `ranks` ranks, which lie on `nodes` nodes. Each additional slot goes to
// the expert with most load per copy. If `nodes` divides the `groups` of node-limited routing, groups are
// first placed on nodes and copies stay on their group's node; else all slots are distributed over all ranks.
// Slots go by decreasing load, each to the least loaded rank that has room.
ExpertPlacement place_experts(const std::vector<double>& shares, int ranks, std::int64_t slots, int nodes = 1,
                              std::int64_t groups = 1);

}  // namespace echelon
