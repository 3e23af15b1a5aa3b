// Where experts are if their loads decide, with further copies of those that have most: the expert-parallel
// load balancer of DeepSeek (EPLB, https://github.com/deepseek-ai/EPLB).
#pragma once

#include <cstdint>
#include <vector>

namespace echelon {

struct ExpertPlacement {
  std::vector<int> copies;                     // of each expert, at least one; each takes as much of its load
  std::vector<std::vector<std::size_t>> held;  // the experts of each rank, as many on each
  double busiest = 1;                          // load of the rank with most over the mean

  // Slots of a rank whose expert is on others too, of the rank with most.
  std::int64_t shared_slots() const;
  int most_copies() const;
};

// `slots` experts on each of so many ranks, on so many nodes. Each further slot goes to the expert with most
// load for each copy. Where the nodes divide the `groups` of node-limited routing, groups are placed on nodes
// first and copies stay on their group's node; else all slots go to all ranks, the largest first, each to the
// rank with least that has room.
ExpertPlacement place_experts(const std::vector<double>& shares, int ranks, std::int64_t slots, int nodes = 1,
                              std::int64_t groups = 1);

}  // namespace echelon
