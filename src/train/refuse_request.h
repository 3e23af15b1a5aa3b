// Refuses training requests that cannot be carried out, before any rank starts, naming the flag.
#pragma once

#include "checkpoint/checkpoint.h"
#include "schedule/pipeline_layout.h"
#include "train/session.h"

namespace echelon {

// RequestError if numbers of the plan, the optimizer or the run are out of range or do not fit together.
void refuse_impossible(const TrainRequest& request, const PipelineLayout& pipeline);

// RequestError if no device of this kind runs the plan.
void refuse_on_kind(const Plan& plan, Device device);
// RequestError if the devices of this run, or the threads that compute, cannot run the plan in this way.
void refuse_on_device(const Plan& plan, const RunOptions& run);
// RequestError if its passes are not replayed as graphs.
void refuse_graphs(const Plan& plan, Device device);
// RequestError if its steps are not run a second time. `asked`: by which flag.
void refuse_running_again(const Plan& plan, const PipelineLayout& pipeline, Device device,
                          const std::string& asked);
// Bytes that a rank's kernels take for themselves, and those for offloading on a device.
std::int64_t scratch_bytes(const Plan& plan, const RunOptions& run);

// The options of a rank's dry run; and memory plus the kernels' scratch, of a rank or a parameter server.
DryRunOptions dry_run_options(const TrainRequest& request);
Memory with_scratch(Memory memory, const TrainRequest& request);

// RequestError if a run of this model cannot continue from the checkpoint, whose model or tuning is another.
void refuse_other_model(const CheckpointInfo& resumed, const ModelSpec& model);

// The checkpoint at `path` from which the run continues, or the start if that is empty. RequestError if the
// run cannot continue from it with this data, or if the directory contains something that would prevent
// saving.
CheckpointInfo find_resumed(const TrainRequest& request, const std::string& path, const TokenData& data);

// RequestError if the data may have ids that the model has no row for.
void refuse_unknown_tokens(const TokenData& data, const ModelSpec& model);

// Collective if ranks are processes: RequestError on all of them if they have not read the same data.
void refuse_different_data(ProcessWorld* processes, const TokenData& data);

// Collective if ranks are processes: RequestError on all of them if one has a different plan, model,
// optimizer or seed than rank 0, and would silently train other weights. `more`: further lines that must
// agree, such as "--steps 400".
void refuse_different_settings(ProcessWorld* processes, const Plan& plan, const OptimizerOptions& optimizer,
                               std::uint64_t seed, const std::vector<std::string>& more);

// Collective if ranks are processes: RequestError on all of them if numerics are invariant and the
// processors' kernels have other bits on some rank. The plan is the same on all ranks.
void refuse_different_kernels(const RunOptions& options, const Plan& plan);

// RequestError if memory is too small, or the disk to which parameters, moments or activations are offloaded.
void refuse_what_machine_lacks(const TrainRequest& request, const PipelineLayout& pipeline);

}  // namespace echelon
