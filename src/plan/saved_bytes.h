// Predicts what layers keep for their backward passes under current training programs.
#pragma once

#include "plan/layers_by_kind.h"
#include "plan/workload.h"
#include "spec/recompute.h"

namespace echelon {

// Bytes of one microbatch. For 16-bit, dropout and unfused attention: s b h (10 + 24/t + 5 a s/(h t)) per
// layer; under sequence parallelism all of it divided by t; without the last term under selective
// recomputation (Korthikanti et al. 2022, table 2).
struct SavedBytes {
  PerKind layer{};      // kept from the forward to the backward pass
  PerKind waiting{};    // if B and W are separate: kept from B to W; other programs keep all of `layer`
  PerKind working{};    // temporary, in a layer's backward pass
  double head = 0;      // of the output layer while it runs
  double boundary = 0;  // one activation between stages
  double logits = 0;    // in the type in which the output matrix produces them
};
SavedBytes saved_bytes(const Workload& work, const Plan& c, const Recompute& recompute);

}  // namespace echelon
