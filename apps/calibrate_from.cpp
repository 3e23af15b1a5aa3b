#include "apps/calibrate_from.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/error.h"
#include "base/json_text.h"
#include "base/open_file.h"
#include "base/output_file.h"
#include "base/shell_word.h"
#include "base/units.h"
#include "plan/fit.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t most_rows_shown = 30;

double percent_off(double said, double measured) { return 100 * (said / measured - 1); }

std::string seconds_text(double value) {
  return value >= 1      ? fmt::format("{:.3f} s", value)
         : value >= 1e-3 ? fmt::format("{:.2f} ms", 1e3 * value)
                         : fmt::format("{:.1f} us", 1e6 * value);
}

void print_rows(std::FILE* out, const char* what, const std::vector<FitRow>& rows, const std::string& start) {
  if (rows.empty()) return;
  fmt::print(out, "{:>12}  {:>8} {:>8} {:>8}  {}\n", "measured", "before", "fitted", "left out", what);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i == most_rows_shown) {
      fmt::print(out, "{:>12}\n", "...");
      break;
    }
    const FitRow& row = rows[i];
    fmt::print(out, "{:>12}  {:>+7.1f}% {:>+7.1f}% {:>8}  {}\n", seconds_text(row.measured_seconds),
               percent_off(row.before_seconds, row.measured_seconds),
               percent_off(row.fitted_seconds, row.measured_seconds),
               row.left_out_seconds
                   ? fmt::format("{:+.1f}%", percent_off(*row.left_out_seconds, row.measured_seconds))
                   : std::string("-"),
               row.what);
  }
  const bool leaves_out = std::any_of(rows.begin(), rows.end(),
                                      [](const FitRow& row) { return row.left_out_seconds.has_value(); });
  fmt::print(
      out, "{} off by {:.1f}% on average as {} says, by {:.1f}% fitted{}\n\n",
      counted(static_cast<std::int64_t>(rows.size()), "measurement"),
      100 * mean_error(rows, &FitRow::before_seconds), start, 100 * mean_error(rows, &FitRow::fitted_seconds),
      leaves_out ? fmt::format(", by {:.1f}% where a fit did not see them", 100 * mean_left_out_error(rows))
                 : ", too few to leave one out: how far off it is elsewhere is not known");
}

ordered_json rows_json(const std::vector<FitRow>& rows) {
  ordered_json list = ordered_json::array();
  for (const FitRow& row : rows) {
    list.push_back({{"what", row.what},
                    {"measured_seconds", row.measured_seconds},
                    {"before_seconds", row.before_seconds},
                    {"fitted_seconds", row.fitted_seconds}});
    list.back()["left_out_seconds"] =
        row.left_out_seconds ? ordered_json(*row.left_out_seconds) : ordered_json();
  }
  return list;
}

// Which candidates to measure next; in `all`, measured steps come first.
StepChoice chosen_steps(const Software& software, const Machine& machine,
                        const std::vector<MeasuredStep>& all, std::size_t measured, std::int64_t count) {
  const auto logs = [&](const Software& s) {
    std::vector<double> seconds;
    for (const MeasuredStep& step : all) seconds.push_back(std::log(priced_seconds(s, machine, step)));
    return seconds;
  };
  std::vector<std::size_t> known(measured);
  std::iota(known.begin(), known.end(), 0);
  return most_telling_steps(software, usual_numbers(), logs, known, static_cast<std::size_t>(count));
}

void print_choice(std::FILE* out, const StepChoice& choice, const std::vector<MeasuredStep>& all) {
  fmt::print(out, "measure these first, in this order; what is then open of a step's time:\n");
  fmt::print(out, "  {:>5.1f}%  before\n", 100 * choice.uncertain);
  for (const StepChoice::Step& one : choice.steps)
    fmt::print(out, "  {:>5.1f}%  {}: {}\n", 100 * one.uncertain, all[one.step].where,
               summary(all[one.step].plan));
  fmt::print(out, "give their seconds there and fit again\n\n");
}

std::string stem(const std::string& path) { return std::filesystem::path(path).stem().string(); }

}  // namespace

