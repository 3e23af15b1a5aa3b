// The space of plans around a search's answer: the best plan of every tensor- and pipeline-parallel size, and
// the fastest plan for less and less memory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/search.h"

namespace echelon {

struct SurveyCell {
  int tp = 1, pp = 1;
  SearchResult result;  // of the plans with these sizes: the best one, and why others were left out
  std::string refusal;  // no plan has these sizes, and why; then the result is empty
};

struct Survey {
  std::vector<SurveyCell> cells;  // by tp, then by pp
  int cells_left_out = 0;         // with a tp beyond a node, where there would be very many
  // Each the fastest of those that hold less than the one before it (of those within `tie` the one that holds
  // least), in steps of at least front_step of the device's memory.
  std::vector<Estimate> front;
};
inline constexpr double front_step = 0.02;

// Searches again for each of them, by time.
Survey survey(const SearchRequest& request);

}  // namespace echelon
