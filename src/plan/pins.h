// What of a configuration is given; the search goes over the rest.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spec/plan.h"

namespace echelon {

struct Pins {
  std::optional<int> dp, tp, pp, cp, ep, etp, zero, hsdp, chunks;
  std::optional<bool> sequence_parallel;
  std::optional<std::string> schedule;
  std::optional<std::int64_t> micro_batch;
  std::optional<Recompute> recompute;
  std::optional<ContextKind> context;
  std::vector<std::int64_t> layers_per_stage;
  std::optional<bool> balance_layers;
};

// All of them, as the plan has them.
Pins pins_of(const Plan& plan);

}  // namespace echelon
