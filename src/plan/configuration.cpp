#include "plan/configuration.h"

#include <fmt/format.h>

#include <algorithm>

namespace echelon {

std::int64_t num_microbatches(const Workload& work, const Configuration& c) {
  const std::int64_t of_rank = (work.global_batch + c.dp - 1) / c.dp;
  return (of_rank + c.micro_batch - 1) / c.micro_batch;
}

GradientSums gradient_sums(const Workload& work, const Configuration& c) {
  const Software& s = work.software;
  const bool cuts = c.zero >= 2, each = s.reduces_each_microbatch && !(c.pp > 1 && s.pipelines_reduce_once);
  return {cuts && each, cuts && (each || num_microbatches(work, c) == 1)};
}

std::vector<std::string> not_run(const Software& software, const Configuration& c) {
  const auto lacks = [](const auto& list, const auto& entry) {
    return list && std::find(list->begin(), list->end(), entry) == list->end();
  };
  std::vector<std::string> missing;
  if (c.pp > 1 && lacks(software.schedules, c.schedule)) missing.push_back("schedule " + c.schedule);
  if (c.dp * c.cp > 1 && lacks(software.zero_stages, c.zero))
    missing.push_back(fmt::format("ZeRO {}", c.zero));
  return missing;
}

Runner runner_of(const Workload& work) {
  return work.software.is_this_trainer ? Runner::this_trainer : Runner::any_program;
}

Plan plan_of(const Workload& work) {
  Plan plan;
  plan.model = work.model;
  plan.global_batch = work.global_batch;
  plan.seq_len = work.seq_len;
  plan.priced = {work.machine.name, work.software.name, precision_name(work.precision), work.machine.node()};
  return plan;
}

void place(const Workload& work, const Configuration& c, Plan& plan) {
  plan.mesh.set(Axis::dp, c.dp);
  plan.mesh.set(Axis::tp, c.tp);
  plan.mesh.set(Axis::pp, c.pp);
  plan.mesh.set(Axis::cp, c.cp);
  plan.mesh.ep = c.ep;
  const bool as_mlps = work.model.experts == Experts::none ? c.etp == 1 : c.etp == c.tp;
  plan.mesh.etp = as_mlps ? 0 : c.etp;
  plan.sequence_parallel = c.sequence_parallel;
  plan.context_kind = c.context;
  // Both are balanced parts; zigzag's are two of half the size.
  plan.context_balance =
      c.cp > 1 && work.seq_len % (2 * c.cp) != 0 ? ContextBalance::stripe : ContextBalance::zigzag;
  plan.micro_batch = c.micro_batch;
  plan.recompute = c.recompute;
  plan.schedule = c.pp > 1 ? c.schedule : "1f1b";
  plan.chunks = c.chunks > 1 ? c.chunks : 0;
  plan.layers_per_stage = c.layers_per_stage;
  plan.zero = c.zero;
  plan.hsdp = c.hsdp;
}

Plan as_plan(const Workload& work, const Configuration& c, const std::vector<std::int64_t>& layers) {
  Plan plan = plan_of(work);
  place(work, c, plan);
  plan.layers_per_stage = layers;
  return plan;
}

std::string describe(const Configuration& c) {
  std::string text = fmt::format("dp {} tp {} pp {}", c.dp, c.tp, c.pp);
  if (c.cp > 1) text += fmt::format(" cp {} ({})", c.cp, name_of(c.context));
  if (c.ep > 1) text += fmt::format(" ep {}", c.ep);
  if (c.ep > 1 && c.etp > 1) text += fmt::format(" etp {}", c.etp);
  if (c.pp > 1) text += ", " + c.schedule + (c.chunks > 1 ? fmt::format(" x{}", c.chunks) : "");
  if (c.pp > 1 && c.layers_per_stage.empty() && !c.even_split) text += ", balanced layers";
  text += fmt::format(", micro-batch {}", c.micro_batch);
  if (c.zero > 0)
    text += fmt::format(", ZeRO {}", c.zero) + (c.hsdp > 1 ? fmt::format(" in {} replicas", c.hsdp) : "");
  if (c.recompute != Recompute::none) text += fmt::format(", recompute {}", recompute_name(c.recompute));
  return text;
}

std::string shape_problem(const Workload& work, const Configuration& c) {
  const Plan plan = as_plan(work, c, c.layers_per_stage);
  const auto refusal = shape_refusal(plan, runner_of(work));
  return refusal ? sentence(plan, *refusal) : "";
}

}  // namespace echelon
