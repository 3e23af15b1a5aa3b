// The plans around a search's answer: the best plan of every tensor- and pipeline-parallel size, and the
// fastest plan for less and less memory.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/search.h"

namespace echelon {

struct SurveyCell {
  int tp = 1, pp = 1;
  SearchResult result;  // of the plans with these sizes: the best one, and why others were left out
  std::string refusal;  // why no plan has these sizes; then the result is empty
};

struct Survey {
  std::vector<SurveyCell> cells;  // by tp, then by pp
  int cells_left_out = 0;         // with a tp beyond a node, if there would be very many cells
  // Each is the fastest plan that holds less than the one before it (of those within `tie`, the one that
  // holds least), in steps of at least front_step of the device's memory.
  std::vector<Estimate> front;
};
inline constexpr double front_step = 0.02;

// Runs a search by time for each of them.
Survey survey(const SearchRequest& request);

}  // namespace echelon
