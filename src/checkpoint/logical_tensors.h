// Parameters as tensors that know no mesh: what checkpoints hold, verify compares and tests look at.
#pragma once

#include "model/parameters.h"

namespace echelon {

// A tensor of a parameter that is saved, compared and restored. Of gradients: their sum over dp.
enum class ParameterTensor { value, gradient, exp_avg, exp_avg_sq };

// What this rank's tp coordinate has of the logical tensor, whole: gathered over the ranks that ZeRO cuts it
// over (they all call this, and each gets it; category other), or a view where it lies here whole.
Tensor local_tensor(const Rank& rank, const Parameter& parameter, ParameterTensor which);
// Fills what this rank holds from it; it may be what local_tensor() returned, changed.
void store_local(const Rank& rank, const Tensor& local, const Parameter& parameter, ParameterTensor which);

// The logical tensor: gathered over tp too, every rank of the tp group gets it (category other).
Tensor gather_logical(const Rank& rank, const Parameter& parameter, ParameterTensor which);
// Fills what this rank holds from the logical tensor.
void scatter_logical(const Rank& rank, const Tensor& logical, const Parameter& parameter,
                     ParameterTensor which);

// The same of any tensor that is cut as `spec` is: `local` in this rank's local shape.
Tensor gather_logical(const Rank& rank, const ParamSpec& spec, const Tensor& local);
void scatter_logical(const Rank& rank, const Tensor& logical, const ParamSpec& spec, const Tensor& local);

}  // namespace echelon
