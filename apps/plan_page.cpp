#include "apps/plan_page.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "apps/command_text.h"
#include "apps/plan_field_flags.h"
#include "base/json_text.h"
#include "base/shell_word.h"
#include "base/units.h"
#include "draw/page.h"
#include "plan/explain.h"
#include "plan/survey.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

// The command that prices only this plan: the request, with every field that has an effect pinned.
std::string pinned_command(const Estimate& e, const SearchRequest& request, const CLI::App& verb) {
  std::set<std::string> left_out{"--plan",      "--gpus",        "--out",     "--html",       "--json",
                                 "--explain",   "--top",         "--against", "--launch-for", "--launch-out",
                                 "--objective", "--target-time", "--colour"};
  for (const PlanField& field : plan_fields())
    if (field.is_flag_of_plan() && field.is_searched()) left_out.insert(field.flag());
  std::string text = command_text(verb, left_out);
  if (is_given(verb, "--plan")) {  // it sets what flags do not
    const auto say = [&](const char* flag, const std::string& value) {
      if (!is_given(verb, flag)) text += fmt::format(" {} {}", flag, shell_word(value));
    };
    for (const PlanField& field : plan_fields())
      if (field.is_flag_of_plan() && !field.is_searched() && !text_of(field, e.plan).empty())
        say(field.flag().c_str(), text_of(field, e.plan));
    say("--machine", request.work.machine.name);
    say("--software", request.work.software.name);
    say("--precision", precision_name(request.work.precision));
  }
  std::set<std::string> idle;
  for (const FlagNeed& need : plan_needs(e.plan))
    if (!need.acts) idle.insert(need.flag);
  for (const PlanField& field : plan_fields()) {
    if (!field.is_flag_of_plan() || !field.is_searched() || idle.contains(field.flag())) continue;
    const std::string value = text_of(field, e.plan);
    const bool says_nothing = value.empty() || (field.name() == "chunks" && e.plan.chunks == 0) ||
                              (field.name() == "etp" && e.plan.mesh.etp == 0);
    if (!says_nothing) text += fmt::format(" {} {}", field.flag(), shell_word(value));
  }
  return text;
}

// A plan as a point or a cell.
ordered_json point(const Estimate& e, const SearchRequest& request, const CLI::App& verb) {
  return {{"summary", summary(e.plan)},
          {"step_seconds", e.seconds},
          {"memory_bytes", e.memory.total()},
          {"mfu", e.mfu},
          {"command", pinned_command(e, request, verb)}};
}

ordered_json survey_json(const Survey& survey, const SearchRequest& request, const CLI::App& verb) {
  ordered_json cells = ordered_json::array(), front = ordered_json::array();
  for (const SurveyCell& cell : survey.cells) {
    ordered_json one{{"tp", cell.tp}, {"pp", cell.pp}};
    if (!cell.refusal.empty()) one["refusal"] = cell.refusal;
    if (!cell.result.plans.empty()) one["plan"] = point(cell.result.plans.front(), request, verb);
    if (cell.result.nearest) one["refusal"] = explain_nothing(cell.result, request.gpus);
    for (const auto& [reason, rejected] : cell.result.rejected)
      if (rejected.count > 0)
        one["rejected"][reason] = {{"count", rejected.count}, {"examples", rejected.examples}};
    cells.push_back(one);
  }
  for (const Estimate& e : survey.front) front.push_back(point(e, request, verb));
  return {{"cells", cells},
          {"cells_left_out", survey.cells_left_out},
          {"front", front},
          {"front_step", front_step},
          {"tie", tie}};
}

// Numbers the distinct texts, which occur often.
class Numbered {
 public:
  std::size_t operator()(const std::string& words) {
    const auto [at, is_new] = numbers_.try_emplace(words, all_.size());
    if (is_new) all_.push_back(words);
    return at->second;
  }
  const std::vector<std::string>& all() const { return all_; }

 private:
  std::map<std::string, std::size_t> numbers_;
  std::vector<std::string> all_;
};

