// Parameters as tensors independent of the mesh: what checkpoints hold, and what verify and tests compare.
#pragma once

#include "model/parameters.h"

namespace echelon {

// The tensors of a parameter that are saved, compared and restored. For gradients: their sum over dp.
enum class ParameterTensor { value, gradient, exp_avg, exp_avg_sq };

// The whole part of the logical tensor that belongs to this rank's tp coordinate: gathered over the ranks
// among which ZeRO cuts it (all of them must call this, and each gets it; category other), or a view if this
// rank holds it whole.
Tensor local_tensor(const Rank& rank, const Parameter& parameter, ParameterTensor which);
// Fills what this rank holds from `local`, which may be the changed result of local_tensor().
void store_local(const Rank& rank, const Tensor& local, const Parameter& parameter, ParameterTensor which);

// The logical tensor, also gathered over tp: every rank of the tp group gets it (category other).
Tensor gather_logical(const Rank& rank, const Parameter& parameter, ParameterTensor which);
// Fills what this rank holds from the logical tensor.
void scatter_logical(const Rank& rank, const Tensor& logical, const Parameter& parameter,
                     ParameterTensor which);

// The same for any tensor that is cut like `spec`: `local` has this rank's local shape.
Tensor gather_logical(const Rank& rank, const ParamSpec& spec, const Tensor& local);
void scatter_logical(const Rank& rank, const Tensor& logical, const ParamSpec& spec, const Tensor& local);

}  // namespace echelon
