// The optimizers' passes of the CPU kernels: SIMD over pieces of a parameter, which threads share.
#pragma once

#include "tensor/kernels.h"
#include "tensor/thread_team.h"

namespace echelon {

// Like Kernels::adamw, with shapes already checked; p, m and v are f32, or bf16. The bits do not depend on
// the team.
void adamw_by_team(const Tensor& p, const Tensor& g, const Tensor& m, const Tensor& v, const AdamWStep& step,
                   const Tensor& remainder, const ThreadTeam& team);
// Like Kernels::momentum and Kernels::step_weights; p and m are f32, or bf16, and so is the update.
void momentum_by_team(const Tensor& g, const Tensor& m, const Tensor& update, const MomentumStep& step,
                      const ThreadTeam& team);
void step_weights_by_team(const Tensor& p, const Tensor& update, const WeightStep& step,
                          const Tensor& remainder, const ThreadTeam& team);

}  // namespace echelon
