// What the tests of searches ask.
#pragma once

#include "plan/search.h"
#include "train/dry_run.h"
#include "workloads.h"

namespace echelon::checks {

inline SearchRequest request(const char* model, int gpus, std::int64_t batch,
                             const char* software = "current") {
  SearchRequest r;
  r.work = checks::workload_of(load_model(model), 1024, batch, Precision::bf16, load_machine("h100"),
                               load_software(software));
  if (r.work.software.is_this_trainer) r.work.exact_memory = exact_memory();
  r.gpus = gpus;
  r.top = 5;
  return r;
}

}  // namespace echelon::checks
