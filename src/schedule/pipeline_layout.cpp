#include "schedule/pipeline_layout.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "schedule/balance.h"
#include "schedule/schedules.h"
#include "schedule/simulate.h"
#include "schedule/text.h"
#include "schedule/validate.h"
#include "schedule/zb_auto.h"
#include "spec/plan_refusal.h"

namespace echelon {

bool flushes(const Plan& plan) {
  return !is_stream(plan.schedule) || !plan.schedule_text.empty() || plan.mesh.size(Axis::pp) == 1;
}

namespace {

// A schedule of one's own, as text.
Schedule own_schedule(const Plan& plan, int ranks, int microbatches) {
  Schedule schedule = from_text(plan.schedule_text, "--schedule " + plan.schedule);
  validate(schedule);
  if (!is_synchronous(schedule))
    refuse("--schedule {}: has optimizer steps; of schedules that do not flush, train runs pipedream and 2bw",
           plan.schedule);
  if (schedule.num_ranks() != ranks)
    throw PlanRefusal("--schedule",
                      fmt::format("--schedule {}: it is for {} ranks, and --pp is {}", plan.schedule,
                                  schedule.num_ranks(), ranks),
                      {remedy(Axis::pp, schedule.num_ranks())});
  if (schedule.num_microbatches != microbatches)
    refuse(
        "--schedule {}: it is for {} microbatches, and --global-batch {} over --dp {} in --micro-batch {} "
        "makes {}",
        plan.schedule, schedule.num_microbatches, plan.global_batch, plan.mesh.size(Axis::dp),
        plan.micro_batch, microbatches);
  return schedule;
}

std::vector<std::int64_t> layers_of_stages(const Plan& plan, const Schedule& schedule) {
  const ModelSpec& model = plan.model;
  const int stages = schedule.num_stages;
  if (!plan.layers_per_stage.empty()) {
    if (static_cast<int>(plan.layers_per_stage.size()) != stages)
      refuse("--layers-per-stage: {} numbers, and {} over {} ranks has {} stages",
             plan.layers_per_stage.size(), plan.schedule, plan.mesh.size(Axis::pp), stages);
    std::int64_t sum = 0;
    for (std::int64_t count : plan.layers_per_stage) {
      if (count < 0) refuse("--layers-per-stage: {} layers; legal: 0 and more", count);
      sum += count;
    }
    if (sum != model.num_layers)
      refuse("--layers-per-stage: the numbers add up to {}, and {} has {} layers", sum, model.name,
             model.num_layers);
    return plan.layers_per_stage;
  }
  if (model.num_layers < stages) {
    std::vector<Remedy> legal;
    for (int pp = plan.mesh.size(Axis::pp) - 1; pp >= 1 && std::ssize(legal) < 4; --pp)
      if (stages / plan.mesh.size(Axis::pp) * pp <= model.num_layers) legal.push_back(remedy(Axis::pp, pp));
    throw PlanRefusal(
        "--pp",
        fmt::format("--pp {}: {} needs {} stages of at least one layer, and {} has {} layers",
                    plan.mesh.size(Axis::pp), plan.schedule, stages, model.name, model.num_layers),
        legal);
  }
  if (plan.balance_layers) {
    const auto cost = [&](const StageSlice& slice) {
      const StageTimes flops = stage_flops(plan, slice);
      return flops.forward + flops.backward_input + flops.backward_weight;
    };
    return balanced_layers(schedule, model.num_layers, cost({{0, 1}, false, false}),
                           cost({{0, 0}, true, false}), cost({{0, 0}, false, true}));
  }
  std::vector<std::int64_t> even;
  for (int s = 0; s < stages; ++s) even.push_back(split_range(model.num_layers, stages, s).size());
  return even;
}

std::vector<StageSlice> cut_layers(const Plan& plan, const Schedule& schedule) {
  std::vector<StageSlice> slices;
  std::int64_t next = 0;
  for (std::int64_t count : layers_of_stages(plan, schedule)) {
    slices.push_back({{next, next + count}, slices.empty(), false});
    next += count;
  }
  slices.back().head = true;
  return slices;
}

// zb-auto for the stages as they are: their FLOPs for times, their layers for memory, and no more activations
// on a rank than 1F1B has on its first.
Schedule searched_schedule(const Plan& plan, int ranks, int microbatches) {
  AutoCosts costs;
  costs.times.stages.clear();
  costs.memory.clear();
  costs.limit = {static_cast<double>(ranks)};
  double total = 0;
  // Stage r on rank r, as 1F1B has it.
  for (const StageSlice& slice : cut_layers(plan, one_f_one_b(ranks, microbatches))) {
    const StageTimes flops = stage_flops(plan, slice);
    total += flops.forward + flops.backward_input + flops.backward_weight;
    costs.times.stages.push_back(flops);
    // A stage without layers keeps its input; no pass holds nothing.
    const double layers = static_cast<double>(std::max<std::int64_t>(1, slice.layers.size()) * ranks) /
                          static_cast<double>(plan.model.num_layers);
    costs.memory.push_back({layers, 0, -layers});
  }
  // In units of a mean pass, so that nothing depends on the size of the model.
  for (StageTimes& times : costs.times.stages)
    for (double* t : {&times.forward, &times.backward_input, &times.backward_weight}) *t *= 3 * ranks / total;
  return zb_auto(ranks, microbatches, costs).schedule;
}

Remedy schedule_remedy(const std::string& name) {
  return {"--schedule", name, [=](Plan& plan) {
            plan.schedule = name;
            plan.schedule_text.clear();
          }};
}

void refuse_unknown_schedule(const Plan& plan) {
  const auto& names = schedule_names();
  if (!plan.schedule_text.empty() || std::find(names.begin(), names.end(), plan.schedule) != names.end())
    return;
  std::vector<Remedy> legal;
  for (const std::string& name : names) legal.push_back(schedule_remedy(name));
  throw PlanRefusal("--schedule", fmt::format("--schedule {}: no such schedule or file", plan.schedule),
                    legal);
}

// One rank needs no schedule but "forward, backward": the same as every schedule at P = 1, without a second
// chunk.
StepPrograms planned_programs(const Plan& plan, int microbatches) {
  const int ranks = plan.mesh.size(Axis::pp);
  refuse_unknown_schedule(plan);
  if (ranks == 1) return StepPrograms(one_f_one_b(1, microbatches));
  if (!plan.schedule_text.empty())
    return StepPrograms(own_schedule(plan, ranks, microbatches), plan.optimizer_barrier);
  try {
    if (!flushes(plan)) return {plan.schedule, ranks, microbatches};
    return StepPrograms(plan.schedule == "zb-auto"
                            ? searched_schedule(plan, ranks, microbatches)
                            : make_schedule(plan.schedule, ranks, microbatches, plan.chunks),
                        plan.optimizer_barrier);
  } catch (const RequestError& error) {
    refuse(
        "--schedule {} --pp {} with {} microbatches a step (--global-batch {} over --dp {} in --micro-batch "
        "{}): {}",
        plan.schedule, ranks, microbatches, plan.global_batch, plan.mesh.size(Axis::dp), plan.micro_batch,
        error.what());
  }
}

Remedy no_balancing(const char* flag, double Balancing::*number) {
  return {flag, "0", [=](Plan& plan) { plan.balancing.*number = 0; }};
}

void refuse_stream(const Plan& plan) {
  const int dp = plan.mesh.size(Axis::dp);
  const Remedy flushing = schedule_remedy("1f1b");
  if (plan.zero > 0)
    throw PlanRefusal(
        "--zero",
        fmt::format("--zero {}: {} keeps several versions of whole weights, each stage at another "
                    "step",
                    plan.zero, plan.schedule),
        {remedy("--zero", &Plan::zero, 0), flushing});
  for (const auto& [flag, number] : {std::pair{"--aux-loss", &Balancing::expert_loss},
                                     {"--device-loss", &Balancing::device_loss},
                                     {"--communication-loss", &Balancing::communication_loss},
                                     {"--z-loss", &Balancing::z_loss}})
    if (plan.balancing.*number > 0)
      throw PlanRefusal(
          flag,
          fmt::format("{} {}: is a mean over the tokens of a step, and {} updates stages inside of it", flag,
                      plan.balancing.*number, plan.schedule),
          {no_balancing(flag, number), flushing});
  if (plan.balancing.bias_rate > 0)
    throw PlanRefusal(
        "--bias-rate",
        fmt::format("--bias-rate {}: the loads of a step's experts are counted at its end, and {} "
                    "has none",
                    plan.balancing.bias_rate, plan.schedule),
        {no_balancing("--bias-rate", &Balancing::bias_rate), flushing});
  if (microbatches(plan, 0).size() != microbatches(plan, dp - 1).size())
    throw PlanRefusal(
        "--schedule",
        fmt::format("--schedule {}: every data-parallel rank needs the same number of microbatches, and "
                    "--global-batch {} over --dp {} in --micro-batch {} makes {} and {}",
                    plan.schedule, plan.global_batch, dp, plan.micro_batch, microbatches(plan, 0).size(),
                    microbatches(plan, dp - 1).size()),
        {flushing, remedy("--global-batch", &Plan::global_batch, (plan.global_batch + dp - 1) / dp * dp)});
  if (plan.model.tied_embedding)
    throw PlanRefusal(
        "--schedule",
        fmt::format("--schedule {}: {} ties its output layer to its embedding, and the two ends of "
                    "the pipeline step at different times",
                    plan.schedule, plan.model.name),
        {flushing});
}

// The counts of the global batch are not known before its last forward pass, so a backward pass that comes
// earlier could only have the loss of other tokens. Ranks that add counts up do so in the backward pass of
// their first microbatch, between which and the last one gradients are not summed.
void refuse_batch_scope(const Plan& plan, const Schedule& schedule, bool same_microbatches) {
  if (plan.balancing.scope != BalanceScope::batch || !plan.balancing.has_counts()) return;
  const auto problem = [&](const std::string& why) {
    const auto scope = [](BalanceScope one) {
      return Remedy{"--balance-scope", balance_scope_name(one),
                    [=](Plan& other) { other.balancing.scope = one; }};
    };
    const std::int64_t most = dp_samples(plan, 0).size();
    return PlanRefusal("--balance-scope", "--balance-scope batch: " + why,
                       {scope(BalanceScope::sequence), scope(BalanceScope::microbatch),
                        remedy("--micro-batch", &Plan::micro_batch, most, Remedy::Kind::at_least),
                        schedule_remedy("gpipe")});
  };
  if (!plan.optimizer_barrier) throw problem("with --optimizer-barrier off forward passes are taken back");
  if (!same_microbatches)
    throw problem(
        fmt::format("with --global-batch {} --dp {} --micro-batch {} some ranks have more "
                    "microbatches than others",
                    plan.global_batch, plan.mesh.size(Axis::dp), plan.micro_batch));
  if (parameter_copies(schedule) > 1)
    throw problem(fmt::format("{} runs each stage on two ranks, which would wait for each other's counts",
                              schedule.name));
  for (const auto& instructions : schedule.ranks) {
    std::set<int> backward;  // stages that have begun it
    for (const Instruction& i : instructions) {
      if (i.op == Op::B || i.op == Op::BW) backward.insert(i.stage);
      if (i.op == Op::F && backward.contains(i.stage))
        throw problem(
            fmt::format("{} with {} microbatches begins backward passes before the tokens of all "
                        "forward passes are counted",
                        plan.mesh.size(Axis::pp) == 1 ? "one pipeline rank" : schedule.name.c_str(),
                        schedule.num_microbatches));
    }
  }
}

void refuse_without_barrier(const Plan& plan, const Schedule& schedule) {
  const auto problem = [](const std::string& why, std::vector<Remedy> others) {
    others.push_back({"--optimizer-barrier", "on", [](Plan& other) { other.optimizer_barrier = true; }});
    return PlanRefusal("--optimizer-barrier", "--optimizer-barrier off: " + why, std::move(others));
  };
  if (schedule.num_ranks() == 1) throw problem("needs a pipeline, and --pp is 1", {remedy(Axis::pp, 2)});
  if (!flushes(plan)) throw problem(fmt::format("{} has no barrier between its steps", plan.schedule), {});
  if (plan.balancing.bias_rate > 0)
    throw problem("a step's biases of routers are known when all its tokens are counted, which is a barrier",
                  {no_balancing("--bias-rate", &Balancing::bias_rate)});
  if (parameter_copies(schedule) > 1)
    throw problem(fmt::format("{} adds up the gradients of its two copies of each stage, which is a barrier",
                              plan.schedule),
                  {schedule_remedy("1f1b")});
}

}  // namespace

PipelineLayout::PipelineLayout(const Plan& plan)
    : tied_(plan.model.tied_embedding),
      output_name_(tied_ ? embedding_parameters(plan.model).front().name : "lm_head.weight") {
  for (int r = 0; r < plan.mesh.size(Axis::dp); ++r) {
    const int count = static_cast<int>(microbatches(plan, r).size());
    microbatches_.push_back(count);
    if (!programs_.contains(count)) programs_.emplace(count, planned_programs(plan, count));
  }
  const Schedule& schedule = programs(0).schedule();
  if (!programs(0).flushes()) refuse_stream(plan);
  if (!plan.optimizer_barrier) refuse_without_barrier(plan, schedule);
  refuse_batch_scope(plan, schedule, programs_.size() == 1);
  slices_ = cut_layers(plan, schedule);
  hold(plan, schedule);
}

void PipelineLayout::hold(const Plan& plan, const Schedule& schedule) {
  for (int r = 0; r < schedule.num_ranks(); ++r) {
    std::set<int> held;
    for (const Instruction& i : schedule.ranks[static_cast<std::size_t>(r)]) held.insert(i.stage);
    held_.emplace_back(held.begin(), held.end());
    std::vector<std::vector<ParamSpec>> groups;
    for (int s : held_.back()) {
      const StageSlice& slice = slices_[static_cast<std::size_t>(s)];
      if (slice.embedding) groups.push_back(embedding_parameters(plan.model));
      for (std::int64_t layer = slice.layers.begin; layer < slice.layers.end; ++layer)
        groups.push_back(block_parameters(plan.model, layer));
      if (!slice.head) continue;
      groups.push_back(head_parameters(plan.model));
      if (tied_ && !held.contains(0)) groups.back().push_back(embedding_parameters(plan.model).front());
    }
    for (const auto& group : groups)
      for (const ParamSpec& spec : group) {
        auto& holders = holders_[spec.name];
        if (holders.empty() || holders.back() != r) holders.push_back(r);
      }
    groups_.emplace_back();
    for (int ep_index = 0; ep_index < plan.mesh.ep; ++ep_index) {
      groups_.back().push_back(groups);
      const Range experts = experts_of(plan, ep_index);
      for (auto& group : groups_.back().back())
        std::erase_if(group, [&](const ParamSpec& spec) {
          return spec.expert >= 0 && (spec.expert < experts.begin || spec.expert >= experts.end);
        });
    }
  }
}

const std::vector<int>& PipelineLayout::holders_of(const std::string& parameter) const {
  const auto found = holders_.find(parameter);
  check(found != holders_.end(), "every parameter is on some pipeline rank");
  return found->second;
}

int PipelineLayout::first_group(int pp_rank, int stage) const {
  int group = 0;
  for (int s : stages_of(pp_rank)) {
    if (s == stage) return group;
    const StageSlice& slice = slices_[static_cast<std::size_t>(s)];
    group += static_cast<int>(slice.layers.size()) + slice.embedding + slice.head;
  }
  throw InvariantError("a rank has the groups of the stages that it holds");
}

int PipelineLayout::output_group(int pp_rank) const {
  const auto& groups = groups_of(pp_rank, 0);
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const ParamSpec& spec : groups[g])
      if (spec.name == output_name_) return static_cast<int>(g);
  throw InvariantError("a rank has an output layer where it holds its matrix");
}

std::set<int> PipelineLayout::late_groups(int pp_rank) const {
  std::set<int> late;
  const auto& groups = groups_of(pp_rank, 0);
  for (std::size_t g = 0; g < groups.size(); ++g)
    for (const ParamSpec& spec : groups[g])
      if (holders_of(spec.name).size() > 1) late.insert(static_cast<int>(g));
  if (ties_on(pp_rank)) late.insert(0);  // the embedding's
  return late;
}

bool keeps_tied_gradient_apart(const Plan& plan, const PipelineLayout& pipeline, int dp_rank, int pp_rank) {
  const std::vector<Range> batches = microbatches(plan, dp_rank);
  return pipeline.ties_on(pp_rank) && batches.size() > 1 && batches[1].size() > 0;
}

bool PipelineLayout::ties_on(int pp_rank) const {
  const std::vector<int>& held = stages_of(pp_rank);
  return tied_ && held.front() == 0 && held.back() + 1 == static_cast<int>(slices_.size());
}

}  // namespace echelon
