#include "plan/configuration.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "schedule/schedules.h"

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

Plan as_plan(const Workload& work, const Configuration& c, const std::vector<std::int64_t>& layers) {
  Plan plan;
  plan.model = work.model;
  plan.mesh.set(Axis::dp, c.dp);
  plan.mesh.set(Axis::tp, c.tp);
  plan.mesh.set(Axis::pp, c.pp);
  plan.mesh.set(Axis::cp, c.cp);
  plan.mesh.ep = c.ep;
  if (work.model.experts != Experts::none && c.etp != c.tp) plan.mesh.etp = c.etp;
  plan.sequence_parallel = c.sequence_parallel;
  plan.context_kind = c.context;
  // Both are balanced parts; zigzag's are two of half the size.
  if (c.cp > 1 && work.seq_len % (2 * c.cp) != 0) plan.context_balance = ContextBalance::stripe;
  plan.global_batch = work.global_batch;
  plan.micro_batch = c.micro_batch;
  plan.seq_len = work.seq_len;
  plan.recompute = c.recompute;
  plan.schedule = c.pp > 1 ? c.schedule : "1f1b";
  plan.chunks = c.chunks > 1 ? c.chunks : 0;
  plan.layers_per_stage = layers;
  plan.zero = c.zero;
  plan.hsdp = c.hsdp;
  plan.priced = {work.machine.name, work.software.name, precision_name(work.precision), work.machine.node()};
  return plan;
}

std::string describe(const Configuration& c) {
  std::string text = fmt::format("dp {} tp {} pp {}", c.dp, c.tp, c.pp);
  if (c.cp > 1) text += fmt::format(" cp {} ({})", c.cp, context_kind_name(c.context));
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
  const ModelSpec& m = work.model;
  if (m.num_heads % c.tp != 0) return fmt::format("tp {}: {} heads do not divide", c.tp, m.num_heads);
  if (m.num_kv_heads % c.tp != 0 && c.tp % m.num_kv_heads != 0)
    return fmt::format("tp {}: {} key/value heads do not divide", c.tp, m.num_kv_heads);
  if (m.vocab < c.tp) return fmt::format("tp {}: a vocabulary of only {}", c.tp, m.vocab);
  if (m.mlp_hidden < c.tp) return fmt::format("tp {}: an MLP of only {}", c.tp, m.mlp_hidden);
  if (m.experts != Experts::none && m.expert_hidden < c.tp)
    return fmt::format("tp {}: experts of only {}", c.tp, m.expert_hidden);
  if (work.global_batch < c.dp)
    return fmt::format("dp {}: the global batch has only {} sequences", c.dp, work.global_batch);
  if (work.seq_len < 2 * c.cp && c.cp > 1)
    return fmt::format("cp {}: {} tokens are too few", c.cp, work.seq_len);
  if (work.seq_len % c.cp != 0) return fmt::format("cp {}: {} tokens do not divide", c.cp, work.seq_len);
  if (c.cp > 1 && c.context == ContextKind::ulysses && (m.num_heads / c.tp) % c.cp != 0)
    return fmt::format("cp {}: {} heads of a tp rank do not divide (ulysses)", c.cp, m.num_heads / c.tp);
  if (m.experts == Experts::none && c.ep > 1) return fmt::format("ep {}: the model has no experts", c.ep);
  if (m.experts != Experts::none) {
    if (m.num_experts % c.ep != 0) return fmt::format("ep {}: {} experts do not divide", c.ep, m.num_experts);
    if (c.tp % c.etp != 0) return fmt::format("etp {}: does not divide tp {}", c.etp, c.tp);
    if (c.dp * c.cp * c.tp % (c.ep * c.etp) != 0)
      return fmt::format("ep {}: does not divide dp x cp x tp = {}", c.ep * c.etp, c.dp * c.cp * c.tp);
    if (work.software.is_this_trainer) {
      if (c.etp != c.tp)
        return fmt::format("etp {}: experts are cut over tp {} here, as MLPs are", c.etp, c.tp);
      const int block = c.zero > 0 ? c.shards() : c.dp * c.cp;
      if (block % c.ep != 0)
        return fmt::format("ep {}: does not divide the {} ranks that state is cut over", c.ep, block);
    }
  }
  if (c.pp * std::max(1, c.chunks) > m.num_layers)
    return fmt::format("pp {} x {} chunks: the model has {} layers", c.pp, c.chunks, m.num_layers);
  if (c.zero > 0 && c.dp * c.cp % c.hsdp != 0)
    return fmt::format("hsdp {}: does not divide dp {}", c.hsdp, c.dp * c.cp);
  return {};
}

}  // namespace echelon
