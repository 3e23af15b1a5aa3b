// What simulate reports for a schedule, as a row of a table and as an object.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "apps/simulate_flags.h"
#include "base/progress.h"
#include "draw/gantt.h"
#include "draw/page.h"
#include "schedule/simulate.h"
#include "schedule/zb_auto.h"

namespace echelon {

// A grouping with which interleaved would be faster, if the ranks do not divide the microbatches.
struct BetterGrouping {
  std::string schedule;
  std::vector<int> groups;
  Simulation simulation;
};

struct SimulationReport {
  std::string name;
  int ranks = 0, microbatches = 0;
  std::string unfit;  // why these numbers do not allow it; then the rest is empty
  Schedule schedule;
  SimulationCosts costs;  // of the simulation
  Simulation simulation;
  double makespan = 0, local_bubble = 0;
  std::optional<AutoResult> search;  // of zb-auto; its schedule is the one above
  std::optional<BetterGrouping> better;
  double work = 0;             // Timeline::work()
  double bubble_fraction = 0;  // Timeline::bubble_fraction()

  double bubble() const { return makespan - work; }  // mean over ranks
};

// Validates and simulates.
SimulationReport report_on(Schedule schedule, const SimulationCosts& costs);

// What the flags ask for, after SimulateFlags::read(): a report for each schedule. RequestError naming what
// is impossible.
std::vector<SimulationReport> simulation_reports(const SimulateFlags& flags, const CLI::App& app,
                                                 const Progress& progress);
// For this schedule, with the flags' costs.
SimulationReport simulation_report(const SimulateFlags& flags, const CLI::App& app, Schedule schedule);

nlohmann::ordered_json to_json(const SimulationReport& report);
// The output of --json: one report, or those that were compared.
nlohmann::ordered_json to_json(const std::vector<SimulationReport>& reports, bool compared);
// If a line has fewer `columns` than it needs, headings are shortened, and columns that are 1 in all rows are
// left out.
std::string table(const std::vector<SimulationReport>& reports, int columns);
// What the table has no column for, one line each.
std::string remarks(const std::vector<SimulationReport>& reports);
// The simulated schedules, on one time axis; moves their timelines out.
std::vector<Track> tracks_of(std::vector<SimulationReport>& reports);
// The same as a page, which also shows two steps and what ranks hold.
Page page_of(std::vector<SimulationReport>& reports, bool compared);

}  // namespace echelon
