#include "apps/plan_field_flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "base/open_file.h"
#include "schedule/schedules.h"

namespace echelon {
namespace {

std::vector<Remedy> sizes(Axis axis) {
  std::vector<Remedy> all;
  for (int size : {2, 3, 4, 6, 8}) all.push_back(remedy(axis_name(axis), size));
  return all;
}

}  // namespace

CLI::Option* add_field(CLI::App& app, const PlanField& field, std::map<std::string, std::string>& values,
                       const std::string& shown_default) {
  const std::string help =
      fmt::format(fmt::runtime(field.help), fmt::arg("schedules", fmt::join(schedule_names(), ", ")));
  CLI::Option* option = app.add_option(field.flag(), values[field.name()], help)->type_name(field.values());
  if (field.values().ends_with(",..."))
    option->multi_option_policy(CLI::MultiOptionPolicy::Join)->delimiter(',');
  if (help.find("(default") == help.npos) option->default_str(shown_default);
  return option;
}

void read_field(const PlanField& field, Plan& plan, const std::string& value, const std::string& flag) {
  read_text(field, plan, value, flag);
  const auto& names = schedule_names();
  std::error_code none;
  if (field.name() == "schedule" && std::find(names.begin(), names.end(), value) == names.end() &&
      std::filesystem::exists(value, none))
    plan.schedule_text = read_text(value, flag);
}

std::vector<FlagNeed> plan_needs(const Plan& p) {
  const int pp = p.mesh.size(Axis::pp), tp = p.mesh.size(Axis::tp), cp = p.mesh.size(Axis::cp);
  const int state_ranks = p.mesh.dp_cp_size();
  const std::string schedule = fmt::format("with --schedule {}", p.schedule),
                    zero = fmt::format("with --zero {}", p.zero), alone = "with --dp 1 and --cp 1";
  const bool cuts = p.zero >= 1 && p.zero <= 3;
  const bool is_hybrid = p.context_kind == ContextKind::hybrid;
  const bool has_experts = p.model.experts != Experts::none;
  const std::string expertless = fmt::format("with {}, which has no experts", p.model.name);
  const bool is_interleaved = p.schedule_text.empty() && p.schedule.starts_with("interleaved");
  return {
      {"--schedule", pp != 1, "with --pp 1", sizes(Axis::pp)},
      {"--layers-per-stage", pp != 1, "with --pp 1", sizes(Axis::pp)},
      {"--chunks", pp != 1 || p.chunks == 0, "with --pp 1", sizes(Axis::pp)},
      {"--chunks", is_interleaved || p.chunks == 0, schedule, {{"schedule", "interleaved"}}},
      {"--vocabulary-parallel", pp != 1 || !p.vocabulary_parallel, "with --pp 1", sizes(Axis::pp)},
      {"--optimizer-barrier", pp != 1 || p.optimizer_barrier, "with --pp 1", sizes(Axis::pp)},
      {"--sp", tp != 1 || !p.sequence_parallel, "with --tp 1", sizes(Axis::tp)},
      {"--cp-kind", cp != 1, "with --cp 1", sizes(Axis::cp)},
      {"--cp-balance", cp != 1, "with --cp 1", sizes(Axis::cp)},
      {"--cp-balance",
       p.context_kind != ContextKind::ulysses,
       "with --cp-kind ulysses",
       {{"cp-kind", "ring"}}},
      {"--cp-balance",
       !is_hybrid || p.ulysses != cp,
       fmt::format("with --cp-ulysses {} of --cp {}", p.ulysses, cp),
       {{"cp-ulysses", "1"}}},
      {"--cp-ulysses", cp != 1, "with --cp 1", sizes(Axis::cp)},
      {"--cp-ulysses",
       is_hybrid,
       fmt::format("with --cp-kind {}", name_of(p.context_kind)),
       {{"cp-kind", "hybrid"}}},
      {"--document-end", p.mask == AttentionMask::document, "with --mask causal", {{"mask", "document"}}},
      {"--drop", has_experts, expertless, {}},
      {"--balance-scope", has_experts, expertless, {}},
      {"--drop", p.balancing.capacity != 0, "with --capacity 0", {{"capacity", "1.25"}}},
      {"--balance-scope",
       p.balancing.has_counts() || p.balancing.capacity != 0,
       "without --aux-loss, --device-loss, --communication-loss or --capacity",
       {{"aux-loss", "0.01"}}},
      {"--zero", !cuts || state_ranks != 1, alone, sizes(Axis::dp)},
      {"--zero",
       !cuts || p.hsdp != state_ranks,
       fmt::format("with --hsdp {} of {} ranks", p.hsdp, state_ranks),
       {{"hsdp", "1"}}},
      {"--zero-prefetch", p.zero == 3, zero, {{"zero", "3"}}},
      {"--zero-prefetch", state_ranks != 1, alone, sizes(Axis::dp)},
      {"--zero-prefetch",
       p.hsdp != state_ranks,
       fmt::format("with --hsdp {} of {} ranks", p.hsdp, state_ranks),
       {{"hsdp", "1"}}},
      {"--bucket", p.zero == 0, zero, {{"zero", "0"}}},
      {"--bucket", state_ranks != 1, alone, sizes(Axis::dp)},
      {"--compress", p.compression.kind == CompressionKind::none || state_ranks != 1, alone, sizes(Axis::dp)},
      {"--offload-dir",
       p.offload != Offload::none,
       "with --offload none",
       {{"offload", "optimizer"}, {"offload", "activations"}}},
      {"--collectives",
       std::any_of(all_axes.begin(), all_axes.end(), [&](Axis axis) { return p.mesh.size(axis) > 1; }),
       "with one rank", sizes(Axis::dp)},
  };
}

}  // namespace echelon
