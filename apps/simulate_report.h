// What simulate says of one schedule, as a row of a table and as an object.
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

// How interleaved would be faster where the ranks do not divide the microbatches.
struct BetterGrouping {
  std::string schedule;
  std::vector<int> groups;
  Simulation simulation;
};

struct SimulationReport {
  std::string name;
  int ranks = 0, microbatches = 0;
  std::string unfit;  // why it cannot be had with these numbers; then the rest is empty
  Schedule schedule;
  SimulationCosts costs;  // it was simulated with
  Simulation simulation;
  double makespan = 0, local_bubble = 0;
  std::optional<AutoResult> search;  // of zb-auto; its schedule is the one above
  std::optional<BetterGrouping> better;
  double work = 0;             // Timeline::work()
  double bubble_fraction = 0;  // Timeline::bubble_fraction()

  double bubble() const { return makespan - work; }  // of a rank, in the mean
};

// Validates and simulates.
SimulationReport report_on(Schedule schedule, const SimulationCosts& costs);

// Of what the flags ask for, which have been read (SimulateFlags::read()): of each schedule, one report.
// RequestError naming what cannot be.
std::vector<SimulationReport> simulation_reports(const SimulateFlags& flags, const CLI::App& app,
                                                 const Progress& progress);
// Of this schedule, with the flags' costs.
SimulationReport simulation_report(const SimulateFlags& flags, const CLI::App& app, Schedule schedule);

nlohmann::ordered_json to_json(const SimulationReport& report);
// What --json writes: one report, or those that were compared.
nlohmann::ordered_json to_json(const std::vector<SimulationReport>& reports, bool compared);
// Where a line has fewer `columns` than it needs, the heads are short, and what is 1 in all rows is left out.
std::string table(const std::vector<SimulationReport>& reports, int columns);
// What the table has no column for, a line each.
std::string remarks(const std::vector<SimulationReport>& reports);
// The simulated ones, on one time axis; moves their timelines out.
std::vector<Track> tracks_of(std::vector<SimulationReport>& reports);
// The same as a page, over two steps too and with what ranks hold.
Page page_of(std::vector<SimulationReport>& reports, bool compared);

}  // namespace echelon
