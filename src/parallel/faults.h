#pragma once

namespace echelon {

// Errors planted on purpose, so that tests can show that `verify` catches each of them. No flag reaches
// these.
struct Faults {
  bool forget_norm_reduction = false;  // sequence parallelism without the all_reduce of norm gradients
  double loss_scale = 1.0;             // the gradient of the loss is this much too large
  // Ranks after the first of a block that shares gradients (ZeRO) believe that theirs start this much later.
  int shard_shift = 0;
  int vocabulary_shift = 0;  // ranks after the first believe that their vocabulary rows start this much later
  bool narrow_gradients = false;  // kept in bf16
  double router_bias = 0;         // every router likes its first expert so much more
};

}  // namespace echelon
