#include "apps/simulate_flags.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "apps/flag_needs.h"
#include "apps/flag_values.h"
#include "apps/help.h"
#include "apps/simulate_drawing.h"
#include "base/error.h"
#include "base/open_file.h"
#include "schedule/schedules.h"

namespace echelon {
namespace {

struct OfFbw {
  double f, b, w;
};

// "1,1,1"
OfFbw parse_fbw(const std::string& flag, const std::string& text, double least) {
  const auto parts = split(text, ",");
  double x[3];
  if (parts.size() != 3) refuse("{} {}: must be three numbers F,B,W", flag, text);
  for (std::size_t k = 0; k < 3; ++k) {
    x[k] = parse_number<double>(flag, parts[k]);
    if (!(x[k] >= least) || x[k] > 1e12)
      refuse("{} {}: {} must be from {} to 1e12", flag, text, parts[k], least);
  }
  return {x[0], x[1], x[2]};
}

// "1,1,1;2,2,2", or a file with a line for each stage.
std::vector<OfFbw> parse_stages(const char* flag, const std::string& given, double least) {
  std::vector<OfFbw> stages;
  if (given.empty()) return stages;
  const bool is_inline = given.find(',') != std::string::npos;
  const std::string text = is_inline ? given : read_text(given, flag);
  for (const std::string& stage : split(text, ";\n"))
    if (!stage.empty() && stage[0] != '#') stages.push_back(parse_fbw(flag, stage, least));
  if (stages.empty()) refuse("{} {}: holds no numbers; legal: F,B,W of each stage", flag, given);
  return stages;
}

}  // namespace

std::vector<std::string> SimulateFlags::names() const {
  if (!compare.empty()) return split(compare, ",");
  return {schedule.empty() ? "1f1b" : schedule};
}

void SimulateFlags::refuse_idle(const CLI::App& app) const {
  const auto all = names();
  const auto any = [&](const auto& fits) { return std::any_of(all.begin(), all.end(), fits); };
  const auto has = [&](const char* name) { return any([&](const auto& one) { return one == name; }); };
  const std::string asked =
      fmt::format("with {} {}", compare.empty() ? "--schedule" : "--compare", fmt::join(all, ","));
  const std::vector<Remedy> searched{advice("--schedule", "zb-auto")},
      cut{advice("--schedule", "interleaved")};
  echelon::refuse_idle(
      app, {{"--chunks", chunks == 0 || any([](const auto& one) { return one.starts_with("interleaved"); }),
             asked, cut},
            {"--group-size", group == 0 || has("interleaved"), asked, cut},
            {"--group-size",
             group == 0 || chunks != 1,
             "with --chunks 1, which has one group",
             {advice("--chunks", "2")}},
            {"--steps", steps == 1 || any(is_stream), asked, {advice("--schedule", "2bw")}},
            {"--times", stage_times.empty(), "with --stage-times", {}},
            {"--vocabulary-parallel",
             !output_layer.empty(),
             "without --output-layer, the times of what it cuts",
             {advice("--output-layer", "1,1,1")}},
            {"--stage-memory", has("zb-auto"), asked, searched},
            {"--activation-limit", has("zb-auto"), asked, searched},
            {"--activation-limit",
             !vocabulary_parallel,
             "with --vocabulary-parallel, which lets ranks hold more than the order that is searched",
             {}}});
  const bool is_drawn = !out.empty() || (!json && (compare.empty() || is_format_given));
  refuse_idle_drawing(*this, app, is_drawn);
}

void SimulateFlags::read(const CLI::App& app) {
  if (!schedule.empty() && !compare.empty()) refuse("--schedule excludes --compare; give one of the two");
  read_format(*this, {"text", "svg", "html", "perfetto", "rows", "csv", "lowered"});
  check_text_options(*this);
  refuse_idle(app);
  if (!(message >= 0) || message > 1e12) refuse("--comm-time {}: must be from 0 to 1e12", message);
  if (!(overlap_factor > 0) || overlap_factor > 1)
    refuse("--overlap-factor {}: must be above 0 and at most 1", overlap_factor);
  const auto at_least_1 = [](const char* flag, int value) {
    if (value < 1) refuse("{} {}: must be at least 1", flag, value);
  };
  at_least_1("--steps", steps);
  at_least_1("--pp", ranks());
  at_least_1("--microbatches", microbatches());
  if (chunks < 0) refuse("--chunks {}: must be at least 1", chunks);
  if (group < 0) refuse("--group-size {}: must be at least 0", group);
  check_size(ranks(), microbatches(), chunks, steps);

  const OfFbw full = parse_fbw("--times", times, 0);
  full_stage = {full.f, full.b, full.w};
  for (const OfFbw& x : parse_stages("--stage-times", stage_times, 0)) stages.push_back({x.f, x.b, x.w});
  const auto takes_time = [](const StageTimes& t) {
    return t.forward > 0 || t.backward_input > 0 || t.backward_weight > 0;
  };
  if (stages.empty() && !takes_time(full_stage)) refuse("--times {}: must not all be 0", times);
  if (!stages.empty() && std::none_of(stages.begin(), stages.end(), takes_time))
    refuse("--stage-times {}: must not all be 0", stage_times);

  if (!output_layer.empty()) {
    const OfFbw layer = parse_fbw("--output-layer", output_layer, 0);
    head = {layer.f, layer.b, layer.w};
  }

  for (const OfFbw& x : parse_stages("--stage-memory", stage_memory, -1e12))
    memory.push_back({x.f, x.b, x.w});
  if (memory.empty()) memory.push_back({});
  if (activation_limit.empty()) return;
  for (const std::string& limit : split(activation_limit, ",")) {
    limits.push_back(parse_number<double>("--activation-limit", limit));
    if (!(limits.back() > 0)) refuse("--activation-limit {}: {} must be above 0", activation_limit, limit);
  }
}

void SimulateFlags::add_to(CLI::App& app) {
  heading(app, common_flags);
  app.add_option("--schedule", schedule, "A published schedule, or a file of rows or torch's CSV")
      ->type_name("NAME|FILE")
      ->default_str("1f1b");
  app.add_option(
         "--compare", compare,
         "Several, in one table and one drawing; with --moe: ways of balancing (default: each by itself)")
      ->type_name("A,B,...");
  add_number(app, "--pp", given_ranks, "Pipeline ranks (default: 4, or the file's)");
  add_number(app, "--microbatches", given_microbatches, "Microbatches per step (default: 8, or the file's)");
  app.add_option("--times", times, "Time of forward, input gradient and weight gradient of a full stage")
      ->type_name("F,B,W")
      ->default_str("1,1,1");
  app.add_option("--out", out, "Where the drawing goes (default: standard output)")->type_name("FILE");
  app.add_option("--format", format,
                 "A drawing, or the instructions: rows, torch's csv, lowered (with messages); with --moe: "
                 "text, svg or csv")
      ->type_name("text|svg|html|perfetto|rows|csv|lowered")
      ->default_str("text");
  app.add_flag("--json", json, "Report as one JSON object on standard output");
  heading(app, "Schedule");
  add_number(app, "--chunks", chunks, "Model chunks per rank; 0: the schedule's own number");
  add_number(
      app, "--group-size", group,
      "Microbatches that interleaved takes through a chunk before the next chunk; 0: as many as ranks");
  app.add_flag("--vocabulary-parallel", vocabulary_parallel,
               "Cut the output layer over all ranks instead of leaving it to the last stage");
  add_number(app, "--steps", steps,
             "Steps to run of pipedream and 2bw, which do not flush; with --moe: steps (default 100)");
  heading(app, "Costs");
  app.add_option("--stage-times", stage_times,
                 "F, B and W of each stage, from stage 0 on, in place of --times")
      ->type_name("F,B,W;...|FILE");
  app.add_option("--output-layer", output_layer,
                 "What the output layer takes besides the last stage's own time (default: nothing)")
      ->type_name("F,B,W");
  add_number(app, "--comm-time", message, "Time of one message between two ranks");
  add_number(app, "--overlap-factor", overlap_factor,
             "Time of two passes run together, over the sum of their times");
  app.add_option("--activation-limit", activation_limit,
                 "Most that zb-auto may hold, in activations of a full stage: one for all ranks, or one for "
                 "each (default: the number of ranks, as 1f1b)")
      ->type_name("A[,A...]");
  app.add_option("--stage-memory", stage_memory,
                 "What F, B and W add to that memory, for all stages or each (default: 1,0,-1)")
      ->type_name("F,B,W;...|FILE");
  heading(app, "Drawing");
  add_number(app, "--width", width, "Columns of the text drawing; 0: the terminal's");
  colour.add_to(app, "Colours in the text drawing");
}

}  // namespace echelon