// The outcome for every plan that was considered, in groups: sizes of the mesh, micro-batch and
// recomputation; then either their number and common fate, or pipelines, shardings and the fate of each. The
// figure is seconds, megabytes, or the number of a reason. After `most_listed` plans the rest is left out.
std::string looked_json(const SearchResult& result) {
  constexpr std::size_t most_listed = 300'000;
  Numbered pipelines, shardings, recomputes;
  std::string groups;
  const auto out = std::back_inserter(groups);
  const auto figure_of = [](const Outcome& o) {
    switch (o.fate) {
      case Fate::memory:
      case Fate::larger:
        return fmt::format("{:.0f}", 1e-6 * o.figure);
      case Fate::schedule:
      case Fate::shape:
        return fmt::format("{}", o.why);
      default:
        return fmt::format("{:.5g}", o.figure);
    }
  };
  std::size_t listed = 0;
  std::int64_t told = 0;
  for (const Looked& looked : result.looked) {
    listed += std::max<std::size_t>(1, looked.each.size());
    if (listed > most_listed) break;
    told += looked.count;
    const Mesh& mesh = looked.mesh;
    fmt::format_to(out, "{}[{},{},{},{},\"{}\",{},{},{},{},", groups.empty() ? "" : ",\n", mesh.dp(),
                   mesh.tp(), mesh.pp(), mesh.cp(), mesh.cp() > 1 ? name_of(looked.context_kind) : "",
                   mesh.ep, mesh.ep > 1 ? mesh.expert_cut() : 1, looked.micro_batch,
                   looked.recompute ? static_cast<int>(recomputes(recompute_name(*looked.recompute))) : -1);
    if (looked.each.empty()) {
      fmt::format_to(out, "{},{},{}]", looked.count, static_cast<int>(looked.all.fate),
                     figure_of(looked.all));
      continue;
    }
    std::vector<std::size_t> runs, shards;
    for (const PipelineChoice& one : looked.pipelines)
      runs.push_back(pipelines(fmt::format("schedule={}{}{}", one.schedule,
                                           one.chunks > 1 ? fmt::format(" chunks={}", one.chunks) : "",
                                           one.balanced ? " layers-per-stage=auto" : "")));
    for (const ShardingChoice& one : looked.shardings)
      shards.push_back(shardings(fmt::format(
          "zero={}{}{}", one.zero, one.hsdp > 1 ? fmt::format(" hsdp={}", one.hsdp) : "",
          looked.offload == Offload::none ? "" : fmt::format(" offload={}", name_of(looked.offload)))));
    fmt::format_to(out, "[{}],[{}],[", fmt::join(runs, ","), fmt::join(shards, ","));
    const char* comma = "";
    for (const Outcome& one : looked.each)
      fmt::format_to(out, "{}{},{}", std::exchange(comma, ","), static_cast<int>(one.fate), figure_of(one));
    groups += "]]";
  }
  return fmt::format(
      "{{\"told\":{},\"pipelines\":{},\"shardings\":{},\"recomputes\":{},\"whys\":{},\"groups\":[{}]}}", told,
      json_text(ordered_json(pipelines.all())), json_text(ordered_json(shardings.all())),
      json_text(ordered_json(recomputes.all())), json_text(ordered_json(result.whys)), groups);
}

// Sizes of the axes, and the coordinates of as many ranks as are drawn.
ordered_json mesh_json(const Mesh& mesh) {
  constexpr int most_ranks = 1024;
  ordered_json sizes, ranks = ordered_json::array();
  for (Axis axis : traffic_axes) sizes[axis_name(axis)] = mesh.size(axis);
  for (int r = 0; r < std::min(most_ranks, mesh.num_ranks()); ++r) {
    const Coordinates at = mesh.coordinates(r);
    ranks.push_back({at.pp, at.dp, at.cp, at.tp, mesh.ep_index(at)});
  }
  return {{"sizes", sizes}, {"ranks", ranks}};
}

