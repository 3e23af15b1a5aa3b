#include "plan/memory.h"

#include <algorithm>

#include "schedule/simulate.h"
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

// Sizes in bytes of what one rank allocates for a microbatch of `sequences`.
struct Sizes {
  Sizes(const Plan& plan, std::int64_t sequences, int tp_rank) {
    const ModelSpec& m = plan.model;
    const int tp = plan.mesh.size(Axis::tp);
    const std::int64_t e = element_bytes(plan.dtype), rows = sequences * plan.seq_len;
    const bool swiglu = m.family == Family::llama;
    const std::int64_t here = plan.shards_sequence() ? split_range(rows, tp, tp_rank).size() : rows;
    const std::int64_t heads = m.num_heads / tp, kv_heads = m.num_kv_heads >= tp ? m.num_kv_heads / tp : 1;
    const std::int64_t mlp = split_range(m.mlp_hidden, tp, tp_rank).size();
    const std::int64_t chunk = std::min<std::int64_t>(rows, logits_chunk_rows);
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
  std::int64_t position_ids, residual, whole, stats, qkv, attended, lse, hidden, activated, logits,
      row_vector;
};

// The walk follows HeldStages, TransformerBlock and OutputHead line by line: it runs the rank's program and
// counts.
class StepWalk {
 public:
  explicit StepWalk(const Plan& plan)
      : sequence_parallel_(plan.shards_sequence()),
        learned_positions_(plan.model.family == Family::gpt2),
        swiglu_(plan.model.family == Family::llama),
        recompute_(plan.recompute) {}

  // One program after another. `sizes` of each microbatch of a step; `ids` bytes of all their tokens and
  // targets.
  void run(const StepPrograms::Program& program, int pp_rank, const std::vector<StageSlice>& slices,
           const std::vector<Sizes>& sizes, std::int64_t ids) {
    const auto count = static_cast<int>(sizes.size());
    for (const Instruction& i : program.lowered->ranks[static_cast<std::size_t>(pp_rank)]) {
      const int microbatch = i.microbatch + program.first_microbatch;
      while (loaded_ * count <= microbatch) {
        a_.allocate(ids);
        ++loaded_;
      }
      s_ = &sizes[static_cast<std::size_t>(microbatch % count)];
      const StageSlice& slice = slices[static_cast<std::size_t>(i.stage)];
      const std::int64_t layers = slice.layers.size();
      switch (i.op) {
        case Op::recv:
          a_.allocate(s_->residual);
          break;
        case Op::send:
          a_.free(s_->residual);
          break;
        case Op::F:
          if (slice.embedding) embed();
          for (std::int64_t layer = 0; layer < layers; ++layer) block_forward();
          break;
        case Op::BW:
          if (slice.head) head();
          for (std::int64_t layer = 0; layer < layers; ++layer) block_backward();
          if (slice.embedding) embed_backward();
          break;
        case Op::B:
          if (slice.head) head();
          for (std::int64_t layer = 0; layer < layers; ++layer) block_backward_input();
          break;
        case Op::W:
          for (std::int64_t layer = 0; layer < layers; ++layer) block_backward_weight();
          if (slice.embedding) embed_backward();
          break;
        case Op::validate:
          break;
        case Op::step:
          // Where there are steps, a rank has one stage: behind a step's last one its tokens go.
          if ((microbatch + 1) % count == 0) a_.free(ids);
          break;
      }
    }
  }
  std::int64_t peak() const { return a_.peak(); }

 private:
  // Under sequence parallelism a collective brings a new tensor of the other size; otherwise the same one
  // goes on.
  void residual_to_whole() {
    if (sequence_parallel_) a_.allocate(s_->whole), a_.free(s_->residual);
  }
  void whole_to_residual() {
    if (sequence_parallel_) a_.allocate(s_->residual), a_.free(s_->whole);
  }

  void embed() {  // keeps the residual stream
    a_.allocate(s_->whole);
    whole_to_residual();
    if (learned_positions_) {
      a_.allocate(s_->residual + s_->position_ids);
      a_.free(s_->residual + s_->position_ids);
    }
  }

  void normed_input() {  // norm and enter: keeps the whole input of a column-parallel product
    a_.allocate(s_->stats);
    a_.allocate(s_->residual);
    residual_to_whole();
  }

  enum class Until { hidden, end };
  // `keep`: what the backward pass needs stays; `keep_core`: attention's output and log-sum-exp too.
  void block_forward(bool keep, bool keep_core, Until until) {
    const bool keep_normed = sequence_parallel_ && keep;
    normed_input();
    a_.allocate(s_->qkv);
    if (!keep_normed) a_.free(s_->whole);
    a_.allocate(s_->attended);
    a_.allocate(s_->lse);
    a_.allocate(s_->whole);
    if (!keep_core) a_.free(s_->attended);
    whole_to_residual();
    normed_input();
    a_.allocate(s_->hidden);
    if (!keep_normed) a_.free(s_->whole);
    if (until == Until::hidden) return;
    a_.allocate(s_->activated);
    a_.allocate(s_->whole);
    a_.free(s_->activated);
    whole_to_residual();
    if (!keep_core) a_.free(s_->lse);
    if (!keep) a_.free(2 * s_->stats + s_->qkv + s_->residual + s_->hidden);
  }
  void block_forward() {
    block_forward(recompute_ != Recompute::full, recompute_ == Recompute::none, Until::end);
  }
  // What the backward pass computes again before the MLP, and before attention.
  void recompute_layer() {
    if (recompute_ == Recompute::full) block_forward(true, true, Until::hidden);
  }
  void recompute_core() {
    if (recompute_ != Recompute::selective) return;
    a_.allocate(s_->attended);
    a_.allocate(s_->lse);
  }

