// Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): a layer's matrix moves along its
// momentum made nearly orthogonal, that is with all singular values near 1, whatever they were. With U S V^T
// = g + mu m, five Newton-Schulz iterations make about U V^T of it, in matrix products alone:
//
//   X = (g + mu m) / max(|g + mu m|, 1e-7);   five times: A = X X^T, X = a X + (b A + c A^2) X
//
// and the step is lr times 0.2 sqrt(max(rows, cols)) X: as large as AdamW's steps mostly are, so that one
// learning rate and weight decay serve both (Liu et al. 2025, https://arxiv.org/abs/2502.16982).
//
// An iteration needs the whole matrix, and each rank keeps its part of weight and momentum, as with AdamW.
// Matrices are made whole in rounds (spec/optimizer.h), as many at once as there are ranks among which ZeRO
// and tp cut them: all-to-alls bring each rank the parts of one matrix, in its logical order, and take the
// parts of its step back. So ranks that share state or a layer share the products too, and a rank sends about
// twice its own part, in the type of activations. The bits of a step do not depend on how matrices are cut.
// Without ZeRO each data-parallel rank makes all of them, and nothing travels along dp.
#pragma once

#include "train/optimizer.h"

namespace echelon {

inline constexpr double muon_momentum = 0.95;
// A matrix of a smaller norm is divided by this: noise of vanished gradients is no direction (as in torch).
inline constexpr double muon_least_norm = 1e-7;

// Makes x (rows, cols; f32, f64 or bf16; contiguous) nearly orthogonal in place: U S V^T becomes about U V^T.
// Zeros stay zero. Takes as much memory again and two squares of the shorter side, and waits for the device.
void orthogonalize(Kernels& kernels, Tensor& x);

// What x is multiplied by for a step as large as AdamW's.
double muon_scale(const ParamSpec& spec);

// One step on all elements of matrices that this rank owns (Parameter::is_updated_whole), `updates` steps
// after the first. Collective over tp, and over the ranks that share state.
void muon_step(const Rank& rank, const ParameterStore& parameters, const OptimizerOptions& options,
               double learning_rate, std::int64_t updates, double gradient_scale);

// A bound of how far two results of orthogonalize() lie apart (Frobenius norm) if what they were made of,
// with norm 1 each, lies 1 apart: the largest slope of the iterations' polynomial between 0 and 1, at 0.
// (What an odd function makes of singular values moves no more than its slope allows.)
double orthogonalization_slope();

}  // namespace echelon
