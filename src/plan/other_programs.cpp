#include "plan/other_programs.h"

#include <fmt/format.h>
#include <algorithm>
#include <tuple>

#include "base/error.h"
#include "plan/packed_attention.h"

namespace echelon {
namespace {

// Without any such number, an expert's products are priced like a dense layer's.
bool knows_experts(const Software& s) { return s.expert_launch_seconds > 0 || s.expert_efficiency != 1; }
// And scans are priced as if they reached the machine's rate.
bool knows_scans(const Software& s) { return s.scan_efficiency != 1; }

}  // namespace

std::vector<std::string> not_compared(const Workload& work) {
  std::vector<std::string> names;
  const bool scans = work.plan.model.num_state_space_layers() > 0;
  const bool routes = work.plan.model.experts != Experts::none && knows_experts(work.software);
  if (!scans && !routes) return names;
  for (const std::string& name : software_preset_names()) {
    const Software software = load_software(name);
    if (name != work.software.name && !software.is_this_trainer &&
        ((scans && !knows_scans(software)) || (routes && !knows_experts(software))))
      names.push_back(name);
  }
  return names;
}

std::vector<OtherProgram> other_programs(const SearchRequest& request, const Estimate& best) {
  std::vector<OtherProgram> found;
  const Software& own = request.work.software;
  const auto look = [&](const std::string& name, const std::string& how, const Software& software) {
    SearchRequest other = request;
    other.work.software = software;
    // A program that lacks what was asked for, such as state on the host, is not an answer.
    if (unpriced(other.work.plan, other.work)) return;
    if (!request.work.documents.empty() && !no_documents(other.work).empty()) return;
    auto plan = best_within(other, best.seconds / (1 + tie));
    if (!plan || !not_run(other.work, plan->plan).empty()) return;
    found.push_back({name, how, software.as_of, not_run(request.work, plan->plan), std::move(*plan)});
  };
  Software free = own;
  free.schedules.reset(), free.zero_stages.reset(), free.pipeline_zero_stages.reset();
  free.tensor_zero_stages.reset(), free.context_kinds.reset();
  free.context_precisions.reset(), free.context_cuts_pairs = false;
  free.replicated_shards = free.context_beside_pipelines = free.tensor_parallel = true;
  free.interleaves_whole_groups = false;
  free.tensor_repeats_heads = free.context_repeats_heads = true;
  free.activation_offload_pipelines = true, free.activation_offload_recompute.reset();
  look("", "without its limits", free);
  if (best.plan.offload == Offload::none)
    for (const SearchRequest& with : offloading(request))
      if (auto plan = best_within(with, best.seconds / (1 + tie)))
        found.push_back({"",
                         fmt::format("with --offload {}", name_of(plan->plan.offload)),
                         own.as_of,
                         {},
                         std::move(*plan)});
  if (!request.work.documents.empty() && !request.work.dynamic_context && own.dynamic_context_zero_stages &&
      !request.has("micro-batch")) {
    SearchRequest dynamic = request;
    dynamic.work.dynamic_context = true;
    if (auto plan = best_within(dynamic, best.seconds / (1 + tie)))
      if (not_run(dynamic.work, plan->plan).empty())
        found.push_back({"", "with --dynamic-cp", own.as_of, {}, std::move(*plan)});
  }
  const std::vector<std::string> unknown = not_compared(request.work);
  for (const std::string& name : software_preset_names()) {
    const Software software = load_software(name);
    if (name != own.name && !software.is_this_trainer &&
        std::find(unknown.begin(), unknown.end(), name) == unknown.end())
      look(name, "", software);
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return std::tie(a.plan.seconds, b.as_of) < std::tie(b.plan.seconds, a.as_of);
  });
  // Of several versions of a program with the same result, keeps the newest.
  const auto same = [](const OtherProgram& a, const OtherProgram& b) {
    return a.name.empty() == b.name.empty() && a.how == b.how && a.plan.seconds == b.plan.seconds &&
           summary(a.plan.plan) == summary(b.plan.plan);
  };
  found.erase(std::unique(found.begin(), found.end(), same), found.end());
  return found;
}

}  // namespace echelon
