// How the copies of tokens are shared out over experts, where routers do not do it evenly: all ranks of an
// expert group wait for the one that has most.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/expert_placement.h"
#include "spec/mesh.h"

namespace echelon {

struct ExpertSkew {
  double imbalance = 1;          // load of the busiest rank over the mean, however many ranks there are
  std::vector<double> shares{};  // or of each expert, in any unit: then where the experts are says the former
  // Experts are where their loads are most even (plan/expert_placement.h); else expert e is on rank
  // e / (E / ranks).
  bool is_placed = false;
  std::int64_t replicas = 0;  // further experts that each rank keeps, copies of those with most load
  int node = 1;               // ranks of a node
  std::int64_t groups = 1;    // of experts, under node-limited routing
};

// Placed by their load, with `replicas`.
ExpertPlacement placement_of(const ExpertSkew& load, const Mesh& mesh);

// Load of the busiest of the ranks that hold experts over the mean. 1 where one rank holds all.
double busiest_rank(const ExpertSkew& load, const Mesh& mesh);

// Experts that a rank keeps over those that it would without copies.
double kept_experts(const ExpertSkew& load, const Mesh& mesh);

// From a file of one number an expert, between blanks, commas or ends of lines. RequestError naming `where`
// unless there are as many as experts, none below 0 and one above.
std::vector<double> read_expert_shares(const std::string& text, std::int64_t experts,
                                       const std::string& where);

}  // namespace echelon