  void head() {
    a_.allocate(s_->residual);  // dx, kept
    normed_input();
    a_.allocate(s_->whole);  // its gradient
    a_.allocate(s_->logits + 3 * s_->row_vector);
    a_.free(s_->logits + 3 * s_->row_vector);
    a_.free(s_->whole);  // the normed input
    whole_to_residual();
    a_.free(s_->residual + s_->stats);
    a_.free(s_->residual);  // the last block's output
  }

  // The gradient of a row-parallel product's output, over all rows.
  void leave_backward() {
    if (sequence_parallel_) a_.allocate(s_->whole);
  }
  void free_left() {
    if (sequence_parallel_) a_.free(s_->whole);
  }

  // Input gradient of a column-parallel product whose output gradient takes `d_out`, which goes; keeps
  // nothing but that the norm's saved input and stats go too.
  void enter_backward(std::int64_t d_out) {
    a_.allocate(s_->whole);
    a_.allocate(s_->residual);  // the reduced gradient, or the norm's output computed again
    if (sequence_parallel_)
      a_.free(s_->whole);  // the norm's output, saved
    else
      a_.free(s_->residual);
    a_.free(d_out);
    if (sequence_parallel_) a_.free(s_->whole);  // replaced by the reduced gradient
    a_.free(s_->residual + s_->residual + s_->stats);
  }

  void block_backward() {
    recompute_layer();
    leave_backward();
    a_.allocate(s_->activated);
    a_.free(swiglu_ ? s_->activated : s_->hidden);  // the activation's output, once used
    free_left();
    enter_backward(s_->hidden);
    leave_backward();
    recompute_core();
    a_.allocate(s_->attended);
    free_left();
    a_.allocate(s_->qkv);
    a_.free(s_->qkv + 2 * s_->attended + s_->lse);
    enter_backward(s_->qkv);
  }

  // As above, but what the weight gradients need stays, and the residual branch's gradient is a copy.
  void enter_backward_input() {
    a_.allocate(s_->whole);
    a_.allocate(s_->residual);  // the reduced gradient, or the norm's output computed again, which stays
    if (sequence_parallel_) a_.free(s_->whole);
    a_.allocate(s_->residual);  // the copy
    a_.free(s_->residual + s_->residual + s_->stats);
  }

  void block_backward_input() {
    recompute_layer();
    leave_backward();
    a_.allocate(s_->activated);
    enter_backward_input();
    leave_backward();
    recompute_core();
    a_.allocate(s_->attended);
    a_.allocate(s_->qkv);
    a_.free(s_->qkv + s_->attended + s_->lse);
    enter_backward_input();
    // Where the products' gradients are tensors of their own, the residual branch's go.
    if (sequence_parallel_) a_.free(2 * s_->residual);
  }

  void block_backward_weight() {
    a_.free(4 * s_->whole + s_->hidden + s_->activated + s_->attended + s_->qkv);
  }

  void embed_backward() {  // the gradient of the embedding's result goes
    if (learned_positions_) {
      a_.allocate(s_->position_ids);
      a_.free(s_->position_ids);
    }
    leave_backward();
    free_left();
    a_.free(s_->residual);
  }

  bool sequence_parallel_, learned_positions_, swiglu_;
  Recompute recompute_;
  const Sizes* s_ = nullptr;
  int loaded_ = 0;  // steps whose tokens are there, or were
  Account a_;
};

}  // namespace

Memory predict_memory(const Plan& plan, const PipelineLayout& pipeline, int dp_rank, int tp_rank,
                      int pp_rank) {
  const int tp = plan.mesh.size(Axis::tp);
  const std::int64_t e = element_bytes(plan.dtype);
  const std::vector<Range> batches = microbatches(plan, dp_rank);
  Memory memory;
  const std::int64_t state = flat_layout(pipeline.groups_of(pp_rank), tp, tp_rank).size() * e;
  const StepPrograms& programs = pipeline.programs(dp_rank);
  memory[MemoryCategory::parameters] =
      state * weight_versions(programs.schedule())[static_cast<std::size_t>(pp_rank)];
  if (!plan.optimizer_barrier) memory[MemoryCategory::parameters] += state;  // those of a guessed step
  memory[MemoryCategory::gradients] = state;
  memory[MemoryCategory::optimizer] = 2 * state;
  if (!plan.optimizer_barrier) memory[MemoryCategory::optimizer] += 2 * guessed_moments * e;
  if (pipeline.ties_on(pp_rank) && batches.size() > 1)  // the output layer's part of a tied gradient
    memory[MemoryCategory::gradients] +=
        local_numel(embedding_parameters(plan.model).front(), tp, tp_rank) * e;

  std::vector<Sizes> sizes;
  for (const Range& batch : batches) sizes.emplace_back(plan, batch.size(), tp_rank);
  StepWalk walk(plan);
  for (int step = 0; step < programs.shown_steps(); ++step)
    walk.run(programs.program(step, programs.shown_steps() - step), pp_rank, pipeline.slices(), sizes,
             2 * 4 * dp_samples(plan, dp_rank).size() * plan.seq_len);
  const std::int64_t activations = walk.peak();
  // Another rank's part of the gradient of a parameter that two pipeline ranks hold arrives when the pipeline
  // is empty.
  std::int64_t copy = 0;
  for (const auto& group : pipeline.groups_of(pp_rank))
    for (const ParamSpec& spec : group)
      if (pipeline.holders_of(spec.name).size() > 1)
        copy = std::max(copy, local_numel(spec, tp, tp_rank) * e);
  memory[copy > activations ? MemoryCategory::communication : MemoryCategory::activations] =
      std::max(copy, activations);
  return memory;
}

}  // namespace echelon
