#include "plan/zero_walk.h"

namespace echelon {

ZeroWalk::ZeroWalk(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at, Account& account)
    : account_(account),
      zero_(plan.zero_stage()),
      prefetch_(plan.zero_prefetch),
      shard_(plan.shard_index(at)),
      width_(element_bytes(plan.dtype)),
      late_(pipeline.late_groups(at.pp)) {
  const auto& groups = pipeline.groups_of(at.pp, plan.mesh.ep_index(at));
  const int tp = plan.mesh.size(Axis::tp);
  units_ = shard_units(flat_layout(groups, tp, at.tp), plan.all_shards());
  for (const Instruction& i : pipeline.programs(at.dp).schedule().ranks[static_cast<std::size_t>(at.pp)])
    if (i.op == Op::F) ++passes_[i.stage];
  if (keeps_tied_gradient_apart(plan, pipeline, at.dp, at.pp))
    tied_bytes_ = local_numel(embedding_parameters(plan.model).front(), tp, at.tp) * width_;
}

void ZeroWalk::begin_step(std::vector<int> uses) {
  if (zero_ < 2) return;
  for (std::size_t unit = 0; unit < units_.size(); ++unit)  // of the step before
    account_.free(own_bytes(unit), MemoryCategory::gradients);
  done_.assign(num_groups(), 0);
  begun_.assign(units_.size(), false);
  finished_.assign(num_groups(), false);
  tied_begun_ = false;
  left_ = num_groups();
  begin_unit(units_.size() - 1);
  if (zero_ < 3) return;
  window_ = GatherWindow(std::move(uses), prefetch_);
  account_.allocate(bytes(units_.size() - 1), MemoryCategory::parameters);
  allocate_values(window_.begin());
}

void ZeroWalk::allocate_values(const std::vector<int>& groups) {
  for (int group : groups)
    for (std::size_t unit : units_of(group)) account_.allocate(bytes(unit), MemoryCategory::parameters);
}

void ZeroWalk::need_gradients(int group) {
  for (std::size_t unit : units_of(group)) begin_unit(unit);
}

void ZeroWalk::use(int group) {
  if (zero_ == 3) allocate_values(window_.use(group));
}

void ZeroWalk::done() {
  if (zero_ < 3) return;
  for (int group : window_.done())
    for (std::size_t unit : units_of(group)) account_.free(bytes(unit), MemoryCategory::parameters);
}

void ZeroWalk::begin_unit(std::size_t unit) {
  if (zero_ < 2 || begun_[unit]) return;
  begun_[unit] = true;
  account_.allocate(bytes(unit), MemoryCategory::gradients);
}

void ZeroWalk::need_output_gradient(int group) {
  if (tied_bytes_ == 0) return need_gradients(group);
  if (zero_ < 2 || tied_begun_) return;
  tied_begun_ = true;
  account_.allocate(tied_bytes_, MemoryCategory::gradients);
}

void ZeroWalk::group_done(int stage, int group) {
  if (zero_ < 2 || ++done_[static_cast<std::size_t>(group)] < passes_.at(stage)) return;
  if (!late_.contains(group)) finish_group(group);
}

void ZeroWalk::finish_group(int group) {
  finished_[static_cast<std::size_t>(group)] = true;
  while (left_ > 0 && finished_[left_ - 1])
    for (std::size_t unit : units_of(static_cast<int>(--left_))) send(unit);
}

// One reduce_scatter is under way at a time, and keeps what it reads.
void ZeroWalk::send(std::size_t unit) {
  if (units_[unit].range.size() == 0) return;
  if (scattering_) account_.free(bytes(*scattering_), MemoryCategory::gradients);
  account_.allocate(own_bytes(unit), MemoryCategory::gradients);
  scattering_ = unit;
}

void ZeroWalk::end_step() {
  if (zero_ < 2) return;
  if (zero_ == 3) account_.free(bytes(units_.size() - 1), MemoryCategory::parameters);
  if (tied_begun_) account_.free(tied_bytes_, MemoryCategory::gradients);
  for (int group : late_) finish_group(group);
  send(units_.size() - 1);
  if (scattering_) account_.free(bytes(*scattering_), MemoryCategory::gradients);
  scattering_.reset();
}

}  // namespace echelon
