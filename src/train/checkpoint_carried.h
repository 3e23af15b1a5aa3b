// The part of a checkpoint that gradient compression carries from step to step:
//
//   compression.safetensors   NAME.residual.K   of dp rank K, in the parameter's logical shape
//                             NAME.factor.S     PowerSGD's (R, cols) of tensor-parallel slice S
#pragma once

#include <functional>

#include "train/checkpoint.h"
#include "train/checkpoint_file.h"

namespace echelon {

inline constexpr const char* carried_file_name = "compression.safetensors";

// What the file holds, in order; the same on every rank. Empty where nothing is carried.
std::vector<StoredTensor> carried_declarations(const Rank& rank, const ParameterStore& parameters,
                                               const Compression& compression);

// Collective over the mesh: calls write(name, tensor) on rank 0 for each of them, in their order.
void gather_carried(const Rank& rank, const ParameterStore& parameters, const Compression& compression,
                    const std::vector<CarriedTensor>& carried,
                    const std::function<void(const std::string& name, const Tensor& tensor)>& write);

// Fills what this rank carries, see residual_sources(). A residual that would be lost, because this run
// carries none of the parameter, is a RequestError; a factor that is missing or of another shape is not.
void load_carried(const Rank& rank, const ParameterStore& parameters, const CheckpointFile& file,
                  const CheckpointInfo& info, const std::vector<CarriedTensor>& carried);

}  // namespace echelon
