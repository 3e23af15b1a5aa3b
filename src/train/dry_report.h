// Reports a dry run, for people and for programs.
#pragma once

#include <string>

#include "train/dry_job.h"

namespace echelon {

std::string dry_run_text(const Plan& plan, const PipelineLayout& pipeline, const DryJob& job);
// One JSON object: the whole job, and each class of ranks with one of its ranks.
std::string dry_run_json(const Plan& plan, const PipelineLayout& pipeline, const DryJob& job);

}  // namespace echelon
