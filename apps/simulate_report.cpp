#include "apps/simulate_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "apps/terminal.h"
#include "apps/text_rows.h"
#include "base/error.h"
#include "base/json_text.h"
#include "base/units.h"
#include "schedule/schedules.h"
#include "schedule/step_programs.h"
#include "schedule/validate.h"

namespace echelon {
namespace {

// Removes rounding errors from the last digits. By way of the digits, which powers of ten above 10^22 are too
// inexact for; read as they are written, whatever the locale.
double rounded(double x, int decimals = 9) {
  const std::string digits = fmt::format("{:.{}f}", x, decimals);
  double y = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), y);
  return y == 0 ? 0 : y;  // no -0
}

// Of sums of times, which have any unit: the errors grow and shrink with the longest of them.
double rounded_time(double time, double makespan) {
  if (!(makespan > 0)) return rounded(time);
  return rounded(time, std::clamp(10 - static_cast<int>(std::floor(std::log10(makespan))), 0, 300));
}

std::vector<double> rounded(std::vector<double> values) {
  for (double& x : values) x = rounded(x);
  return values;
}

// "4", "4 3 2 1", and for many ranks "32 to 1".
template <class T>
std::string over_ranks(const std::vector<T>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  if (values.empty() || *least == *most) return values.empty() ? "" : fmt::format("{:.4g}", 1.0 * *most);
  if (values.size() > 6) return fmt::format("{:.4g} to {:.4g}", 1.0 * *least, 1.0 * *most);
  std::string text;
  for (const T& value : values) text += fmt::format("{}{:.4g}", text.empty() ? "" : " ", 1.0 * value);
  return text;
}

}  // namespace

SimulationReport report_on(Schedule schedule, const SimulationCosts& costs) {
  SimulationReport report;
  check_rules(schedule);
  report.name = schedule.name;
  report.ranks = schedule.num_ranks();
  report.microbatches = schedule.num_microbatches;
  try {
    // A schedule that finishes without messages finishes with them too (lower.h): this need not be proved
    // again.
    report.simulation = simulate(schedule, costs);
  } catch (const RequestError&) {
    validate(schedule);  // names the cycle
    throw;
  }
  report.makespan = report.simulation.timeline.makespan();
  report.local_bubble = report.simulation.timeline.local_bubble();
  report.work = report.simulation.timeline.work();
  report.bubble_fraction = report.simulation.timeline.bubble_fraction();
  report.schedule = std::move(schedule);
  report.costs = costs;
  return report;
}

static void add_search(nlohmann::ordered_json& json, const AutoResult& search) {
  json["span"] = rounded_time(search.span, search.makespan);
  json["lower_bound"] = rounded_time(search.lower_bound, search.makespan);
  json["makespan_lower_bound"] = rounded_time(search.makespan_lower_bound, search.makespan);
  json["gap"] = rounded(search.gap());
  json["optimal"] = search.optimal;
  json["makespan_optimal"] = search.makespan_optimal;
  json["peak_memory"] = rounded(search.peak_memory);
}

nlohmann::ordered_json to_json(const SimulationReport& r) {
  nlohmann::ordered_json json{{"schedule", r.name}, {"pp", r.ranks}, {"microbatches", r.microbatches}};
  json["valid"] = r.unfit.empty();
  if (!r.unfit.empty()) {
    json["reason"] = r.unfit;
    return json;
  }
  json["makespan"] = rounded_time(r.makespan, r.makespan);
  json["work_per_rank"] = rounded_time(r.work, r.makespan);
  json["bubble_time"] = rounded_time(r.bubble(), r.makespan);
  json["bubble_fraction"] = rounded(r.bubble_fraction);
  json["local_bubble_time"] = rounded_time(r.local_bubble, r.makespan);
  json["peak_activations"] = rounded(r.simulation.peak_activations);
  json["weight_versions"] = r.simulation.weight_versions;
  json["staleness"] = staleness(r.schedule);
  json["parameter_copies"] = r.simulation.parameter_copies;
  json["messages"] = r.simulation.messages;
  if (r.search) add_search(json, *r.search);
  if (r.better) {
    const double makespan = r.better->simulation.timeline.makespan();
    json["better_grouping"] = {{"schedule", r.better->schedule},
                               {"groups", r.better->groups},
                               {"makespan", rounded_time(makespan, makespan)},
                               {"bubble_time", rounded_time(makespan - r.work, makespan)},
                               {"peak_activations", rounded(r.better->simulation.peak_activations)}};
  }
  return json;
}

nlohmann::ordered_json to_json(const std::vector<SimulationReport>& reports, bool compared) {
  if (!compared) return to_json(reports.front());
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const SimulationReport& r : reports) rows.push_back(to_json(r));
  return {{"schedules", rows}};
}

