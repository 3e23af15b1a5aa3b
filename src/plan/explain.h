// Writes plans for people, for programs, and as the file that train and verify read.
#pragma once

#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "plan/near_sizes.h"
#include "plan/other_programs.h"
#include "plan/run_life.h"
#include "plan/search.h"

namespace echelon {

// One JSON object, as the docs of the command line describe it; with the whole run of the best plan and with
// sizes near those asked for, if they were computed.
std::string plans_json(const SearchResult& result, const Workload& work,
                       const std::optional<RunCost>& run = std::nullopt,
                       const std::vector<NearSize>& near = {});

// The object `run` of it.
nlohmann::ordered_json run_json(const RunCost& run);

// A table of the ranked plans, in whole lines. If a row would be wider than `columns`, each plan is on a
// separate line below its numbers.
struct PlansTable {
  std::string head, best;  // empty if nothing fits
  std::string others;
  std::string counts;  // of plans examined and left out
  std::string beyond;  // what the machine's file leaves out, and priced_beyond()
  std::string text() const { return head + best + others + counts + beyond; }
};
PlansTable plans_table(const SearchResult& result, const Workload& work,
                       int columns = std::numeric_limits<int>::max());

// A line if the machine's file leaves out what a device reaches, and plans are priced by a preset's numbers;
// else empty.
std::string omitted_of_machine(const Workload& work);

// A line if plans contain what the program cannot run, because it was asked for by name; else empty.
std::string priced_beyond(const SearchResult& result, const Workload& work);

// Where each second of the winner goes, what every rank holds, and examples of rejected plans.
std::string explain_winner(const SearchResult& result, const Workload& work);

// What other programs would gain over `best`, one line each.
std::string explain_programs(const std::vector<OtherProgram>& others, const Estimate& best,
                             const Workload& work);

// Why `other` is slower than the winner: the parts that differ, largest first.
std::string explain_loser(const Estimate& winner, const Estimate& other);

// The cost of one of several pins by itself: the time of the best plan with it, and where most of it goes.
std::string explain_alone(const std::string& pin, const Estimate& winner, const SearchResult& alone);

// "no plan fits": names the nearest plan, and by how much it does not fit.
std::string explain_nothing(const SearchResult& result, int gpus);

// The same if nothing is legal: lists what is legal near the request, in lines.
std::string explain_nothing(const SearchResult& result, const SearchRequest& request,
                            const std::vector<NearSize>& near);

// A paragraph on fewer devices that take less time.
std::string explain_fewer(const NearSize& fewer, const Estimate& best);
std::string explain_offload(const NearSize& offloaded, const Estimate& best);  // of with_offload()

// The plan that train and verify run, with the trainer's recipe for the priced precision.
Plan trained_plan(const Estimate& estimate, const Workload& work);

// The winner's plan file for train and verify. A precision that the trainer lacks (fp4) is written as bf16;
// an axis that it lacks is written as it is, and train refuses it.
std::string plan_file(const Estimate& estimate, const Workload& work);

}  // namespace echelon
