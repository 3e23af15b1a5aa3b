#include "plan/search_space.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

namespace echelon {
namespace {

std::vector<int> divisors(int n) {
  std::vector<int> list, large;
  for (int d = 1; std::int64_t{d} * d <= n; ++d) {
    if (n % d != 0) continue;
    list.push_back(d);
    if (d != n / d) large.push_back(n / d);
  }
  list.insert(list.end(), large.rbegin(), large.rend());
  return list;
}

template <class T>
std::vector<T> pinned_or(const SearchRequest& r, const char* name, const T& value, std::vector<T> all) {
  return r.has(name) ? std::vector<T>{value} : std::move(all);
}

// The values to try, in this order, as far as the program runs them.
template <class T>
std::vector<T> run_by(const std::optional<std::vector<T>>& program, std::vector<T> tried) {
  if (program)
    std::erase_if(tried, [&](const T& one) {
      return std::find(program->begin(), program->end(), one) == program->end();
    });
  return tried;
}

// The published schedules that can win: naive and gpipe never beat 1f1b in time or memory, and schedules
// without a flush train differently.
std::vector<std::string> searched_schedules(const Software& software) {
  return run_by<std::string>(software.schedules, {"1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half",
                                                  "v-min", "dualpipe", "dualpipev"});
}

// Kinds of context parallelism; empty for a program that has none.
std::vector<ContextKind> searched_context_kinds(const Software& software) {
  std::vector<ContextKind> kinds;
  for (const std::string& name :
       run_by<std::string>(software.context_kinds, {"ring", "ulysses", "allgather"}))
    kinds.push_back(parse_choice<ContextKind>(name, "context_kinds"));
  return kinds;
}

}  // namespace

void MeshChoice::place_in(Plan& plan) const {
  plan.mesh = mesh;
  plan.context_kind = context_kind;
  plan.context_balance = context_balance;
}

void PipelineChoice::place_in(Plan& plan) const {
  plan.schedule = schedule;
  plan.chunks = chunks;
  plan.balance_layers = balanced;
}

void ShardingChoice::place_in(Plan& plan) const {
  plan.zero = zero;
  plan.hsdp = hsdp;
}

std::int64_t most_replicas(const ModelSpec& m, int ep) {
  return ep == 1 ? m.num_experts : m.num_experts - m.num_experts / ep;
}

Plan open_plan(const SearchRequest& r) {
  Plan plan = r.work.plan;
  plan.sequence_parallel |= !r.has("sp");
  return plan;
}

void each_mesh(const SearchRequest& r, const std::function<bool(const Plan&)>& visit) {
  const Plan& given = r.work.plan;
  const Mesh& pinned = given.mesh;
  const ModelSpec& m = given.model;
  const bool has_experts = m.experts != Experts::none;
  const std::vector<int> axis = divisors(r.gpus),
                         eps = has_experts ? divisors(static_cast<int>(m.num_experts)) : std::vector{1};
  std::vector<ContextKind> kinds = searched_context_kinds(r.work.software);
  if (kinds.empty() && r.has("cp")) kinds = {given.context_kind};  // so that it is refused with a reason
  Plan plan = open_plan(r);
  Mesh& mesh = plan.mesh;
  const Software& software = r.work.software;
  const std::vector<int> tps = software.tensor_parallel ? axis : std::vector{1};
  const bool any_pp = software.activation_offload_pipelines || !given.offloads_activations() || r.has("pp");
  const bool any_cp = software.context_beside_pipelines || (r.has("pp") && r.has("cp"));
  const bool in_precision = has_context(r.work), dynamic = r.work.dynamic_context;
  for (int pp : pinned_or(r, "pp", pinned.pp(), axis))
    for (int tp : pinned_or(r, "tp", pinned.tp(), tps))
      for (int cp : pinned_or(r, "cp", pinned.cp(), axis)) {
        const std::int64_t inner = std::int64_t{pp} * tp * cp;
        if (inner > r.gpus || r.gpus % inner != 0) continue;
        if (pp > 1 && cp > 1 && !any_cp) continue;
        if (cp > 1 && !in_precision && !r.has("cp")) continue;
        if (pp > 1 && !any_pp) continue;
        if (dynamic && ((pp > 1 && !r.has("pp")) || (!is_power_of_two(cp) && !r.has("cp")))) continue;
        mesh.set(Axis::pp, pp);
        mesh.set(Axis::tp, tp);
        mesh.set(Axis::cp, cp);
        mesh.set(Axis::dp, static_cast<int>(r.gpus / inner));
        if (r.has("dp") && pinned.dp() != mesh.dp()) continue;
        // Both divide attention evenly; zigzag does it with two parts per rank, each half as long. For packed
        // documents, stripes are more even unless documents are cut separately.
        const bool cuts_each = cuts_each_document(r.work);
        std::vector<ContextBalance> balances{software.is_this_trainer && !cuts_each && cp > 1 &&
                                                     plan.seq_len % (2 * cp) != 0
                                                 ? ContextBalance::stripe
                                                 : ContextBalance::zigzag};
        if (cp > 1 && !cuts_each && !r.work.documents.empty() && software.is_this_trainer)
          balances = {ContextBalance::stripe, ContextBalance::zigzag};
        balances = pinned_or(r, "cp-balance", given.context_balance, std::move(balances));
        const std::vector<int> etps =
            has_experts && tp > 1 ? std::vector{1, 0} : std::vector{has_experts ? 0 : 1};
        for (int ep : pinned_or(r, "ep", pinned.ep, eps))
          for (int etp : pinned_or(r, "etp", pinned.etp, etps)) {
            mesh.ep = ep;
            mesh.etp = etp == (has_experts ? tp : 1) ? 0 : etp;  // the default: as MLPs are cut
            if (!r.has("ep") && !r.has("etp") &&
                mesh.dp_cp_size() * tp % (has_experts ? mesh.expert_ranks() : ep) != 0)
              continue;  // there is no such mesh
            if (!r.has("ep") && r.work.expert_load.replicas > most_replicas(m, ep)) continue;
            for (ContextKind kind : cp == 1 ? std::vector{ContextKind::ring}
                                            : pinned_or(r, "cp-kind", given.context_kind, kinds)) {
              plan.context_kind = kind;
              if (!cuts_sequences(software, plan) && !(r.has("cp") && r.has("cp-kind"))) continue;
              for (ContextBalance balance : balances) {
                plan.context_balance = balance;
                if (!visit(plan)) return;
                if (kind == ContextKind::ulysses) break;  // it needs no balance
              }
            }
          }
      }
}

std::vector<std::int64_t> micro_batches(const SearchRequest& r, const Plan& plan) {
  if (r.has("micro-batch")) return {r.work.plan.micro_batch};
  // With dynamic context parallelism documents are scheduled, and there are no sequences to combine.
  if (r.work.dynamic_context) return {1};
  const std::int64_t of_rank = plan.global_batch / plan.mesh.dp();
  std::vector<std::int64_t> list;
  for (std::int64_t n = 1; n <= of_rank; n *= 2)
    if (of_rank % n == 0) list.push_back(n);
  return list;
}

bool lacks_pipeline(const SearchRequest& r, const Plan& plan) {
  return plan.mesh.pp() == 1 && r.has("schedule") && !r.has("pp") && r.work.plan.schedule != "1f1b";
}

std::vector<PipelineChoice> pipelines(const SearchRequest& r, const Plan& plan) {
  const Plan& given = r.work.plan;
  const int pp = plan.mesh.pp();
  const auto with_splits = [&](const std::vector<PipelineChoice>& list) {
    std::vector<PipelineChoice> result;
    for (PipelineChoice p : list) {
      p.balanced = given.balance_layers;
      result.push_back(p);
      if (r.has("layers-per-stage") || pp == 1) continue;
      p.balanced = true;
      result.push_back(p);
    }
    return result;
  };
  if (lacks_pipeline(r, plan)) return {};
  if (pp == 1) return with_splits({{"1f1b"}});
  std::vector<PipelineChoice> list;
  for (const std::string& name :
       pinned_or(r, "schedule", given.schedule, searched_schedules(r.work.software))) {
    if (!name.starts_with("interleaved")) {
      list.push_back({name});
      continue;
    }
    // Even stages, or one layer less at one end or at both, as in Llama 3 405B; and few chunks, even if
    // stages are far from even.
    const std::int64_t layers = plan.model.num_layers;
    std::vector<int> chunks;
    for (int v = 2; v <= std::min<std::int64_t>(layers / pp, 16); ++v) {
      const std::int64_t over =
          (std::int64_t{pp} * v - layers % (std::int64_t{pp} * v)) % (std::int64_t{pp} * v);
      if (over <= 2 || v <= 4) chunks.push_back(v);
    }
    if (r.has("schedule") && chunks.empty()) chunks = {2};  // so that a refusal says what is wrong
    for (int v : pinned_or(r, "chunks", given.chunks, chunks)) list.push_back({name, v == 1 ? 0 : v});
  }
  return with_splits(list);
}

std::vector<ShardingChoice> shardings(const SearchRequest& r, const Mesh& mesh) {
  const int ranks = mesh.dp_cp_size();
  const Plan& given = r.work.plan;
  const Software& software = r.work.software;
  std::vector<ShardingChoice> list;
  std::vector<int> stages{0};
  if (ranks > 1 || given.offloads_optimizer()) {
    stages = {0, 1, 2, 3};
    std::erase_if(stages, [&](int zero) { return !runs_zero(software, zero, mesh); });
  }
  if (given.offloads_optimizer()) {
    stages = run_by<int>(software.offload_zero_stages, std::move(stages));
    if (!software.is_this_trainer) std::erase(stages, 0);  // shards are what lies on the host
  }
  if (r.work.dynamic_context) stages = run_by<int>(software.dynamic_context_zero_stages, std::move(stages));
  for (int zero : pinned_or(r, "zero", given.zero, std::move(stages))) {
    std::set<int> replicas{1};
    // A sharding group inside a node; of one rank it would share out nothing.
    const int inside = r.work.machine.node() / mesh.tp();
    if (r.work.software.replicated_shards && zero > 0 && inside > 1 && ranks > inside && ranks % inside == 0)
      replicas.insert(ranks / inside);
    if (r.has("hsdp")) replicas = {given.hsdp};
    for (int hsdp : replicas)
      if (hsdp == 1 || ((zero > 0 || r.has("zero")) && hsdp != ranks)) list.push_back({zero, hsdp});
  }
  return list;
}

std::vector<Recompute> recompute_kinds(const std::vector<std::string>& names, const ModelSpec& model) {
  std::vector<Recompute> kinds;
  for (const std::string& name : names) {
    const Recompute kind = parse_recompute(name, "recompute");
    if (not_in_model(kind, model).empty()) kinds.push_back(kind);
  }
  return kinds;
}

MeshesBesideZero::MeshesBesideZero(const SearchRequest& r) : software_(r.work.software) {
  if (!r.has("zero")) return;
  ShapeRefusals refusals(runner_of(r.work.software));
  each_mesh(r, [&](const Plan& plan) {
    others_ = runs(plan) && !refusals.of(plan);
    return !others_;
  });
}

bool MeshesBesideZero::runs(const Plan& plan) const { return runs_zero(software_, plan.zero, plan.mesh); }

}  // namespace echelon
