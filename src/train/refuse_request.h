// What of a training request cannot be done is refused before any rank starts, naming the flag.
#pragma once

#include "checkpoint/checkpoint.h"
#include "schedule/pipeline_layout.h"
#include "train/session.h"

namespace echelon {

// RequestError where the plan, the optimizer or the run's numbers are out of range, or do not go together.
void refuse_impossible(const TrainRequest& request, const PipelineLayout& pipeline);

// RequestError where a device cannot run the plan in this way.
void refuse_on_device(const Plan& plan, const RunOptions& run);
// What the kernels of a rank take for themselves, and offloading on a device.
std::int64_t scratch_bytes(const Plan& plan, const RunOptions& run);

// How a rank of the job is run dry, and what a rank, or a parameter server, holds beside: its kernels'
// scratch.
DryRunOptions dry_run_options(const TrainRequest& request);
Memory with_scratch(Memory memory, const TrainRequest& request);

// What the run goes on from: the checkpoint at `path`, or the start where that is empty. RequestError where
// the run cannot go on from it with this data, or the directory holds what would stop it when it saves.
CheckpointInfo find_resumed(const TrainRequest& request, const std::string& path, const TokenData& data);

// Collective where the ranks are processes: RequestError on all of them where they have not read the same
// data.
void refuse_different_data(ProcessWorld* processes, const TokenData& data);

// Collective where the ranks are processes: RequestError on all of them where one was given another plan,
// model, optimizer or seed than rank 0, which would train other weights in silence. `more`: further lines
// that have to be the same, as "--steps 400".
void refuse_different_settings(ProcessWorld* processes, const Plan& plan, const OptimizerOptions& optimizer,
                               std::uint64_t seed, const std::vector<std::string>& more);

// RequestError where memory, or the disk that parameters, moments or activations are offloaded to, is too
// small.
void refuse_what_machine_lacks(const TrainRequest& request, const PipelineLayout& pipeline);

}  // namespace echelon