int run_calibrate_from(const CalibrateFromFlags& f) {
  const Machine start = load_machine(f.machine);
  const Software program = load_software(f.software);
  for (auto one = f.from.begin(); one != f.from.end(); ++one)
    if (std::any_of(f.from.begin(), one, [&](const std::string& before) {
          std::error_code error;
          return std::filesystem::equivalent(before, *one, error);
        }))
      refuse("--from {}: is given twice, and its measurements would count as many times", *one);
  Measurements measured;
  for (const std::string& path : f.from)
    read_measurements(read_text(path, "--from"), path, f.model, measured);
  std::FILE* out = f.json ? stderr : stdout;
  const bool has_steps = !measured.steps.empty();
  std::vector<TooLargeStep> too_large = leave_out_too_large(program, start, measured.steps);
  for (TooLargeStep& step : leave_out_too_large(program, start, measured.candidates))
    too_large.push_back(std::move(step));
  if (has_steps && measured.steps.empty())
    refuse("{}{}", too_large.front().text,
           too_large.size() > 1 ? " No other step is left to fit either." : " No step is left to fit.");
  for (const TooLargeStep& step : too_large) fmt::print(out, "{}\n", step.text);
  if (f.choose > static_cast<std::int64_t>(measured.candidates.size()))
    refuse("--choose {}: the --from files have {} whose seconds are left empty", f.choose,
           counted(static_cast<std::int64_t>(measured.candidates.size()), "step"));
  if (f.choose == 0 && !measured.candidates.empty())
    refuse(
        "{}: seconds is empty; give the seconds that the step took, or --choose to be told which to measure",
        measured.candidates.front().where);
  const bool has_operations = !measured.products.empty() || !measured.collectives.empty();
  if (!f.out.empty() && !has_operations)
    refuse("--out {}: has no effect: no --from file measures products or collectives", f.out);
  if (measured.steps.empty() && f.choose > 0 && !f.software_out.empty())
    refuse("--software-out {}: has no effect: no step is measured yet", f.software_out);
  if (measured.steps.empty() && measured.candidates.empty())
    for (const auto& [flag, value, given] : {std::tuple{"--software", f.software, f.gives_software},
                                             {"--model", f.model, f.gives_model},
                                             {"--software-out", f.software_out, !f.software_out.empty()}})
      if (given) refuse("{} {}: has no effect: no --from file has steps of training", flag, value);
  for (const auto& [flag, path] : {std::pair{"--out", f.out}, {"--software-out", f.software_out}})
    if (!path.empty()) check_output(flag, path);

  MachineFit machine = fit_machine(start, measured.products, measured.collectives);
  SoftwareFit software{program, {}};
  if (!measured.steps.empty())
    software = fit_software(program, usual_numbers(), machine.machine, measured.steps);
  mark_fitted(machine.machine.provenance, to_toml(start), to_toml(machine.machine));
  mark_fitted(software.software.provenance, to_toml(program), to_toml(software.software));

  print_rows(out, "product", machine.products, start.name);
  print_rows(out, "collective", machine.collectives, start.name);
  print_rows(out, "step", software.steps, program.name);
  std::vector<MeasuredStep> all = measured.steps;
  all.insert(all.end(), measured.candidates.begin(), measured.candidates.end());
  StepChoice choice;
  if (f.choose > 0) {
    choice = chosen_steps(software.software, machine.machine, all, measured.steps.size(), f.choose);
    print_choice(out, choice, all);
  }
  const std::string files = fmt::format("{}", fmt::join(f.from, ", "));
  if (!f.out.empty()) {
    machine.machine.name = stem(f.out);
    write_output("--out", f.out,
                 fmt::format("# {}, with what `echelon calibrate --from` fitted to {}.\n{}", start.name,
                             files, to_toml(machine.machine)));
    fmt::print(out, "written to {}: plan with --machine {}\n", f.out, shell_word(f.out));
  }
  if (!f.software_out.empty()) {
    software.software.name = stem(f.software_out);
    write_output("--software-out", f.software_out,
                 fmt::format("# {}, with what `echelon calibrate --from` fitted to {}.\n{}", program.name,
                             files, to_toml(software.software)));
    fmt::print(out, "written to {}: plan with --software {}\n", f.software_out, shell_word(f.software_out));
  }
  if (f.json) {
    ordered_json chosen = ordered_json::array();
    for (const StepChoice::Step& one : choice.steps)
      chosen.push_back({{"where", all[one.step].where}, {"open", one.uncertain}});
    ordered_json doubted = ordered_json::array();
    for (const TooLargeStep& step : too_large)
      doubted.push_back({{"text", step.text}, {"left_out", step.is_left_out}});
    fmt::print("{}\n", json_text(ordered_json{{"machine", f.out},
                                              {"software", f.software_out},
                                              {"products", rows_json(machine.products)},
                                              {"collectives", rows_json(machine.collectives)},
                                              {"steps", rows_json(software.steps)},
                                              {"chosen", chosen},
                                              {"too_large", doubted}}));
  }
  return 0;
}

}  // namespace echelon
