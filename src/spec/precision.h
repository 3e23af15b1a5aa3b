// The dtype in which a training run keeps each kind of number. Plain data: kernels follow the dtypes of their
// tensors.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "spec/dtype.h"

namespace echelon {

struct PrecisionRecipe {
  PrecisionRecipe() = default;
  PrecisionRecipe(DType all);  // f32 or f64 for everything
  std::string name = "f32";
  DType parameters = DType::f32;   // what layers compute with
  // Of the weights that the optimizer updates; the parameters are these weights, or their roundings.
  DType master = DType::f32;
  DType gradients = DType::f32;    // of parameters, summed over microbatches
  DType moments = DType::f32;      // of the optimizer
  DType activations = DType::f32;  // and their gradients
  // Statistics of norms, log-sum-exp, losses, logits of tokens and routers, and all sums of these over ranks.
  DType statistics = DType::f32;

  bool operator==(const PrecisionRecipe&) const = default;

  // Parameters are wider weights rounded; the rounding errors are kept beside them (base/split_weight.h).
  bool has_master() const { return master != parameters; }
  // The weights exist only as narrow parameters, so each step rounds them stochastically (Kernels::adamw).
  bool rounds_stochastically() const { return !has_master() && parameters != wide(parameters); }
};

// The recipes, in the order in which users see them:
//   f64        all f64, on the reference kernels
//   f32        all f32
//   tf32       stored as f32, with the device's products in TF32 (spec/tf32.h)
//   bf16       parameters and activations bf16; gradients, moments and master weights f32
//              (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740; Kalamkar et al. 2019,
//              https://arxiv.org/abs/1905.12322)
//   bf16-lean  parameters, moments and activations bf16, no master weights; gradients f32
//   fp8        stored as bf16, with the operands of layers' products in fp8 (spec/fp8.h)
//
// Statistics are f32 in the last three.
const std::vector<std::string>& recipe_names();
const PrecisionRecipe& recipe(std::string_view name);  // InvariantError if there is none

// RequestError naming `field`, the value and the legal names.
const PrecisionRecipe& parse_recipe(const std::string& text, const std::string& field);
// The recipe that keeps and computes with weights of this dtype: f64, f32 or bf16-lean.
const PrecisionRecipe& recipe_of_weights(DType weights);
const std::string& recipe_name(const PrecisionRecipe& recipe);

}  // namespace echelon
