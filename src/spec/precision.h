// In which dtype a training run keeps each kind of number. Plain data: what is computed follows from the
// dtypes of the tensors.
#pragma once

#include <string>
#include <vector>

#include "spec/dtype.h"

namespace echelon {

struct PrecisionRecipe {
  PrecisionRecipe() = default;
  PrecisionRecipe(DType all);  // f32 or f64: everything in it
  std::string name = "f32";
  DType parameters = DType::f32;   // what layers compute with
  DType master = DType::f32;       // of the weights that the optimizer updates, which parameters are or round
  DType gradients = DType::f32;    // of parameters, summed over microbatches
  DType moments = DType::f32;      // of the optimizer
  DType activations = DType::f32;  // and their gradients
  // Norms, log-sum-exp, losses, logits of tokens and routers, and all sums over ranks of these.
  DType statistics = DType::f32;

  bool operator==(const PrecisionRecipe&) const = default;

  // Parameters are wider weights rounded, and kept beside them is what that rounds off (base/split_weight.h).
  bool has_master() const { return master != parameters; }
  // Narrow parameters are all there is of the weights: each step rounds them at random (Kernels::adamw).
  bool rounds_stochastically() const { return !has_master() && parameters != wide(parameters); }
};

// In the order in which they are named to users:
//   f64        all f64, on the reference kernels
//   f32        all f32; tf32: kept so, with a device's products in TF32 (spec/tf32.h)
//   bf16       parameters and activations bf16; gradients, moments and the weights that parameters round f32
//              (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740; Kalamkar et al. 2019,
//              https://arxiv.org/abs/1905.12322)
//   bf16-lean  parameters, which are all there is of the weights, moments and activations bf16; gradients f32
//   fp8        kept as in bf16, with operands of layers' products in fp8 (spec/fp8.h)
//
// Statistics are f32 in the last three.
const std::vector<std::string>& recipe_names();
const PrecisionRecipe& recipe(const std::string& name);  // InvariantError when there is none

// RequestError naming `field`, the value and the legal names.
const PrecisionRecipe& parse_recipe(const std::string& text, const std::string& field);
// In which weights of this dtype are trained and computed with: f64, f32, or bf16-lean.
const PrecisionRecipe& recipe_of_weights(DType weights);
const std::string& recipe_name(const PrecisionRecipe& recipe);

}  // namespace echelon
