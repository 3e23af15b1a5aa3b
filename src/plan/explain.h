// Plans in words and numbers: for people, for programs, and as the file that train and verify take.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "plan/near_sizes.h"
#include "plan/other_programs.h"
#include "plan/run_life.h"
#include "plan/search.h"

namespace echelon {

// One object, as docs of the command line promise it; with the life of the best plan's run and sizes near
// those that were asked for, where they were looked for.
std::string plans_json(const SearchResult& result, const Workload& work,
                       const std::optional<RunCost>& run = std::nullopt,
                       const std::vector<NearSize>& near = {});

// A table of the ranked plans, in whole lines. Where a row would be wider than `columns`, each plan is on a
// line of its own below its numbers.
struct PlansTable {
  std::string head, best;  // empty where nothing fits
  std::string others;
  std::string counts;  // of what was looked at and left out
  std::string beyond;  // priced_beyond()
  std::string text() const { return head + best + others + counts + beyond; }
};
PlansTable plans_table(const SearchResult& result, const Workload& work,
                       int columns = std::numeric_limits<int>::max());

// A line where plans have what the program does not run, because it was asked for by name; else nothing.
std::string priced_beyond(const SearchResult& result, const Workload& work);

// Where each second of the winner goes, what every rank holds, and examples of what was rejected.
std::string explain_winner(const SearchResult& result, const Workload& work);

// What other programs would gain over `best`, a line for each.
std::string explain_programs(const std::vector<OtherProgram>& others, const Estimate& best,
                             const Workload& work);

// Why `other` is slower than the winner: the parts that differ, largest first.
std::string explain_loser(const Estimate& winner, const Estimate& other);

// What one of several pins costs by itself: of the best plan with it the time, and what most of it goes into.
std::string explain_alone(const std::string& pin, const Estimate& winner, const SearchResult& alone);

// "no plan fits": the nearest one, and by how much.
std::string explain_nothing(const SearchResult& result, int gpus);

// The same where nothing is legal, with what is legal near it, in lines.
std::string explain_nothing(const SearchResult& result, const SearchRequest& request,
                            const std::vector<NearSize>& near);

// Fewer devices that take less time, in a paragraph.
std::string explain_fewer(const NearSize& fewer, const Estimate& best);

// What train and verify take of it, in f32.
Plan trained_plan(const Estimate& estimate, const Workload& work);

// The winner, for train and verify. A precision that the trainer lacks is written as f32, an axis that
// it lacks as it is, and refused there.
std::string plan_file(const Estimate& estimate, const Workload& work);

}  // namespace echelon
