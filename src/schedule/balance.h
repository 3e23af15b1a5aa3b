// How many layers each stage should have, so that the rank with the most work has as little as can be: a
// pipeline is as slow as its slowest rank. The output layer alone costs as much as several layers.
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
  std::vector<std::int64_t> layers;  // of each stage: consecutive layers, at least one
  // Work of one microbatch on the rank with the most, in the unit of the costs: of its stages together; of a
  // stage on two ranks (DualPipe) each has the part of the microbatches that it runs.
  double slowest = 0;
  // No split has less. Equal to `slowest`, which is then least, where all layers cost the same and ranks
  // share all of their stages or none (every published schedule); and for layers of any costs where a rank
  // has one stage, or two in a V, up to some 500 layers in 128 stages. Elsewhere (chunks of unlike layers)
  // the split is as good as moving single layers makes it.
  double lower_bound = 0;
};

// `layer_costs`: of each layer; `first_extra`, `last_extra`: what the first and the last stage have beside
// their layers; `in_first`: of each layer in the first stage, where that is another cost, no larger (layers
// that are frozen have no backward pass there); empty: the same. Of several best splits one near the even
// split, the larger stages first: the even split itself where it is as good as any. Throws RequestError where
// there are fewer layers than stages.
Balance balance_layers(const Schedule& schedule, const std::vector<double>& layer_costs, double first_extra,
                       double last_extra, const std::vector<double>& in_first = {});
// The same of ranks that run these stages.
Balance balance_layers(const std::vector<std::vector<StagePart>>& ranks, const StageCosts& costs);

}  // namespace echelon
