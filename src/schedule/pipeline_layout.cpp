#include "schedule/pipeline_layout.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "schedule/lower.h"
#include "schedule/schedules.h"
#include "schedule/text.h"
#include "schedule/validate.h"

namespace echelon {

// One rank needs no schedule but "forward, backward": the same as every schedule at P = 1, without a second
// chunk.
Schedule planned_schedule(const Plan& plan, int microbatches) {
  const int ranks = plan.mesh.size(Axis::pp);
  if (ranks == 1) return one_f_one_b(1, microbatches);
  if (!plan.schedule_text.empty()) {
    Schedule schedule = from_text(plan.schedule_text, "--schedule " + plan.schedule);
    validate(schedule);
    if (schedule.num_ranks() != ranks)
      refuse("--schedule {}: it is for {} ranks, and --pp is {}", plan.schedule, schedule.num_ranks(), ranks);
    if (schedule.num_microbatches != microbatches)
      refuse(
          "--schedule {}: it is for {} microbatches, and --global-batch {} over --dp {} in --micro-batch {} "
          "makes {}",
          plan.schedule, schedule.num_microbatches, plan.global_batch, plan.mesh.size(Axis::dp),
          plan.micro_batch, microbatches);
    return schedule;
  }
  try {
    return make_schedule(plan.schedule, ranks, microbatches, plan.chunks);
  } catch (const RequestError& error) {
    refuse(
        "--schedule {} --pp {} with {} microbatches a step (--global-batch {} over --dp {} in --micro-batch "
        "{}): {}",
        plan.schedule, ranks, microbatches, plan.global_batch, plan.mesh.size(Axis::dp), plan.micro_batch,
        error.what());
  }
}

PipelineLayout::PipelineLayout(const Plan& plan) : tied_(plan.model.tied_embedding) {
  const ModelSpec& model = plan.model;
  const int ranks = plan.mesh.size(Axis::pp);
  const Schedule schedule = planned_schedule(plan, static_cast<int>(microbatches(plan, 0).size()));
  // The last data-parallel rank has the fewest microbatches.
  (void)planned_schedule(plan, static_cast<int>(microbatches(plan, plan.mesh.size(Axis::dp) - 1).size()));
  if (!is_synchronous(schedule))
    refuse("--schedule {}: simulate draws it, train does not run it yet; legal: schedules that flush",
           plan.schedule);
  const int stages = schedule.num_stages;
  if (!plan.layers_per_stage.empty() && static_cast<int>(plan.layers_per_stage.size()) != stages)
    refuse("--layers-per-stage: {} numbers, and {} over {} ranks has {} stages", plan.layers_per_stage.size(),
           plan.schedule, ranks, stages);
  std::int64_t next = 0;
  for (int s = 0; s < stages; ++s) {
    const std::int64_t count = plan.layers_per_stage.empty()
                                   ? split_range(model.num_layers, stages, s).size()
                                   : plan.layers_per_stage[static_cast<std::size_t>(s)];
    slices_.push_back({{next, next + count}, s == 0, s + 1 == stages});
    next += count;
    if (count < 0 || (count < 1 && plan.layers_per_stage.empty()))
      refuse("--pp {}: {} needs {} stages of at least one layer, and {} has {} layers", ranks, plan.schedule,
             stages, model.name, model.num_layers);
  }
  if (next != model.num_layers)
    refuse("--layers-per-stage: the numbers add up to {}, and {} has {} layers", next, model.name,
           model.num_layers);

  std::map<std::string, std::set<int>> holders;
  for (int r = 0; r < ranks; ++r) {
    std::set<int> held;
    for (const Instruction& i : schedule.ranks[static_cast<std::size_t>(r)]) held.insert(i.stage);
    held_.emplace_back(held.begin(), held.end());
    auto& groups = groups_.emplace_back();
    for (int s : held_.back()) {
      const StageSlice& slice = slices_[static_cast<std::size_t>(s)];
      if (slice.embedding) groups.push_back(embedding_parameters(model));
      for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer)
        groups.push_back(block_parameters(model, layer));
      if (!slice.head) continue;
      groups.push_back(head_parameters(model));
      if (tied_ && !held.contains(0)) groups.back().push_back(embedding_parameters(model).front());
    }
    for (const auto& group : groups)
      for (const ParamSpec& spec : group) holders[spec.name].insert(r);
  }
  for (const auto& [name, ranks_of] : holders)
    holders_.emplace_back(name, std::vector<int>(ranks_of.begin(), ranks_of.end()));
}

const std::vector<int>& PipelineLayout::holders_of(const std::string& parameter) const {
  const auto found =
      std::lower_bound(holders_.begin(), holders_.end(), parameter,
                       [](const auto& entry, const std::string& name) { return entry.first < name; });
  check(found != holders_.end() && found->first == parameter, "every parameter is on some pipeline rank");
  return found->second;
}

bool PipelineLayout::ties_on(int pp_rank) const {
  const std::vector<int>& held = stages_of(pp_rank);
  return tied_ && held.front() == 0 && held.back() + 1 == static_cast<int>(slices_.size());
}

Schedule lowered_schedule(const Plan& plan, int microbatches) {
  return lower(planned_schedule(plan, microbatches));
}

}  // namespace echelon
