#include "plan/search_request.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <utility>

#include "base/edits.h"
#include "base/error.h"
#include "base/units.h"
#include "plan/packed_attention.h"
#include "plan/search_space.h"
#include "schedule/schedules.h"
#include "spec/plan_fields.h"

namespace echelon {
namespace {

// Whether some configuration has a legal shape; and of the given fields, the first that prevents one.
struct Legality {
  bool is_possible = false;
  std::optional<Refusal> refusal;
};
Legality legality(const SearchRequest& r) {
  const Plan& given = r.work.plan;
  for (const auto& refusal :
       {value_refusal(given, runner_of(r.work.software)), unpriced(given, r.work), schedule_refusal(given)})
    if (refusal) return {false, refusal};
  if (r.has("micro-batch") && given.micro_batch > given.global_batch)
    return {false, refused("micro-batch", {}, "must be from 1 to --global-batch {}", given.global_batch)};
  for (Axis axis : all_axes)
    if (r.has(axis_name(axis)) && r.gpus % given.mesh.size(axis) != 0)
      return {false, refused(axis_name(axis), {remedy(axis_name(axis), r.gpus, Remedy::Kind::divisors)},
                             "does not divide --gpus {}", r.gpus)};
  Legality result;
  const MeshesBesideZero beside_zero(r);
  ShapeRefusals refusals(runner_of(r.work.software));
  each_mesh(r, [&](Plan plan) {
    if (beside_zero.leave_out(plan)) return true;
    for (const ShardingChoice& sharding : shardings(r, plan.mesh)) {
      sharding.place_in(plan);
      const std::optional<Refusal>& refusal = refusals.of(plan);
      if (!refusal) {
        result.is_possible = true;
        return false;
      }
      // The length counts as given too, unless the refusal is caused by a cp that was not given.
      const bool is_given =
          r.has(refusal->field) || (refusal->field == "seq-len" && (r.has("cp") || plan.mesh.cp() == 1));
      if (is_given && !result.refusal) result.refusal = refusal;
    }
    return true;
  });
  return result;
}

}  // namespace

void SearchRequest::pin(const std::string& field, const std::string& text, const std::string& where) {
  const PlanField* const known = find_field(field);
  if (known == nullptr) refuse("{}: no field of a plan has the name {}", where, field);
  read_text(*known, work.plan, text, where);
  pinned.insert(field);
}

void SearchRequest::pin_all(const Plan& plan) {
  work.plan = plan;
  work.plan.precision = DType::f32;  // a workload has its own precision
  if (plan.mesh.etp == plan.mesh.tp()) work.plan.mesh.etp = 0;
  for (const PlanField& field : plan_fields())
    if (field.is_searched()) pinned.insert(field.name());
  if (plan.chunks == 0) pinned.erase("chunks");
}

int SearchRequest::given_ranks() const {
  Mesh given;
  for (Axis axis : all_axes)
    if (has(axis_name(axis))) given.set(axis, work.plan.mesh.size(axis));
  validate(given);
  return given.num_ranks();
}

bool SearchRequest::gives_mesh() const {
  return std::all_of(all_axes.begin(), all_axes.end(), [&](Axis axis) { return has(axis_name(axis)); });
}

Objective parse_objective(const std::string& text, const std::string& field) {
  if (text == "time") return Objective::time;
  if (text == "memory") return Objective::memory;
  refuse("{} {}: no such objective; legal: time, memory, gpus", field, text);
}

std::optional<Refusal> unpriced(const Plan& plan, const Workload& work) {
  const Software& software = work.software;
  if (is_stream(plan.schedule))
    return refused("schedule", {{"schedule", "1f1b"}},
                   "is not priced, by plan or with --machine: it does not flush, so it trains otherwise than "
                   "the others");
  if (plan.vocabulary_parallel && !software.is_this_trainer)
    return refused("vocabulary-parallel", {{"vocabulary-parallel", "off"}},
                   "{} does not cut its output layer over the pipeline; --software echelon does",
                   software.name);
  if (plan.optimizer == OptimizerKind::muon && !software.trains_with_muon)
    return refused("optimizer", {{"optimizer", "adamw"}},
                   "{} is not known to train with it; --software echelon does", software.name);
  if (plan.offload != Offload::none)
    if (const std::string why = no_host(work, plan); !why.empty()) {
      Refusal refusal = refused("offload", {}, "{}", why);
      Plan other = plan;
      for (Offload one : {Offload::optimizer, Offload::activations, Offload::none}) {
        other.offload = one;
        if (one == Offload::none || no_host(work, other).empty())
          refusal.remedies.push_back({"offload", name_of(one)});
      }
      return refusal;
    }
  if (plan.mask == AttentionMask::document && work.documents.empty())
    return refused("mask", {{"mask", "causal"}},
                   "is priced with --document-lengths, which says what is packed");
  // The default is allowed: it may just be what a plan's file says, and has little effect.
  if (cuts_each_document(work) && plan.mesh.cp() > 1 && plan.context_kind != ContextKind::ulysses &&
      plan.context_balance != Plan{}.context_balance)
    return refused("cp-balance", {{"cp-balance", name_of(Plan{}.context_balance)}}, "has no effect {}",
                   what_cuts_documents(software, work.dynamic_context));
  if (work.dynamic_context && !is_power_of_two(plan.mesh.cp()))
    return refused("cp", {}, "--dynamic-cp has groups of 1, 2, 4, 8 and so on");
  if (const std::int64_t most = most_replicas(plan.model, plan.mesh.ep), asked = work.expert_load.replicas;
      asked > most)
    return refused("ep", {}, "a rank has room for --expert-replicas 0 to {} of {} experts, not {}", most,
                   plan.model.num_experts, asked);
  if (!plan.schedule_text.empty())
    return refused("schedule", {}, "a schedule of one's own is not priced; legal: a name");
  for (const PlanField& field : plan_fields()) {
    if (field.priced == nullptr) continue;
    Refusal refusal = refused(field.name(), {}, "is not priced, by plan or with --machine");
    std::istringstream priced(field.priced);
    for (std::string value; std::getline(priced, value, '|');)
      refusal.remedies.push_back({field.name(), value});
    const std::string text = text_of(field, plan);
    if (std::none_of(refusal.remedies.begin(), refusal.remedies.end(),
                     [&](const Remedy& one) { return one.value == text; }))
      return refusal;
  }
  return {};
}

bool makes_possible(const Remedy& remedy, SearchRequest request) {
  if (find_field(remedy.field) == nullptr) return true;  // of another flag
  request.pin(remedy.field, remedy.value, remedy.field);
  return legality(request).is_possible;
}

// Whether the given fields allow plans whose activations the program can offload.
static bool can_offload_activations(const SearchRequest& r) {
  const Software& s = r.work.software;
  const Plan& given = r.work.plan;
  return !(r.has("recompute") && !offloads_beside(s, given.recompute)) &&
         !(r.has("pp") && given.mesh.pp() > 1 && !s.activation_offload_pipelines);
}

std::vector<SearchRequest> offloading(const SearchRequest& request) {
  std::vector<SearchRequest> all;
  if (request.has("offload")) return all;
  for (Offload what : {Offload::optimizer, Offload::activations, Offload::both}) {
    SearchRequest with = request;
    with.pin("offload", name_of(what), "offload");
    if (with.work.plan.offloads_activations() && !can_offload_activations(with)) continue;
    if (no_host(with.work, with.work.plan).empty() && legality(with).is_possible)
      all.push_back(std::move(with));
  }
  return all;
}

void check_links(const SearchRequest& r) {
  const Machine& m = r.work.machine;
  if (r.gpus > m.tiers.back().ranks)
    refuse(
        "--gpus {}: {} says how {} devices are linked, and no more; give up to {}, or its file a further "
        "[[tier]]",
        r.gpus, m.name, m.tiers.back().ranks, m.tiers.back().ranks);
}

void check_request(const SearchRequest& r) {
  validate(r.work.plan.model);
  validate(r.work.machine);
  validate(r.work.software);
  if (r.gpus < 1 || r.gpus > Mesh::most_ranks)
    refuse("--gpus {}: must be from 1 to {}", r.gpus, Mesh::most_ranks);
  check_links(r);
  if (const Legality found = legality(r); !found.is_possible && found.refusal) {
    std::vector<Remedy> legal;
    for (const Remedy& one : found.refusal->all_remedies())
      if (makes_possible(one, r)) legal.push_back(one);
    throw PlanRefusal(r.work.plan, *found.refusal).with(std::move(legal));
  }
  const int all = r.given_ranks();
  if (r.gives_mesh() ? all != r.gpus : r.gpus % all != 0)
    refuse("--gpus {}: the axes that are given make {}", r.gpus, counted(all, "rank"));
  for (const std::string& name : r.work.software.schedules.value_or(std::vector<std::string>{}))
    if (std::find(schedule_names().begin(), schedule_names().end(), name) == schedule_names().end())
      refuse("--software {}: schedules = {}: unknown{}; legal: {}", r.work.software.name, name,
             did_you_mean(name, schedule_names()), fmt::join(schedule_names(), ", "));
  if (!(r.memory_margin >= 0 && r.memory_margin < 1))
    refuse("--memory-margin {}: must be from 0 to below 1, a part of the memory", r.memory_margin);
  if (r.top < 1 || r.top > 10000) refuse("--top {}: must be from 1 to 10000", r.top);
}

}  // namespace echelon
