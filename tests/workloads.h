// Workloads as the tests of the planner write them down.
#pragma once

#include <utility>

#include "plan/workload.h"

namespace echelon::checks {

// As searches begin: with sequence parallelism, and layers split by cost.
inline Plan searched_plan() {
  Plan plan;
  plan.sequence_parallel = plan.balance_layers = true;
  return plan;
}

inline Workload workload_of(ModelSpec model, std::int64_t seq_len, std::int64_t global_batch,
                            Precision precision, Machine machine, Software software,
                            ExactMemory exact_memory = {}) {
  Workload work{searched_plan(), precision, std::move(machine), std::move(software), std::move(exact_memory)};
  work.plan.model = std::move(model);
  work.plan.seq_len = seq_len;
  work.plan.global_batch = global_batch;
  return work;
}

}  // namespace echelon::checks
