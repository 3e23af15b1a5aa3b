// What the parts of a stage allocate and free for one microbatch, in their order: the twin of
// BlockRunner and OutputHead, line by line.
#pragma once

#include "plan/account.h"
#include "plan/context_costs.h"
#include "plan/expert_costs.h"
#include "spec/plan.h"

namespace echelon {

// Sizes in bytes of what one rank allocates for a microbatch of `sequences`.
struct MicrobatchSizes {
  MicrobatchSizes(const Plan& plan, std::int64_t sequences, const Coordinates& at);
  ContextCosts context;
  ExpertCosts experts;
  std::int64_t residual, whole, stats, qkv, hidden, activated, logits, row_vector;
};

class LayerWalk {
 public:
  // Both outlive this.
  LayerWalk(const Plan& plan, Account& account)
      : sequence_parallel_(plan.shards_sequence()),
        learned_positions_(plan.model.family == Family::gpt2),
        swiglu_(plan.model.family == Family::llama),
        recompute_(plan.recompute),
        a_(account) {}

  // What follows is of this microbatch, and of a layer with experts or without. `sizes` outlives that.
  void set_microbatch(const MicrobatchSizes& sizes) { s_ = &sizes; }
  void set_layer(bool has_experts) { has_experts_ = has_experts; }

  void embed();
  void embed_backward();
  // The passes of a transformer block.
  void forward();
  void backward();
  void backward_input();
  void backward_weight();
  // The output layer, forward and backward.
  void head();

 private:
  enum class Until { hidden, end };
  void forward(bool keep, bool keep_core, Until until);
  void residual_to_whole();
  void whole_to_residual();
  void norm(bool keep);
  void normed_input(bool keep);
  void attend();
  void recompute_layer();
  void recompute_core();
  void attend_backward(bool keep);
  void leave_backward();
  void free_left();
  void gather_input();
  void free_input();
  void reduce_input_gradient();
  void reduced();
  void input_weight(std::int64_t d_out);
  void enter_backward(std::int64_t d_out);
  void enter_backward_input();
  void experts_backward(bool keep);

  bool sequence_parallel_, learned_positions_, swiglu_;
  Recompute recompute_;
  Account& a_;
  const MicrobatchSizes* s_ = nullptr;
  bool has_experts_ = false;
};

}  // namespace echelon
