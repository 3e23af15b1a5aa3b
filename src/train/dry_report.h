// What a job run dry says, for people and for programs.
#pragma once

#include <string>

#include "train/dry_job.h"

namespace echelon {

std::string dry_run_text(const Plan& plan, const PipelineLayout& pipeline, const DryJob& job);
// One object: the whole job, and each class of ranks with one of them.
std::string dry_run_json(const Plan& plan, const PipelineLayout& pipeline, const DryJob& job);

}  // namespace echelon
