#include "schedule/simulate.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>

#include "apps/command_text.h"
#include "apps/flag_needs.h"
#include "apps/flag_values.h"
#include "apps/progress_line.h"
#include "apps/simulate_block.h"
#include "apps/simulate_drawing.h"
#include "apps/simulate_experts.h"
#include "apps/simulate_flags.h"
#include "apps/simulate_packing.h"
#include "apps/simulate_report.h"
#include "apps/terminal.h"
#include "apps/verbs.h"
#include "base/edits.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"
#include "base/units.h"
#include "schedule/lower.h"
#include "schedule/schedules.h"
#include "schedule/text.h"
#include "schedule/vocabulary.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

class Simulate {
 public:
  Simulate(const SimulateFlags& flags, const CLI::App& app) : f_(flags), app_(app) {}

  int run() {
    std::vector<SimulationReport> reports = with_progress(
        "simulate", f_.json, [&](const Progress& progress) { return all_reports(progress); });
    // The file first: if it cannot be written, nothing has been printed yet.
    if (!f_.out.empty()) draw(reports);
    print_numbers(reports);
    if (f_.out.empty()) draw(reports);
    const bool any =
        std::any_of(reports.begin(), reports.end(), [](const auto& r) { return r.unfit.empty(); });
    return any ? 0 : 1;
  }

  std::vector<SimulationReport> all_reports(const Progress& progress) const {
    std::vector<SimulationReport> reports;
    for (const std::string& name : f_.names()) {
      echelon::report(progress, -1, name);
      reports.push_back(f_.compare.empty() ? report("--schedule", name, f_.chunks, f_.steps)
                                           : compared(name));
    }
    refuse_idle_costs(reports);
    return reports;
  }

  SimulationReport report_on(Schedule schedule) const {
    SimulationCosts costs = costs_of(schedule.name, schedule.num_stages, schedule.stage_fraction());
    if (f_.vocabulary_parallel && schedule.vocabulary_parts == 0) {
      costs.vocabulary_part = part_of_head(schedule.num_ranks());
      schedule = with_vocabulary_parallelism(schedule, costs);
    } else if (schedule.vocabulary_parts > 0) {
      if (f_.output_layer.empty())
        refuse(
            "{}: has parts of the output layer (V, VW), and no times for it; legal: with --output-layer "
            "1,1,1",
            schedule.name);
      costs.vocabulary_part = part_of_head(schedule.vocabulary_parts);
    } else {
      add_head(costs, schedule.num_stages);
    }
    return echelon::report_on(std::move(schedule), costs);
  }

 private:
  // Refuses costs without effect because no schedule has what they are for.
  void refuse_idle_costs(const std::vector<SimulationReport>& reports) const {
    bool any_fits = false, any_message = false, any_pair = false;
    for (const SimulationReport& r : reports) {
      any_fits |= r.unfit.empty();
      any_message |= r.unfit.empty() && r.simulation.messages > 0;
      for (const auto& list : r.schedule.ranks)
        for (const Instruction& i : list) any_pair |= i.overlaps_next;
    }
    if (any_fits)
      refuse_idle(app_, {{"--comm-time",
                          any_message || f_.message == 0,
                          "without messages between ranks",
                          {advice("--pp", "4")}},
                         {"--overlap-factor",
                          any_pair || f_.overlap_factor == 1,
                          "without passes that run as a pair",
                          {advice("--schedule", "dualpipev")}}});
  }

  static bool is_name(const std::string& name) { return contains(schedule_names(), name); }

  SimulationReport report(const char* flag, const std::string& name, int chunks, int steps) const {
    if (!is_name(name)) return report_on(read(flag, name));
    check_request(name, f_.ranks(), f_.microbatches(), chunks, steps);
    if (name == "zb-auto") return search();
    if (name == "interleaved") return interleave(chunks == 0 ? 2 : chunks);
    return report_on(make_schedule(name, f_.ranks(), f_.microbatches(), chunks, steps));
  }

