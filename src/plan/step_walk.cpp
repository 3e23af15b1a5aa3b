#include "plan/step_walk.h"


namespace echelon {

void StepWalk::run(const StepPrograms::Program& program, const std::vector<MicrobatchSizes>& sizes,
                   std::int64_t ids) {
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

void StepWalk::end_step(std::int64_t ids, const std::vector<std::int64_t>& copies) {
  a_.free(ids);
  for (std::int64_t bytes : copies) {
    a_.allocate(bytes, MemoryCategory::communication);
    a_.free(bytes, MemoryCategory::communication);
  }
  zero_.end_step();
}

void StepWalk::execute(const Instruction& i) {
  const auto count = static_cast<int>(sizes_->size());
  while (loaded_ * count <= i.microbatch) {
    a_.allocate(ids_);
    ++loaded_;
  }
  const MicrobatchSizes& sizes = (*sizes_)[static_cast<std::size_t>(i.microbatch % count)];
  layer_.set_microbatch(sizes);
  const StageSlice& slice = pipeline_.slices()[static_cast<std::size_t>(i.stage)];
  const auto in_layer = [&](int group, int first) {
    layer_.set_layer(model_->has_experts(slice.layers.begin + group - first));
  };
  const StageGroups g = is_compute(i.op) ? stage_groups(pipeline_, pp_rank_, i.stage) : StageGroups{};
  switch (i.op) {
    case Op::recv:
      a_.allocate(sizes.residual);
      break;
    case Op::send:
      a_.free(sizes.residual);
      break;
    case Op::F:
      if (slice.embedding) using_group(g.first, [&] { layer_.embed(); });
      for (int group = g.block; group < g.end; ++group) {
        in_layer(group, g.block);
        using_group(group, [&] { layer_.forward(); });
      }
      break;
    case Op::BW:
      if (slice.head) head(i.stage, g);
      for (int group = g.end; group-- > g.block;) {
        in_layer(group, g.block);
        using_group(group, [&] { adding_gradients(i.stage, group, [&] { layer_.backward(); }); });
      }
      if (slice.embedding) adding_gradients(i.stage, g.first, [&] { layer_.embed_backward(); });
      if (slice.head) a_.free(loss_bytes, MemoryCategory::other);
      break;
    case Op::B:
      if (slice.head) head(i.stage, g);
      for (int group = g.end; group-- > g.block;) {
        in_layer(group, g.block);
        using_group(group, [&] { layer_.backward_input(); });
      }
      if (slice.head) a_.free(loss_bytes, MemoryCategory::other);
      break;
    case Op::W:
      for (int group = g.end; group-- > g.block;) {
        in_layer(group, g.block);
        adding_gradients(i.stage, group, [&] { layer_.backward_weight(); });
      }
      if (slice.embedding) adding_gradients(i.stage, g.first, [&] { layer_.embed_backward(); });
      break;
    case Op::validate:
      break;
    case Op::step:
      // Where there are steps, a rank has one stage: after a step's last one its tokens go.
      if ((i.microbatch + 1) % count == 0) a_.free(ids_);
      break;
  }
}

// As PipelineExecutor does.
void StepWalk::execute_together(std::span<const Instruction> list) {
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

void StepWalk::head(int stage, const StageGroups& g) {
  using_group(g.output, [&] {
    zero_.need_output_gradient(g.output);
    a_.allocate(loss_bytes, MemoryCategory::other);
    layer_.head();
    zero_.group_done(stage, g.end);
  });
}

}  // namespace echelon
