// The part of a checkpoint that gradient compression carries from step to step:
//
//    NAME.residual.K   of the K-th of the ranks that hold the same parameters, in the parameter's logical
//    shape
//    NAME.factor.S     PowerSGD's factor (R, cols) of tensor-parallel slice S
#pragma once

#include <vector>

#include "checkpoint/checkpoint_parts.h"
#include "checkpoint/checkpoint_reader.h"
#include "spec/plan.h"

namespace echelon {

// What this rank writes of it. Empty if nothing is carried.
std::vector<OwnedTensor> owned_carried(const Rank& rank, const ParameterStore& parameters,
                                       const Compression& compression,
                                       const std::vector<CarriedTensor>& carried);

// Bytes of what all ranks write of it.
std::int64_t carried_bytes(const Plan& plan, const std::vector<ParamSpec>& model);

// Fills what this rank carries, see residual_sources(). RequestError for a residual that would be lost
// because this run carries none for the parameter; a factor that is missing or of another shape is no error.
void load_carried(const Rank& rank, const ParameterStore& parameters, CheckpointReader& reader,
                  const CheckpointInfo& info, const std::vector<CarriedTensor>& carried);

}  // namespace echelon