  Schedule read(const char* flag, const std::string& path) const {
    std::error_code none;
    if (fs::status(path, none).type() == fs::file_type::not_found)
      refuse("{} {}: no such schedule or file{}; legal: {}, or a file with rows of instructions", flag, path,
             did_you_mean(path, schedule_names()), fmt::join(schedule_names(), ", "));
    Schedule schedule = from_text(read_text(path, flag), path);
    schedule.name = fs::path(path).stem().string();
    if (f_.given_ranks && *f_.given_ranks != schedule.num_ranks())
      refuse("--pp {}: {} has rows for {}", *f_.given_ranks, path, counted(schedule.num_ranks(), "rank"));
    if (f_.given_microbatches && *f_.given_microbatches != schedule.num_microbatches)
      refuse("--microbatches {}: {} has {}", *f_.given_microbatches, path, schedule.num_microbatches);
    return schedule;
  }

  StageTimes part_of_head(int parts) const {
    return {(f_.head.forward + f_.head.backward_input) / parts, 0, f_.head.backward_weight / parts};
  }

  void add_head(SimulationCosts& costs, int num_stages) const {
    if (f_.output_layer.empty()) return;
    costs.stages.resize(static_cast<std::size_t>(num_stages), costs.stages.front());
    costs.stages.back().forward += f_.head.forward;
    costs.stages.back().backward_input += f_.head.backward_input;
    costs.stages.back().backward_weight += f_.head.backward_weight;
  }

  // If the ranks do not divide the microbatches, includes the result of another grouping.
  SimulationReport interleave(int chunks) const {
    const int ranks = f_.ranks(), microbatches = f_.microbatches();
    SimulationReport report = report_on(interleaved(ranks, microbatches, chunks, f_.group));
    if (chunks == 1 || microbatches % ranks == 0) return report;
    SimulationReport even = report_on(interleaved_even(ranks, microbatches, chunks));
    BetterGrouping better{even.name, even_groups(ranks, microbatches), std::move(even.simulation)};
    if (better.simulation.timeline.makespan() < report.makespan * (1 - 1e-9))
      report.better = std::move(better);
    return report;
  }

  SimulationReport search() const {
    AutoCosts costs{costs_of("zb-auto", f_.ranks(), 1), f_.memory, f_.limits};
    if (!f_.vocabulary_parallel) add_head(costs.times, f_.ranks());
    if (costs.limit.empty()) costs.limit = {static_cast<double>(f_.ranks())};
    AutoResult found = zb_auto(f_.ranks(), f_.microbatches(), costs);
    if (f_.vocabulary_parallel) return report_on(std::move(found.schedule));
    SimulationReport report = echelon::report_on(std::move(found.schedule), costs.times);
    report.search = std::move(found);
    return report;
  }

  // A wrong name is a wrong request; a schedule that does not fit these numbers becomes a row that says so.
  SimulationReport compared(const std::string& name) const {
    if (std::error_code none; !is_name(name) && !fs::exists(name, none)) read("--compare", name);
    try {
      return report("--compare", name, name.starts_with("interleaved") ? f_.chunks : 0,
                    is_stream(name) ? f_.steps : 1);
    } catch (const RequestError& error) {
      SimulationReport unfit;
      unfit.name = name;
      unfit.ranks = f_.ranks();
      unfit.microbatches = f_.microbatches();
      unfit.unfit = error.what();
      return unfit;
    }
  }

  // `part`: the fraction of a full stage that one stage is.
  SimulationCosts costs_of(const std::string& name, int num_stages, double part) const {
    SimulationCosts costs;
    costs.message = f_.message;
    costs.overlap_factor = f_.overlap_factor;
    costs.stages = f_.stages;
    const StageTimes& full = f_.full_stage;
    if (f_.stages.empty())
      costs.stages = {{full.forward * part, full.backward_input * part, full.backward_weight * part}};
    else if (f_.stages.size() != static_cast<std::size_t>(num_stages))
      refuse("--stage-times: has {}, and {} {}", counted(std::ssize(f_.stages), "stage"), name, num_stages);
    return costs;
  }

