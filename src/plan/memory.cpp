#include "plan/memory.h"

#include <algorithm>
#include <span>

#include "plan/account.h"
#include "plan/context_costs.h"
#include "plan/expert_costs.h"
#include "plan/zero_walk.h"
#include "schedule/group_uses.h"
#include "schedule/simulate.h"
#include "spec/reduction_buckets.h"
#include "spec/shard_layout.h"

namespace echelon {
namespace {

// Sizes in bytes of what one rank allocates for a microbatch of `sequences`.
struct Sizes {
  Sizes(const Plan& plan, std::int64_t sequences, const Coordinates& at)
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
  ContextCosts context;
  ExpertCosts experts;
  std::int64_t residual, whole, stats, qkv, hidden, activated, logits, row_vector;
};

// The walk follows HeldStages, TransformerBlock and OutputHead line by line: it runs the rank's program and
// counts.
class StepWalk {
 public:
  StepWalk(const Plan& plan, const PipelineLayout& pipeline, int pp_rank, Account& account, ZeroWalk& zero)
      : pipeline_(pipeline),
        pp_rank_(pp_rank),
        sequence_parallel_(plan.shards_sequence()),
        learned_positions_(plan.model.family == Family::gpt2),
        swiglu_(plan.model.family == Family::llama),
        recompute_(plan.recompute),
        interleaves_pairs_(interleaves_pairs(plan)),
        model_(&plan.model),
        a_(account),
        zero_(zero) {}

  // One program after another. `sizes` of each microbatch of a step; `ids` bytes of all their tokens,
  // targets and positions.
  void run(const StepPrograms::Program& program, const std::vector<Sizes>& sizes, std::int64_t ids) {
    sizes_ = &sizes;
    ids_ = ids;
    zero_.begin_step(group_uses(pipeline_, program, pp_rank_));
    std::vector<Instruction> list = program.lowered->ranks[static_cast<std::size_t>(pp_rank_)];
    for (Instruction& i : list) i.microbatch += program.first_microbatch;
    for (std::size_t k = 0; k < list.size(); ++k) {
      const std::size_t first = k;
      if (interleaves_pairs_)
        while (list[k].overlaps_next) ++k;
      if (k == first)
        execute(list[k]);
      else
        execute_together({&list[first], k + 1 - first});
    }
  }
  // Where the schedule flushes, after its program: `copies` are the sizes of what arrives of gradients that
  // another pipeline rank holds as well.
  void end_step(std::int64_t ids, const std::vector<std::int64_t>& copies) {
    a_.free(ids);
    for (std::int64_t bytes : copies) {
      a_.allocate(bytes, MemoryCategory::communication);
      a_.free(bytes, MemoryCategory::communication);
    }
    zero_.end_step();
  }

 private:
  void execute(const Instruction& i) {
    const auto count = static_cast<int>(sizes_->size());
    while (loaded_ * count <= i.microbatch) {
      a_.allocate(ids_);
      ++loaded_;
    }
    s_ = &(*sizes_)[static_cast<std::size_t>(i.microbatch % count)];
    const StageSlice& slice = pipeline_.slices()[static_cast<std::size_t>(i.stage)];
    const auto in_layer = [&](int group, int first) {
      has_experts_ = model_->has_experts(slice.layers.begin + group - first);
    };
    const StageGroups g = is_compute(i.op) ? stage_groups(pipeline_, pp_rank_, i.stage) : StageGroups{};
    switch (i.op) {
      case Op::recv:
        a_.allocate(s_->residual);
        break;
      case Op::send:
        a_.free(s_->residual);
        break;
      case Op::F:
        if (slice.embedding) using_group(g.first, [&] { embed(); });
        for (int group = g.block; group < g.end; ++group) {
          in_layer(group, g.block);
          using_group(group, [&] { block_forward(); });
        }
        break;
      case Op::BW:
        if (slice.head) head(i.stage, g);
        for (int group = g.end; group-- > g.block;) {
          in_layer(group, g.block);
          using_group(group, [&] { adding_gradients(i.stage, group, [&] { block_backward(); }); });
        }
        if (slice.embedding) adding_gradients(i.stage, g.first, [&] { embed_backward(); });
        break;
      case Op::B:
        if (slice.head) head(i.stage, g);
        for (int group = g.end; group-- > g.block;) {
          in_layer(group, g.block);
          using_group(group, [&] { block_backward_input(); });
        }
        break;
      case Op::W:
        for (int group = g.end; group-- > g.block;) {
          in_layer(group, g.block);
          adding_gradients(i.stage, group, [&] { block_backward_weight(); });
        }
        if (slice.embedding) adding_gradients(i.stage, g.first, [&] { embed_backward(); });
        break;
      case Op::validate:
        break;
      case Op::step:
        // Where there are steps, a rank has one stage: behind a step's last one its tokens go.
        if ((i.microbatch + 1) % count == 0) a_.free(ids_);
        break;
    }
  }
  // As PipelineExecutor does.
  void execute_together(std::span<const Instruction> list) {
    const auto messages = [&](Op op) {
      for (const Instruction& i : list)
        if (i.op == op) execute(i);
    };
    messages(Op::recv);
    std::vector<Account::Recording> parts;
    for (const Instruction& i : list)
      if (is_compute(i.op)) parts.push_back(a_.record([&] { execute(i); }));
    a_.count_together(parts);
    messages(Op::send);
  }

