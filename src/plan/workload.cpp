#include "plan/workload.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/units.h"
#include "spec/fp8.h"

namespace echelon {

Runner runner_of(const Software& s) {
  return {s.is_this_trainer, s.tensor_repeats_heads, s.context_repeats_heads};
}

const PrecisionRecipe& trained_recipe(Precision precision) {
  return recipe(precision == Precision::f32 ? "f32" : precision == Precision::fp8 ? fp8_name : "bf16");
}

std::int64_t num_microbatches(const Plan& plan) {
  const std::int64_t of_rank = (plan.global_batch + plan.mesh.dp() - 1) / plan.mesh.dp();
  return (of_rank + plan.micro_batch - 1) / plan.micro_batch;
}

GradientSums gradient_sums(const Software& s, const Plan& plan) {
  const bool cuts = plan.zero >= 2,
             each = s.reduces_each_microbatch && !(plan.mesh.pp() > 1 && s.pipelines_reduce_once);
  const std::int64_t microbatches = num_microbatches(plan);
  if (!cuts || each) return {cuts, cuts};
  const int pp = plan.mesh.pp();
  if (s.reduces_each_group && pp > 1 && plan.schedule == "interleaved" && plan.chunks > 1)
    return {false, true, (microbatches + pp - 1) / pp};
  return {false, microbatches == 1};
}

template <class T>
static bool lacks(const std::optional<std::vector<T>>& list, const T& entry) {
  return list && std::find(list->begin(), list->end(), entry) == list->end();
}

bool runs_zero(const Software& s, int zero, const Mesh& mesh) {
  return !(lacks(mesh.pp() > 1 && s.pipeline_zero_stages ? s.pipeline_zero_stages : s.zero_stages, zero) ||
           (mesh.tp() > 1 && lacks(s.tensor_zero_stages, zero)));
}

bool has_context(const Workload& work) {
  return !lacks(work.software.context_precisions, std::string(precision_name(work.precision)));
}

bool cuts_sequences(const Software& s, const Plan& plan) {
  const std::int64_t cp = plan.mesh.cp();
  return cp == 1 || plan.context_kind != ContextKind::ulysses || !s.context_cuts_pairs ||
         plan.seq_len % (2 * cp) == 0;
}

bool gathers_each_microbatch(const Software& s, const Plan& plan) {
  return plan.zero == 3 && !(plan.mesh.pp() > 1 && s.pipelines_keep_gathered);
}

std::string rest_of_groups(const Software& software, const Plan& plan) {
  const int pp = plan.mesh.pp();
  if (!software.interleaves_whole_groups || pp == 1 || plan.schedule != "interleaved") return {};
  const std::int64_t microbatches = num_microbatches(plan);
  return microbatches % pp == 0 ? ""
                                : fmt::format("{} interleaved over pp {}", counted(microbatches, "microbatch"), pp);
}

static bool is_among(const std::optional<std::vector<std::string>>& names,
                     const PipelineRecompute& recompute) {
  return !names || std::any_of(names->begin(), names->end(), [&](const std::string& name) {
    return recompute == parse_recompute(name, "recompute");
  });
}

bool offloads_beside(const Software& software, const PipelineRecompute& recompute) {
  return is_among(software.activation_offload_recompute, recompute);
}

std::vector<std::string> not_run(const Workload& work, const Plan& plan) {
  const Software& software = work.software;
  std::vector<std::string> missing;
  if (plan.mesh.pp() > 1 && lacks(software.schedules, plan.schedule))
    missing.push_back("schedule " + plan.schedule);
  if (std::string rest = rest_of_groups(software, plan); !rest.empty()) missing.push_back(std::move(rest));
  if (plan.mesh.tp() > 1 && !software.tensor_parallel) missing.push_back("tensor parallelism");
  if (plan.mesh.dp_cp_size() > 1 && !runs_zero(software, plan.zero, plan.mesh)) {
    Mesh alone = plan.mesh;
    alone.set(Axis::tp, 1);
    missing.push_back(fmt::format("ZeRO {}{}", plan.zero,
                                  lacks(software.zero_stages, plan.zero)  ? ""
                                  : runs_zero(software, plan.zero, alone) ? " beside tensor parallelism"
                                                                          : " beside a pipeline"));
  }
  if (plan.optimizer == OptimizerKind::muon && !software.trains_with_muon)
    missing.push_back("optimizer muon");
  if (plan.offloads_optimizer() && lacks(software.offload_zero_stages, plan.zero))
    missing.push_back(fmt::format("offload beside ZeRO {}", plan.zero));
  if (plan.offloads_activations() && plan.mesh.pp() > 1 && !software.activation_offload_pipelines)
    missing.push_back("offload of activations beside a pipeline");
  if (plan.offloads_activations() && !offloads_beside(software, plan.recompute))
    missing.push_back("offload of activations beside recompute " + recompute_name(plan.recompute));
  if (plan.hsdp > 1 && !software.replicated_shards)
    missing.push_back(fmt::format("shards in {} replicas", plan.hsdp));
  if (plan.mesh.cp() > 1 && lacks(software.context_kinds, std::string(name_of(plan.context_kind))))
    missing.push_back(fmt::format("context parallelism ({})", name_of(plan.context_kind)));
  if (plan.mesh.cp() > 1 && plan.context_kind != ContextKind::ulysses &&
      plan.context_balance == ContextBalance::stripe && !software.is_this_trainer)
    missing.push_back("cp-balance stripe");
  if (plan.mesh.cp() > 1 && !has_context(work))
    missing.push_back(fmt::format("context parallelism in {}", precision_name(work.precision)));
  if (!cuts_sequences(software, plan))
    missing.push_back(
        fmt::format("sequences of {} tokens over cp {} (ulysses)", plan.seq_len, plan.mesh.cp()));
  if (plan.mesh.cp() > 1 && plan.mesh.pp() > 1 && !software.context_beside_pipelines)
    missing.push_back("context parallelism beside a pipeline");
  if (plan.mesh.ep > 1 && work.expert_load.is_placed && !software.places_experts)
    missing.push_back(work.expert_load.replicas > 0 ? "copies of experts" : "experts placed by their load");
  if (work.dynamic_context) {
    const auto& stages = software.dynamic_context_zero_stages;
    if (!stages)
      missing.push_back("dynamic context parallelism");
    else if (plan.mesh.pp() > 1)
      missing.push_back("dynamic context parallelism beside a pipeline");
    else if (lacks(stages, plan.zero))
      missing.push_back(fmt::format("dynamic context parallelism beside ZeRO {}", plan.zero));
  }
  if (lacks(software.precisions, std::string(precision_name(work.precision))))
    missing.push_back(precision_name(work.precision));
  if (!is_among(software.recompute, plan.recompute))
    missing.push_back("recompute " + recompute_name(plan.recompute));
  return missing;
}

bool cuts_each_document(const Workload& work) {
  return !work.documents.empty() && (work.software.context_cuts_documents || work.dynamic_context);
}

std::string what_cuts_documents(const Software& software, bool dynamic_context) {
  return dynamic_context
             ? "with --dynamic-cp, under which each document is cut by itself"
             : fmt::format("with --document-lengths, each of which {} cuts by itself", software.name);
}

std::string no_host(const Workload& work, const Plan& plan) {
  const Software& s = work.software;
  const Machine& m = work.machine;
  if (!s.offloads) return fmt::format("{} keeps nothing on the host (offloads, in its file)", s.name);
  const bool state = plan.offloads_optimizer(), activations = plan.offloads_activations();
  if ((state && !s.offloads_state()) || (activations && !s.offloads_activations()))
    return fmt::format("{} keeps no {} on the host (offloads, in its file)", s.name,
                       state && !s.offloads_state() ? "optimizer state" : "activations");
  if (m.host_bandwidth <= 0)
    return fmt::format("how fast {} reaches its host is not known (host_bandwidth, in its file)", m.name);
  if (state && s.updates_on_host && m.host_memory_bandwidth <= 0)
    return fmt::format(
        "how fast the memory of the host of {} is is not known (host_memory_bandwidth, in its file)", m.name);
  return {};
}

std::string summary(const Plan& plan) {
  const Mesh& mesh = plan.mesh;
  std::string text = fmt::format("dp {} tp {} pp {}", mesh.dp(), mesh.tp(), mesh.pp());
  if (mesh.cp() > 1)
    text +=
        fmt::format(" cp {} ({}{})", mesh.cp(), name_of(plan.context_kind),
                    plan.mask == AttentionMask::document && plan.context_balance != ContextBalance::zigzag &&
                            plan.context_kind != ContextKind::ulysses
                        ? fmt::format(", {}", name_of(plan.context_balance))
                        : "");
  if (mesh.ep > 1) text += fmt::format(" ep {}", mesh.ep);
  if (mesh.ep > 1 && mesh.expert_cut() > 1) text += fmt::format(" etp {}", mesh.expert_cut());
  if (mesh.pp() > 1) text += ", " + plan.schedule + (plan.chunks > 1 ? fmt::format(" x{}", plan.chunks) : "");
  if (mesh.pp() > 1 && plan.balance_layers) text += ", balanced layers";
  if (plan.cuts_vocabulary()) text += ", vocabulary parallel";
  text += fmt::format(", micro-batch {}", plan.micro_batch);
  if (plan.zero > 0)
    text += fmt::format(", ZeRO {}", plan.zero) +
            (plan.hsdp > 1 ? fmt::format(" in {} replicas", plan.hsdp) : "");
  if (plan.offload != Offload::none) text += fmt::format(", offload {}", name_of(plan.offload));
  if (!(plan.recompute == Recompute::none))
    text += fmt::format(", recompute {}", recompute_name(plan.recompute));
  return text;
}

std::string shape_problem(const Workload& work, const Plan& plan) {
  const auto refusal = shape_refusal(plan, runner_of(work.software));
  return refusal ? sentence(plan, *refusal) : "";
}

}  // namespace echelon
