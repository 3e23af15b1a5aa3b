// Times the parts of a step on this machine before a run: one layer of each kind on the ranks that share its
// work, embedding and output layer, the optimizer, and communication between as many ranks. plan/cost
// combines them into a step.
#pragma once

#include <functional>

#include "plan/cost.h"
#include "train/session.h"

namespace echelon {

// How large the timed parts may be. A device launches kernels no faster than a core computes small ones, so
// it is given enough work for some milliseconds.
struct RehearsalSize {
  double most_flops;  // of a layer's forward pass
  std::int64_t most_vocab, most_elements;
};
// `peak_flops`: of products, by all ranks that rehearse together.
RehearsalSize rehearsal_on_host(const Plan& plan, double peak_flops = 0, int ranks_together = 1);
// Divided among the ranks that rehearse on the device together.
RehearsalSize rehearsal_on_device(const Plan& plan, double peak_flops, int ranks_together);

// One microbatch of the plan's model, with `dense` layers with an MLP and `others` with experts, on the ranks
// that compute it together: those of tp and cp, and those that experts are spread over. It has fewer tokens
// and a smaller vocabulary if a run would take long.
struct RehearsedPlan {
  Plan plan;
  // How much more a rank of the plan computes in a full microbatch than here: in each layer of this plan, and
  // in the output layer.
  std::vector<PartSeconds::Passes> layer_shares{};
  double head_share = 1;
};
RehearsedPlan rehearsed_plan(const Plan& plan, const RehearsalSize& size, std::int64_t dense,
                             std::int64_t others);
// For models whose layers have one part each, or short convolutions: with layers like these layers of the
// model.
RehearsedPlan rehearsed_plan(const Plan& plan, const RehearsalSize& size, std::vector<std::int64_t> like);

// What a layer of each kind and the two ends take in a microbatch of the plan, by what the passes of
// rehearsed plans take: one with a layer of each kind, and with one more of each.
using TimePasses = std::function<PartSeconds::Passes(const Plan& rehearsed)>;
PartSeconds parts_of_passes(const Plan& plan, const RehearsalSize& size, const TimePasses& passes_of);

// Times the parts on as many ranks as the job will have, or some of them; the best of a few runs.
PartSeconds rehearse(const Plan& plan, const RehearsalSize& size, const RunOptions& options,
                     const JobCores& cores);

}  // namespace echelon
