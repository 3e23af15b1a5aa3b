// Distributes layers over pipeline stages so that the busiest rank has as little work as possible: a pipeline
// is as slow as its slowest rank, and the output layer alone costs as much as several layers.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace echelon {

// A stage that a rank runs, and of how many of the microbatches.
struct StagePart {
  std::size_t stage = 0;
  double part = 1;
  auto operator<=>(const StagePart&) const = default;
};

// What layers cost: `of_stage` says which of the lists of each layer's cost counts in a stage.
struct StageCosts {
  std::vector<std::vector<double>> layers;
  std::vector<std::size_t> of_stage;
  std::vector<double> extra;  // of each stage, beside its layers
};

struct Balance {
  std::vector<std::int64_t> layers;  // of each stage; at least one
  // Work per microbatch of the busiest rank, in the unit of the costs: of all its stages. If a stage is on
  // two ranks (DualPipe), each counts for its part of the microbatches.
  double slowest = 0;
  // No split has less than this. It equals `slowest`, which is then optimal, in two cases: all layers cost
  // the same, and ranks share either all of their stages or none (every published schedule); or layers of any
  // cost, where each rank has one stage, or two in a V, up to some 500 layers in 128 stages. Otherwise
  // (chunks of unlike layers) the split is a local optimum: moving single layers does not improve it.
  double lower_bound = 0;
};

// `layer_costs`: one per layer. `first_extra`, `last_extra`: the cost of the first and the last stage besides
// their layers. `in_first`: each layer's cost in the first stage, where it may be less (frozen layers have no
// backward pass there); empty: the same. Of several optimal splits, it returns one near the even split with
// the larger stages first; the even split itself if that is optimal. RequestError if there are fewer layers
// than stages.
Balance balance_layers(const Schedule& schedule, const std::vector<double>& layer_costs, double first_extra,
                       double last_extra, const std::vector<double>& in_first = {});
// The same of ranks that run these stages.
Balance balance_layers(const std::vector<std::vector<StagePart>>& ranks, const StageCosts& costs);

}  // namespace echelon
