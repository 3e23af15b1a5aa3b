#include "plan/layer_walk.h"

#include <algorithm>

namespace echelon {

MicrobatchSizes::MicrobatchSizes(const Plan& plan, std::int64_t sequences, const Coordinates& at)
    : context(plan, sequences, at), experts(plan, sequences, at) {
  const ModelSpec& m = plan.model;
  const int tp = plan.mesh.size(Axis::tp);
  const std::int64_t e = element_bytes(plan.dtype), rows = sequences * plan.tokens_here();
  const bool swiglu = m.family == Family::llama;
  const std::int64_t here = plan.shards_sequence() ? split_range(rows, tp, at.tp).size() : rows;
  const std::int64_t heads = m.num_heads / tp, kv_heads = m.num_kv_heads >= tp ? m.num_kv_heads / tp : 1;
  const std::int64_t mlp = split_range(m.mlp_hidden, tp, at.tp).size();
  const std::int64_t chunk = std::min<std::int64_t>(rows, logits_chunk_rows);
  residual = here * m.hidden * e;
  whole = rows * m.hidden * e;
  stats = here * (m.family == Family::gpt2 ? 2 : 1) * e;
  qkv = rows * (heads + 2 * kv_heads) * m.head_dim * e;
  activated = rows * mlp * e;
  hidden = activated * (swiglu ? 2 : 1);
  logits = chunk * split_range(m.vocab, tp, at.tp).size() * e;
  row_vector = chunk * e;
}

// Under sequence parallelism a collective brings a new tensor of the other size; otherwise the same one
// goes on.
void LayerWalk::residual_to_whole() {
  if (sequence_parallel_) a_.allocate(s_->whole), a_.free(s_->residual);
}

void LayerWalk::whole_to_residual() {
  if (sequence_parallel_) a_.allocate(s_->residual), a_.free(s_->whole);
}

void LayerWalk::embed() {  // keeps the residual stream
  a_.allocate(s_->whole);
  whole_to_residual();
  if (learned_positions_) {
    a_.allocate(s_->residual);
    a_.free(s_->residual);
  }
}

void LayerWalk::norm(bool keep) {
  a_.allocate(s_->stats);
  a_.allocate(s_->residual);
  if (!keep) a_.free(s_->stats);
}

void LayerWalk::normed_input(
    bool keep) {  // norm and enter: keeps the whole input of a column-parallel product
  norm(keep);
  residual_to_whole();
}

// `keep`: what the backward pass needs stays; `keep_core`: attention's output and log-sum-exp too.
void LayerWalk::forward(bool keep, bool keep_core, Until until) {
  normed_input(keep);
  a_.allocate(s_->qkv);
  a_.free(s_->whole);
  s_->context.enter(a_);
  attend();
  if (!keep) a_.free(s_->context.core());
  if (!keep_core) a_.free(s_->context.lse());
  a_.allocate(s_->whole);
  if (!keep_core) a_.free(s_->context.attended());
  whole_to_residual();
  norm(keep);
  if (has_experts_) s_->experts.route(a_);
  residual_to_whole();
  if (has_experts_)
    s_->experts.in_forward(a_);
  else
    a_.allocate(s_->hidden);
  a_.free(s_->whole);
  if (until == Until::hidden) return;
  if (has_experts_) {
    s_->experts.out_forward(a_);
    if (!keep) a_.free(s_->experts.saved());
  } else {
    a_.allocate(s_->activated);
    if (!keep) a_.free(s_->hidden);
    a_.allocate(s_->whole);
    a_.free(s_->activated);
  }
  whole_to_residual();
  if (!keep) a_.free(s_->residual);
}

void LayerWalk::attend() {
  a_.allocate(s_->context.attended());
  a_.allocate(s_->context.lse());
  s_->context.forward(a_);
}

void LayerWalk::forward() {
  forward(recompute_ != Recompute::full, recompute_ == Recompute::none, Until::end);
}

// What the backward pass computes again before the MLP, and before attention.
void LayerWalk::recompute_layer() {
  if (recompute_ == Recompute::full) forward(true, true, Until::hidden);
}

void LayerWalk::recompute_core() {
  if (recompute_ == Recompute::selective) attend();
}

// Attention from the gradient of its output to that of [q | k | v], which stays. `keep`: what the weight
// gradient of the product after it needs stays.
void LayerWalk::attend_backward(bool keep) {
  const ContextCosts& context = s_->context;
  a_.allocate(context.attended());
  if (!keep) free_left();
  a_.allocate(context.lse());  // delta
  if (!keep) a_.free(context.attended());
  a_.allocate(s_->qkv);
  context.backward(a_);
  a_.free(context.core() + context.lse());
}

void LayerWalk::head() {
  a_.allocate(s_->residual);  // dx, kept
  normed_input(true);
  a_.allocate(s_->whole);  // its gradient
  a_.allocate(s_->logits + 3 * s_->row_vector);
  a_.free(s_->logits + 3 * s_->row_vector);
  a_.free(s_->whole);  // the normed input
  whole_to_residual();
  a_.free(s_->residual + s_->stats);
  a_.free(s_->residual);  // the last block's output
}

// The gradient of a row-parallel product's output, over all rows.
void LayerWalk::leave_backward() {
  if (sequence_parallel_) a_.allocate(s_->whole);
}

void LayerWalk::free_left() {
  if (sequence_parallel_) a_.free(s_->whole);
}

// The input of a column-parallel product, of which the rows here are there: gathered, and let go of.
void LayerWalk::gather_input() {
  if (sequence_parallel_) a_.allocate(s_->whole);
}

void LayerWalk::free_input() { a_.free(s_->residual + (sequence_parallel_ ? s_->whole : 0)); }

// Both gradients of a column-parallel product whose output gradient takes `d_out`, which goes; keeps nothing
// but the gradient of the norm's output. Its saved input and stats go too.
void LayerWalk::enter_backward(std::int64_t d_out) {
  a_.allocate(s_->residual);  // the norm's output computed again
  gather_input();
  reduce_input_gradient();
  free_input();
  a_.free(d_out);
  reduced();
  a_.free(s_->residual + s_->residual + s_->stats);
}

// Its gradient over all rows, and the sum over tp; then that alone.
void LayerWalk::reduce_input_gradient() {
  a_.allocate(s_->whole);
  if (sequence_parallel_) a_.allocate(s_->residual);
}

void LayerWalk::reduced() {
  if (sequence_parallel_) a_.free(s_->whole);
}

void LayerWalk::backward() {
  recompute_layer();
  if (has_experts_) {
    experts_backward(false);
  } else {
    leave_backward();
    a_.allocate(s_->activated);
    a_.free(swiglu_ ? s_->activated : s_->hidden);  // the activation's output, once used
    free_left();
    enter_backward(s_->hidden);
  }
  leave_backward();
  recompute_core();
  attend_backward(false);
  enter_backward(s_->qkv);
}

// As above, but what the weight gradients need stays, and the residual branch's gradient is a copy.
void LayerWalk::enter_backward_input() {
  a_.allocate(s_->residual);  // the norm's output computed again, which stays
  reduce_input_gradient();
  reduced();
  a_.allocate(s_->residual);  // the copy
  a_.free(s_->residual + s_->residual + s_->stats);
}

void LayerWalk::backward_input() {
  recompute_layer();
  if (has_experts_) {
    experts_backward(true);
  } else {
    leave_backward();
    a_.allocate(s_->activated);
    enter_backward_input();
  }
  leave_backward();
  recompute_core();
  attend_backward(true);
  enter_backward_input();
  // Where the products' gradients are tensors of their own, the residual branch's go.
  if (sequence_parallel_)
    a_.free(2 * s_->residual);
  else if (has_experts_ && !s_->experts.shared())
    a_.free(s_->residual);
}

// A mixture's, with the norm in front of it. `keep`: what the weights' gradients need stays.
void LayerWalk::experts_backward(bool keep) {
  leave_backward();
  s_->experts.backward_input(a_, keep);
  if (!keep || !s_->experts.shared()) free_left();
  if (sequence_parallel_) a_.allocate(s_->residual);  // the reduced gradient
  a_.allocate(s_->residual);                          // the norm's output computed again
  s_->experts.in_backward_weight(a_, keep);
  reduced();
  s_->experts.route_backward(a_, keep);
  if (!keep) a_.free(s_->residual);     // the norm's output
  if (keep) a_.allocate(s_->residual);  // the copy of the residual branch's gradient
  a_.free(s_->residual + s_->residual + s_->stats);
}

void LayerWalk::backward_weight() {
  // The MLP's, then attention's.
  if (has_experts_) {
    s_->experts.backward_weight(a_);
  } else {
    a_.free(s_->whole + s_->activated);
    input_weight(s_->hidden);
  }
  a_.free(s_->whole + s_->context.attended());
  input_weight(s_->qkv);
}

// The deferred weight gradient of a column-parallel product.
void LayerWalk::input_weight(std::int64_t d_out) {
  gather_input();
  free_input();
  a_.free(d_out);
}

void LayerWalk::embed_backward() {  // the gradient of the embedding's result goes
  leave_backward();
  free_left();
  a_.free(s_->residual);
}

}  // namespace echelon
