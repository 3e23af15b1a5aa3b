#include "plan/memory.h"

#include <algorithm>

#include "spec/flat_layout.h"

namespace echelon {
namespace {

// Counts what is live while the walk below allocates and frees as the layers do.
class Account {
 public:
  void allocate(std::int64_t bytes) { peak_ = std::max(peak_, live_ += bytes); }
  void free(std::int64_t bytes) { live_ -= bytes; }
  std::int64_t peak() const { return peak_; }

 private:
  std::int64_t live_ = 0, peak_ = 0;
};

// Sizes in bytes of what one rank allocates: tokens and targets of all its samples, and what the layers need for a microbatch
// of `sequences`.
struct Sizes {
  Sizes(const Plan& plan, std::int64_t samples, std::int64_t sequences, int tp_rank) {
    const ModelSpec& m = plan.model;
    const int tp = plan.mesh.size(Axis::tp);
    const std::int64_t e = element_bytes(plan.dtype), rows = sequences * plan.seq_len;
    sequence_parallel = plan.shards_sequence();
    learned_positions = swiglu = false;
    (m.family == Family::gpt2 ? learned_positions : swiglu) = true;
    const std::int64_t here = sequence_parallel ? split_range(rows, tp, tp_rank).size() : rows;
    const std::int64_t heads = m.num_heads / tp, kv_heads = m.num_kv_heads >= tp ? m.num_kv_heads / tp : 1;
    const std::int64_t mlp = split_range(m.mlp_hidden, tp, tp_rank).size();
    const std::int64_t chunk = std::min<std::int64_t>(rows, logits_chunk_rows);
    ids = 2 * 4 * samples * plan.seq_len;
    position_ids = here * 4;
    residual = here * m.hidden * e;
    whole = rows * m.hidden * e;
    stats = here * (m.family == Family::gpt2 ? 2 : 1) * e;
    qkv = rows * (heads + 2 * kv_heads) * m.head_dim * e;
    attended = rows * heads * m.head_dim * e;
    lse = rows * heads * e;
    activated = rows * mlp * e;
    hidden = activated * (swiglu ? 2 : 1);
    logits = chunk * split_range(m.vocab, tp, tp_rank).size() * e;
    row_vector = chunk * e;
  }
  bool sequence_parallel, learned_positions, swiglu;
  std::int64_t ids, position_ids, residual, whole, stats, qkv, attended, lse, hidden, activated, logits,
      row_vector;
};

// The walk follows Stage, TransformerBlock and OutputHead line by line; "kept" is what outlives the function.
class StepWalk {
 public:
  explicit StepWalk(const Sizes& sizes) : s_(sizes) {}

  std::int64_t peak(std::int64_t layers) {
    a_.allocate(s_.ids);
    embed();
    for (std::int64_t i = 0; i < layers; ++i) block_forward();
    head();
    for (std::int64_t i = 0; i < layers; ++i) block_backward();
    embed_backward();
    return a_.peak();
  }

 private:
  // Under sequence parallelism a collective brings a new tensor of the other size; otherwise the same one
  // goes on.
  void residual_to_whole() {
    if (s_.sequence_parallel) a_.allocate(s_.whole), a_.free(s_.residual);
  }
  void whole_to_residual() {
    if (s_.sequence_parallel) a_.allocate(s_.residual), a_.free(s_.whole);
  }

  void embed() {  // keeps the residual stream
    a_.allocate(s_.whole);
    whole_to_residual();
    if (s_.learned_positions) {
      a_.allocate(s_.residual + s_.position_ids);
      a_.free(s_.residual + s_.position_ids);
    }
  }

  void normed_input() {  // norm and enter: keeps the whole input of a column-parallel product
    a_.allocate(s_.stats);
    a_.allocate(s_.residual);
    residual_to_whole();
  }

  void block_forward() {
    normed_input();
    a_.allocate(s_.qkv);
    if (!s_.sequence_parallel) a_.free(s_.whole);
    a_.allocate(s_.attended);
    a_.allocate(s_.lse);
    a_.allocate(s_.whole);
    whole_to_residual();
    normed_input();
    a_.allocate(s_.hidden);
    if (!s_.sequence_parallel) a_.free(s_.whole);
    a_.allocate(s_.activated);
    a_.allocate(s_.whole);
    a_.free(s_.activated);
    whole_to_residual();
  }

  void head() {
    a_.allocate(s_.residual);  // dx, kept
    normed_input();
    a_.allocate(s_.whole);  // its gradient
    a_.allocate(s_.logits + 3 * s_.row_vector);
    a_.free(s_.logits + 3 * s_.row_vector);
    a_.free(s_.whole);  // the normed input
    whole_to_residual();
    a_.free(s_.residual + s_.stats);
    a_.free(s_.residual);  // the last block's output
  }

  // The gradient of a row-parallel product's output, over all rows.
  void leave_backward() {
    if (s_.sequence_parallel) a_.allocate(s_.whole);
  }
  void free_left() {
    if (s_.sequence_parallel) a_.free(s_.whole);
  }

  // Input gradient of a column-parallel product whose output gradient takes `d_out`, which goes; keeps
  // nothing but that the norm's saved input and stats go too.
  void enter_backward(std::int64_t d_out) {
    a_.allocate(s_.whole);
    a_.allocate(s_.residual);  // the reduced gradient, or the norm's output computed again
    if (s_.sequence_parallel)
      a_.free(s_.whole);  // the norm's output, saved
    else
      a_.free(s_.residual);
    a_.free(d_out);
    if (s_.sequence_parallel) a_.free(s_.whole);  // replaced by the reduced gradient
    a_.free(s_.residual + s_.residual + s_.stats);
  }

  void block_backward() {
    leave_backward();
    a_.allocate(s_.activated);
    a_.free(s_.swiglu ? s_.activated : s_.hidden);  // the activation's output, once used
    free_left();
    enter_backward(s_.hidden);
    leave_backward();
    a_.allocate(s_.attended);
    free_left();
    a_.allocate(s_.qkv);
    a_.free(s_.qkv + 2 * s_.attended + s_.lse);
    enter_backward(s_.qkv);
  }

  void embed_backward() {
    if (s_.learned_positions) {
      a_.allocate(s_.position_ids);
      a_.free(s_.position_ids);
    }
    leave_backward();
    free_left();
  }

  const Sizes& s_;
  Account a_;
};

}  // namespace

std::int64_t local_parameters(const Plan& plan, int tp_rank) {
  return flat_layout(layer_groups(plan.model), plan.mesh.size(Axis::tp), tp_rank).size();
}

Memory predict_memory(const Plan& plan, int dp_rank, int tp_rank) {
  Memory memory;
  const std::int64_t state = local_parameters(plan, tp_rank) * element_bytes(plan.dtype);
  memory[MemoryCategory::parameters] = state;
  memory[MemoryCategory::gradients] = state;
  memory[MemoryCategory::optimizer] = 2 * state;
  // The first microbatch is the largest.
  const Sizes sizes(plan, dp_samples(plan, dp_rank).size(), microbatches(plan, dp_rank).front().size(), tp_rank);
  memory[MemoryCategory::activations] = StepWalk(sizes).peak(plan.model.num_layers);
  return memory;
}

}  // namespace echelon