// One plan for each schedule among the ranked plans, the chosen one first, as far as they are not too large
// to draw.
std::vector<PageTrack> tracks_of_plans(const SearchResult& result, const SearchRequest& request) {
  constexpr std::size_t most_tracks = 4, most_spans = 60'000;
  StepModel model(request.work);
  std::vector<PageTrack> tracks;
  std::set<std::string> drawn;
  for (std::size_t i = 0; i < result.plans.size() && tracks.size() < most_tracks; ++i) {
    const Estimate& e = result.plans[i];
    const int pp = e.plan.mesh.pp();
    const std::size_t spans = static_cast<std::size_t>(3 * e.microbatches) * static_cast<std::size_t>(pp) *
                              static_cast<std::size_t>(std::max(1, e.plan.chunks));
    if (spans > most_spans || !drawn.insert(fmt::format("{} {}", e.plan.schedule, e.plan.chunks)).second)
      continue;
    PageTrack one;
    one.track = {fmt::format("{}{}", i == 0 ? "chosen: " : "", summary(e.plan)), "", model.timeline(e.plan)};
    one.track.note = fmt::format("passes take {} of a step of {}, bubble {:.1f}%",
                                 format_seconds(one.track.timeline.makespan()), format_seconds(e.seconds),
                                 100 * e.bubble_fraction);
    one.step_microbatches = static_cast<int>(e.microbatches);
    one.two_steps = model.timeline(e.plan, 2);
    const auto curves = model.activations_over_time(e, one.track.timeline);
    for (std::size_t r = 0; r < curves.size(); ++r) {
      double most = 0;
      for (const auto& [time, held] : curves[r]) most = std::max(most, held);
      RankHolding holding{e.rank_memory[r], curves[r]};
      std::int64_t& rest = holding.kept[MemoryCategory::activations];
      rest = std::max<std::int64_t>(0, rest - static_cast<std::int64_t>(most));
      one.memory.push_back(std::move(holding));
    }
    tracks.push_back(std::move(one));
  }
  return tracks;
}

}  // namespace

std::string plan_survey(const SearchRequest& request, const CLI::App& verb) {
  return json_text(survey_json(survey(request), request, verb));
}

std::string plan_page(const SearchResult& result, const SearchRequest& request,
                      const std::vector<NearSize>& near, const std::string& answer, const CLI::App& verb) {
  const Workload& work = request.work;
  const Plan& asked = work.plan;
  Page page;
  page.kind = "plan";
  page.title = fmt::format("{} on {} {}", asked.model.name, request.gpus, work.machine.name);
  page.subtitle =
      fmt::format("{} of {} a step, {}, by {}", counted(asked.global_batch, "sequence"),
                  counted(asked.seq_len, "token"), precision_name(work.precision), work.software.name);
  page.command = command_text(verb);
  page.time_unit = "s";
  page.memory_unit = "B";
  ordered_json plans = ordered_json::array();
  for (const Estimate& e : result.plans) {
    const Estimate& best = result.plans.front();
    ordered_json ranks = ordered_json::array();
    for (const Memory& memory : e.rank_memory) ranks.push_back(memory.bytes);
    plans.push_back({{"summary", summary(e.plan)},
                     {"command", pinned_command(e, request, verb)},
                     {"rank_memory", ranks},
                     {"why_not", &e == &best ? "" : explain_loser(best, e)}});
  }
  page.members = {{"answer", answer},
                  {"plans", json_text(plans)},
                  {"machine", json_text(ordered_json{
                                  {"name", work.machine.name},
                                  {"node", work.machine.node()},
                                  {"gpus", request.gpus},
                                  {"usable_bytes", (work.machine.memory_bytes - work.machine.reserved_bytes) *
                                                       (1 - request.memory_margin)}})},
                  {"looked", looked_json(result)},
                  {"survey", surveys_later() ? "null" : plan_survey(request, verb)}};
  if (result.plans.empty()) {
    page.members.emplace_back("nothing", json_text(ordered_json(explain_nothing(result, request, near))));
  } else {
    page.tracks = tracks_of_plans(result, request);
    page.members.emplace_back("mesh", json_text(mesh_json(result.plans.front().plan.mesh)));
  }
  page.members.emplace_back("explanation", json_text(ordered_json(plans_table(result, work).text() +
                                                                  explain_winner(result, work))));
  return page_html(page);
}

}  // namespace echelon