  template <class Body>
  void using_group(int group, const Body& body) {
    zero_.use(group);
    body();
    zero_.done();
  }
  template <class Body>
  void adding_gradients(int stage, int group, const Body& body) {
    zero_.need_gradients(group);
    body();
    zero_.group_done(stage, group);
  }

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
      a_.allocate(s_->residual);
      a_.free(s_->residual);
    }
  }

  void norm() {
    a_.allocate(s_->stats);
    a_.allocate(s_->residual);
  }
  void normed_input() {  // norm and enter: keeps the whole input of a column-parallel product
    norm();
    residual_to_whole();
  }

  enum class Until { hidden, end };
  // `keep`: what the backward pass needs stays; `keep_core`: attention's output and log-sum-exp too.
  void block_forward(bool keep, bool keep_core, Until until) {
    const bool keep_normed = sequence_parallel_ && keep;
    normed_input();
    a_.allocate(s_->qkv);
    if (!keep_normed) a_.free(s_->whole);
    s_->context.enter(a_);
    attend();
    a_.allocate(s_->whole);
    if (!keep) a_.free(s_->context.core());
    if (!keep_core) a_.free(s_->context.attended() + s_->context.lse());
    whole_to_residual();
    norm();
    if (has_experts_) s_->experts.route(a_);
    residual_to_whole();
    if (has_experts_)
      s_->experts.in_forward(a_);
    else
      a_.allocate(s_->hidden);
    if (!keep_normed) a_.free(s_->whole);
    if (until == Until::hidden) return;
    if (has_experts_) {
      s_->experts.out_forward(a_);
    } else {
      a_.allocate(s_->activated);
      a_.allocate(s_->whole);
      a_.free(s_->activated);
    }
    whole_to_residual();
    if (!keep) a_.free(2 * s_->stats + s_->residual + (has_experts_ ? s_->experts.saved() : s_->hidden));
  }
  void attend() {
    a_.allocate(s_->context.attended());
    a_.allocate(s_->context.lse());
    s_->context.forward(a_);
  }
  void block_forward() {
    block_forward(recompute_ != Recompute::full, recompute_ == Recompute::none, Until::end);
  }
  // What the backward pass computes again before the MLP, and before attention.
  void recompute_layer() {
    if (recompute_ == Recompute::full) block_forward(true, true, Until::hidden);
  }
  void recompute_core() {
    if (recompute_ == Recompute::selective) attend();
  }
  // Attention from the gradient of its output to that of [q | k | v], which stays. `keep`: what the weight
  // gradient of the product behind it needs stays.
  void attend_backward(bool keep) {
    const ContextCosts& context = s_->context;
    a_.allocate(context.attended());
    if (!keep) free_left();
    a_.allocate(context.lse());  // delta
    if (!keep) a_.free(context.attended());
    a_.allocate(s_->qkv);
    context.backward(a_);
    a_.free(context.core() + context.lse());
  }

