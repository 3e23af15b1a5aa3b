// How the copies of tokens are shared out over experts, where routers do not do it evenly: all ranks of an
// expert group wait for the one that has most.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "spec/mesh.h"

namespace echelon {

struct ExpertSkew {
  double imbalance = 1;          // load of the busiest rank over the mean, however many ranks there are
  std::vector<double> shares{};  // or of each expert, in any unit: then where the experts are says the former
};

// Load of the busiest of the ranks that hold experts over the mean: expert e is on rank e / (E / ranks). 1
// where one rank holds all.
double busiest_rank(const ExpertSkew& load, const Mesh& mesh);

// The same if experts were placed by their load, each on the rank that has least of those that have room: as
// many experts on each rank, the largest first (Graham 1969, and DeepSeek's EPLB without replicas).
double busiest_rank_placed(const std::vector<double>& shares, int ranks);

// From a file of one number an expert, between blanks, commas or ends of lines. RequestError naming `where`
// unless there are as many as experts, none below 0 and one above.
std::vector<double> read_expert_shares(const std::string& text, std::int64_t experts,
                                       const std::string& where);

}  // namespace echelon
