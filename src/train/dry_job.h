// A dry run of a whole job: what each rank will hold, and send in a step. Ranks that must be alike form a
// class, of which one is run.
#pragma once

#include <cstdint>
#include <vector>

#include "base/progress.h"
#include "train/dry_run.h"

namespace echelon {

struct RankClass {
  std::int64_t ranks = 0;
  int first = 0;  // the lowest of them, which is run
  DryRun run;
};

struct DryJob {
  std::vector<RankClass> classes;  // by shape
  std::vector<int> class_of;       // by rank
  Device device = Device::cpu;     // the imagined device

  const DryRun& of(int rank) const {
    return classes[static_cast<std::size_t>(class_of[static_cast<std::size_t>(rank)])].run;
  }
};

DryJob dry_job(const Plan& plan, const PipelineLayout& pipeline, const Progress& progress = {},
               const DryRunOptions& options = {});

}  // namespace echelon
