// Workloads and plans of which the planner says what a step takes and holds.
#pragma once

#include <vector>

#include "workloads.h"

namespace echelon::checks {

// Of 4,096 tokens in bf16, by Megatron-Core.
inline Workload workload(const char* model, std::int64_t batch, const char* machine = "h100") {
  return checks::workload_of(load_model(model), 4096, batch, Precision::bf16, load_machine(machine),
                             load_software("current"));
}

// Of 64 ranks.
inline std::vector<Plan> plans_like(const Plan& base) {
  std::vector<Plan> list;
  for (const char* schedule : {"1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipev"})
    for (int pp : {1, 2, 4, 8})
      for (int tp : {1, 8})
        for (int zero : {0, 1, 3})
          for (bool even : {true, false}) {
            Plan c = base;
            c.mesh.set(Axis::pp, pp);
            c.mesh.set(Axis::tp, tp);
            c.mesh.set(Axis::dp, 64 / pp / tp);
            c.zero = zero;
            c.schedule = schedule;
            c.chunks = c.schedule == "interleaved" && pp > 1 ? 2 : 1;
            c.balance_layers = !even;
            c.recompute = zero == 1 ? Recompute::full : Recompute::none;
            list.push_back(c);
          }
  return list;
}

}  // namespace echelon::checks
