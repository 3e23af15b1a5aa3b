// Reports a dry run, for people and for programs.
#pragma once

#include <cstdint>
#include <string>

#include "train/dry_job.h"

namespace echelon {

// What the rank that holds most leaves of a limit, beside the scratch of one compute thread on a cpu; below
// 0: it does not fit. (A device's workspace is unknown here.)
std::int64_t left_of(std::int64_t memory_limit, const Plan& plan, const DryJob& job);

// With a `memory_limit`, also whether a rank fits in it; 0: none is asked about.
std::string dry_run_text(const Plan& plan, const PipelineLayout& pipeline, const DryJob& job,
                         std::int64_t memory_limit);
// One JSON object: the whole job, and each class of ranks with one of its ranks.
std::string dry_run_json(const Plan& plan, const PipelineLayout& pipeline, const DryJob& job,
                         std::int64_t memory_limit);

}  // namespace echelon
