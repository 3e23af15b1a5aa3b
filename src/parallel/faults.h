#pragma once

namespace echelon {

// Deliberate errors, with which tests show that `verify` catches each of them. No flag sets these.
struct Faults {
  bool forget_norm_reduction = false;  // sequence parallelism without the all_reduce of norm gradients
  double loss_scale = 1.0;             // factor of the loss's gradient
  // ZeRO: all ranks of a block but the first take their shards to start this much later.
  int shard_shift = 0;
  // All ranks but the first take their vocabulary rows to start this much later.
  int vocabulary_shift = 0;
  bool narrow_gradients = false;  // accumulates gradients in bf16
  double router_bias = 0;         // selection bias of the first expert in every router
};

}  // namespace echelon