  void head(int stage, const StageGroups& g) {
    using_group(g.output, [&] {
      zero_.need_output_gradient(g.output);
      head();
      zero_.group_done(stage, g.end);
    });
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
  void enter_backward_input() {
    a_.allocate(s_->whole);
    a_.allocate(s_->residual);  // the reduced gradient, or the norm's output computed again, which stays
    if (sequence_parallel_) a_.free(s_->whole);
    a_.allocate(s_->residual);  // the copy
    a_.free(s_->residual + s_->residual + s_->stats);
  }

  void block_backward_input() {
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
  void experts_backward(bool keep) {
    leave_backward();
    s_->experts.backward_input(a_, keep);
    if (!keep || !s_->experts.shared()) free_left();
    // The reduced gradient, or the norm's output computed again.
    a_.allocate(s_->residual);
    s_->experts.in_backward_weight(a_, keep);
    if (sequence_parallel_) a_.free(s_->whole);  // the gradient that was reduced
    s_->experts.route_backward(a_, keep);
    if (!keep) a_.free(sequence_parallel_ ? s_->whole : s_->residual);  // the norm's output
    if (keep) a_.allocate(s_->residual);  // the copy of the residual branch's gradient
    a_.free(s_->residual + s_->residual + s_->stats);
  }

  void block_backward_weight() {
    // The MLP's, then attention's.
    if (has_experts_) {
      s_->experts.backward_weight(a_);
    } else {
      a_.free(2 * s_->whole + s_->hidden + s_->activated);
    }
    a_.free(2 * s_->whole + s_->context.attended() + s_->qkv);
  }

  void embed_backward() {  // the gradient of the embedding's result goes
    if (learned_positions_) {
    }
    leave_backward();
    free_left();
    a_.free(s_->residual);
  }

  const PipelineLayout& pipeline_;
  int pp_rank_;
  bool sequence_parallel_, learned_positions_, swiglu_;
  Recompute recompute_;
  bool interleaves_pairs_;
  const ModelSpec* model_;
  bool has_experts_ = false;  // the layer at hand
  const std::vector<Sizes>* sizes_ = nullptr;
  std::int64_t ids_ = 0;
  const Sizes* s_ = nullptr;
  int loaded_ = 0;  // steps whose tokens are there, or were
  Account& a_;
  ZeroWalk& zero_;
};

}  // namespace

StateBytes state_bytes(const Plan& plan) {
  const std::int64_t e = element_bytes(plan.dtype);
  return {e, e, plan.offload == Offload::optimizer ? 0 : 2 * e};
}

Memory kept_state(std::int64_t whole, std::int64_t own, int zero, const StateBytes& bytes) {
  Memory memory;
  memory[MemoryCategory::parameters] = bytes.value * (zero >= 3 ? own : whole);
  memory[MemoryCategory::gradients] = bytes.gradient * (zero >= 2 ? own : whole);
  memory[MemoryCategory::optimizer] = bytes.optimizer * (zero >= 1 ? own : whole);
  return memory;
}

Memory predict_memory(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at) {
  const int tp = plan.mesh.size(Axis::tp), zero = plan.zero_stage();
  const auto& groups = pipeline.groups_of(at.pp, plan.mesh.ep_index(at));
  const std::int64_t e = element_bytes(plan.dtype);
  const FlatLayout layout = flat_layout(groups, tp, at.tp);
  const StepPrograms& programs = pipeline.programs(at.dp);
  Memory kept =
      kept_state(layout.size(), shard_size(shard_units(layout, plan.all_shards()), plan.shard_index(at)),
                 zero, state_bytes(plan));
  kept[MemoryCategory::parameters] *= weight_versions(programs.schedule())[static_cast<std::size_t>(at.pp)];
  if (!plan.optimizer_barrier) {  // those of a guessed step
    kept[MemoryCategory::parameters] *= 2;
    kept[MemoryCategory::optimizer] += 2 * guessed_moments * e;
  }
  if (zero < 2 && keeps_tied_gradient_apart(plan, pipeline, at.dp, at.pp))
    kept[MemoryCategory::gradients] += local_numel(embedding_parameters(plan.model).front(), tp, at.tp) * e;
  const int index = plan.mesh.dp_cp_index(at);
  for (const GradientBucket& bucket : reduction_buckets(plan, groups, at.tp)) {
    const int ep = bucket.experts ? plan.mesh.ep : 1;
    const Memory held =
        reduction_memory(plan.compression, bucket, plan.dtype, plan.mesh.dp_cp_size() / ep, index / ep);
    for (MemoryCategory category : all_memory_categories) kept[category] += held[category];
  }

  std::vector<Sizes> sizes;
  for (const Range& batch : microbatches(plan, at.dp)) sizes.emplace_back(plan, batch.size(), at);
  std::vector<std::int64_t> copies;
  for (const auto& group : groups)
    for (const ParamSpec& spec : group)
      if (pipeline.holders_of(spec.name).size() > 1) copies.push_back(local_numel(spec, tp, at.tp) * e);
  const ContextLayout context(plan);
  const std::int64_t token_bytes =
      4 * (3 * context.tokens_here() + (plan.mask == AttentionMask::document ? context.core_tokens() : 0));
  const std::int64_t ids = dp_samples(plan, at.dp).size() * token_bytes;
  Account account(kept);
  ZeroWalk state(plan, pipeline, at, account);
  StepWalk walk(plan, pipeline, at.pp, account, state);
  for (int step = 0; step < programs.shown_steps(); ++step)
    walk.run(programs.program(step, programs.shown_steps() - step), sizes, ids);
  if (programs.flushes()) walk.end_step(ids, copies);
  return account.peak();
}

}  // namespace echelon