  bool is_drawing_on_stdout() const { return f_.out.empty() && f_.format != "text"; }

  void print_numbers(const std::vector<SimulationReport>& reports) const {
    if (f_.json) {
      fmt::print("{}\n", json_text(to_json(reports, !f_.compare.empty())));
      return;
    }
    std::FILE* out = is_drawing_on_stdout() ? stderr : stdout;
    const int columns = line_columns(out);
    fmt::print(out, "{}, {}{}\n{}", counted(reports[0].ranks, "rank"),
               counted(reports[0].microbatches, "microbatch"),
               f_.steps > 1 ? fmt::format(", {} steps of those that do not flush", f_.steps) : "",
               table(reports, columns) + fitted(remarks(reports), columns));
  }

  std::string drawing(std::vector<SimulationReport>& reports) const {
    if (f_.format == "rows" || f_.format == "csv" || f_.format == "lowered") {
      if (reports.size() != 1 || !reports[0].unfit.empty())
        refuse("--format {}: writes one schedule; use --schedule instead of --compare", f_.format);
      const Schedule& schedule = reports[0].schedule;
      return f_.format == "csv" ? to_csv(schedule)
                                : to_text(f_.format == "rows" ? schedule : lower(schedule));
    }
    if (f_.format == "html") {
      Page page = page_of(reports, !f_.compare.empty());
      page.command = command_text(app_);
      return page_html(page);
    }
    const std::vector<Track> tracks = tracks_of(reports);
    if (f_.format == "svg") return gantt_svg(tracks);
    if (f_.format == "perfetto") return perfetto_json(tracks, 1000);
    std::string text = gantt_text(tracks, text_options(f_));
    return f_.out.empty() ? "\n" + text : text;
  }

  void draw(std::vector<SimulationReport>& reports) const {
    // A table or an object is the answer; a drawing is added only on request.
    if (f_.out.empty() && (f_.json || (!f_.compare.empty() && !f_.is_format_given))) return;
    write_drawing(f_, drawing(reports));
  }

  const SimulateFlags& f_;
  const CLI::App& app_;
};

}  // namespace

std::vector<SimulationReport> simulation_reports(const SimulateFlags& flags, const CLI::App& app,
                                                 const Progress& progress) {
  return Simulate(flags, app).all_reports(progress);
}

SimulationReport simulation_report(const SimulateFlags& flags, const CLI::App& app, Schedule schedule) {
  return Simulate(flags, app).report_on(std::move(schedule));
}

void add_simulate(CLI::App& program, int& status) {
  auto flags = std::make_shared<SimulateFlags>();
  CLI::App& app = *program.add_subcommand(
      "simulate",
      "Simulate a pipeline schedule: makespan, bubble, memory, messages, and its drawing; or the routing "
      "of a mixture of experts (--moe); or the blocks of a model, drawn (--block); or how evenly packed "
      "documents are shared out (--document-lengths)");
  flags->add_to(app);
  auto experts = std::make_shared<ExpertsFlags>();
  experts->add_to(app);
  auto block = std::make_shared<BlockFlags>();
  block->add_to(app);
  auto packing = std::make_shared<PackingFlags>();
  packing->add_to(app);
  app.callback([flags, experts, block, packing, &app, &status] {
    flags->is_format_given = app.get_option("--format")->count() > 0;
    flags->is_steps_given = app.get_option("--steps")->count() > 0;
    block->refuse_strangers();
    if (block->is_asked()) return block->draw();
    packing->refuse_strangers();
    if (packing->is_asked()) return packing->print(flags->json);
    experts->refuse_strangers(app);
    if (experts->moe) {
      status = simulate_experts(*flags, *experts);
      return;
    }
    flags->read(app);
    status = Simulate(*flags, app).run();
  });
}

}  // namespace echelon