std::string table(const std::vector<SimulationReport>& reports, int columns) {
  std::vector<TextRow> rows{{"schedule", "makespan", "bubble", "", "local bubble",
                             "peak activations of a rank", "weight versions", "copies", "messages"}};
  for (const SimulationReport& r : reports)
    rows.push_back(!r.unfit.empty() ? TextRow{r.name, r.unfit}
                                    : TextRow{r.name, fmt::format("{:.6g}", r.makespan),
                                              fmt::format("{:.6g}", rounded_time(r.bubble(), r.makespan)),
                                              fmt::format("{:.1f}%", 100 * r.bubble_fraction),
                                              fmt::format("{:.6g}", rounded_time(r.local_bubble, r.makespan)),
                                              over_ranks(r.simulation.peak_activations),
                                              over_ranks(r.simulation.weight_versions),
                                              fmt::format("{}", r.simulation.parameter_copies),
                                              fmt::format("{}", r.simulation.messages)});
  const std::string text = aligned(rows);
  if (std::ssize(text.substr(0, text.find('\n'))) <= columns) return text;
  rows.front() = {"schedule", "makespan", "bubble", "", "local", "peak", "versions", "copies", "messages"};
  for (const std::ptrdiff_t column : {7, 6}) {
    const auto has = [](const TextRow& row) { return row.size() > 2; };  // else it says why it does not fit
    const auto is_one = [&](const TextRow& row) {
      return !has(row) || row[static_cast<std::size_t>(column)] == "1";
    };
    if (!std::all_of(rows.begin() + 1, rows.end(), is_one)) continue;
    for (TextRow& row : rows)
      if (has(row)) row.erase(row.begin() + column);
  }
  return fitted(aligned(rows), columns);
}

static std::string remark(const SimulationReport& r, const AutoResult& found) {
  const std::string bound =
      found.optimal ? "proven least"
                    : fmt::format("no less than {:.6g} (gap {:.2g}%)", found.lower_bound, 100 * found.gap());
  const std::string makespan = found.makespan_optimal
                                   ? "proven least of all with this span"
                                   : fmt::format("no less than {:.6g}", found.makespan_lower_bound);
  return fmt::format("{}: span {:.6g} from a rank's first F to its last W, {}; makespan {:.6g}, {}\n", r.name,
                     found.span, bound, found.makespan, makespan);
}

static std::string remark(const SimulationReport& r, const BetterGrouping& better) {
  const double makespan = better.simulation.timeline.makespan();
  return fmt::format(
      "{}: {} ranks do not divide {} microbatches; --schedule {} takes them in groups of {}: makespan "
      "{:.6g}, bubble "
      "{:.6g}, peak activations {}\n",
      r.name, r.ranks, r.microbatches, better.schedule, over_ranks(better.groups), makespan,
      rounded_time(makespan - r.work, makespan), over_ranks(better.simulation.peak_activations));
}

std::string remarks(const std::vector<SimulationReport>& reports) {
  std::string text;
  for (const SimulationReport& r : reports) {
    if (r.search) text += remark(r, *r.search);
    if (r.better) text += remark(r, *r.better);
  }
  return text;
}

std::vector<Track> tracks_of(std::vector<SimulationReport>& reports) {
  std::vector<Track> tracks;
  for (SimulationReport& r : reports) {
    if (!r.unfit.empty()) continue;
    const std::string peak = over_ranks(r.simulation.peak_activations);
    tracks.push_back({r.name,
                      fmt::format("makespan {:.6g}, bubble {:.6g} ({:.1f}%), peak {} activation{}",
                                  r.makespan, rounded_time(r.bubble(), r.makespan), 100 * r.bubble_fraction,
                                  peak, peak == "1" ? "" : "s"),
                      {}});
    tracks.back().timeline = std::move(r.simulation.timeline);
  }
  return tracks;
}

Page page_of(std::vector<SimulationReport>& reports, bool compared) {
  Page page;
  page.kind = "simulate";
  const SimulationReport& first = reports.front();
  page.title = compared ? "Pipeline schedules compared" : first.name;
  page.subtitle = fmt::format("{}, {}", counted(first.ranks, "rank"), counted(first.microbatches, "microbatch"));
  page.members.emplace_back("answer", json_text(to_json(reports, compared)));
  for (const SimulationReport& r : reports) {
    if (!r.unfit.empty()) continue;
    PageTrack one;
    if (is_synchronous(r.schedule)) {
      one.step_microbatches = r.microbatches;
      one.two_steps = simulate(two_steps(r.schedule), r.costs).timeline;
    }
    const std::vector<double> of_stage(static_cast<std::size_t>(r.schedule.num_stages),
                                       r.schedule.stage_fraction());
    for (HeldCurve& curve : held_over_time(r.schedule, r.simulation.timeline, of_stage))
      one.memory.push_back({{}, std::move(curve)});
    one.peak_activations = r.simulation.peak_activations;
    page.tracks.push_back(std::move(one));
  }
  std::vector<Track> tracks = tracks_of(reports);
  for (std::size_t t = 0; t < tracks.size(); ++t) page.tracks[t].track = std::move(tracks[t]);
  return page;
}

}  // namespace echelon
