// The parts of a step, timed on this machine before a run: one layer of each kind on the ranks that share its
// work, embedding and output layer, the optimizer, and communication between as many ranks. plan/cost makes a
// step of them.
#pragma once

#include "plan/cost.h"
#include "train/session.h"

namespace echelon {

// How large what is timed may be. A device starts kernels no faster than a core computes small ones: it is
// given what keeps it at work for some milliseconds.
struct RehearsalSize {
  double most_flops;  // of a layer's forward pass
  std::int64_t most_vocab, most_elements;
};
RehearsalSize rehearsal_on_host(const Plan& plan);
// Shared out over the ranks that rehearse on it together.
RehearsalSize rehearsal_on_device(const Plan& plan, double peak_flops, int ranks_together);

// One microbatch of the plan's model, with so many layers with a dense MLP and so many with experts, on the
// ranks that compute it together: those of tp and cp, and those that experts are spread over. Fewer tokens
// and a smaller vocabulary where a try would take long.
struct RehearsedPlan {
  Plan plan;
  // What a rank of the plan computes in a full microbatch of a layer, and in the output layer, over what it
  // computes here.
  double layer_share = 1, head_share = 1;
};
RehearsedPlan rehearsed_plan(const Plan& plan, const RehearsalSize& size, std::int64_t dense,
                             std::int64_t others);
// Of a model whose layers have one part each, or some of them a short convolution: with layers like these of
// it.
RehearsedPlan rehearsed_plan(const Plan& plan, const RehearsalSize& size, std::vector<std::int64_t> like);

// On as many ranks at once as the job will have, or some of them; best of a few tries.
PartSeconds rehearse(const Plan& plan, const RehearsalSize& size, const RunOptions& options,
                     const JobCores& cores);

}  // namespace echelon
