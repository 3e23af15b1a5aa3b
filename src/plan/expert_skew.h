// How unevenly routers distribute the copies of tokens over experts: all ranks of an expert group wait for
// the one that has most.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "plan/expert_placement.h"
#include "spec/machine.h"
#include "spec/mesh.h"

namespace echelon {

// The figures of a placement that prices need.
struct PlacedExperts {
  double busiest = 1;  // as in ExpertPlacement
  std::int64_t shared_slots = 0;
  int most_copies = 1;
};

// Placements found so far: a search asks for the same few again and again, from several threads. A copy of
// the memo starts empty.
class PlacementMemo {
 public:
  PlacementMemo() = default;
  PlacementMemo(const PlacementMemo&) noexcept {}
  PlacementMemo& operator=(const PlacementMemo&) noexcept { return *this; }  // keeps its own entries

  template <class Make>
  PlacedExperts find(const std::vector<double>& shares,
                     const std::tuple<int, int, std::int64_t, std::int64_t>& of, const Make& make) {
    const std::lock_guard lock(mutex_);
    if (shares != shares_) {
      shares_ = shares;
      found_.clear();
    }
    const auto at = found_.find(of);
    return at != found_.end() ? at->second : found_.emplace(of, make()).first->second;
  }

 private:
  std::mutex mutex_;
  std::vector<double> shares_;  // those that all entries were found for
  std::map<std::tuple<int, int, std::int64_t, std::int64_t>, PlacedExperts> found_;
};

struct ExpertSkew {
  double imbalance = 1;          // load of the busiest rank over the mean, for any number of ranks
  std::vector<double> shares{};  // or the load of each expert, in any unit: gives the former by their places
  // If true, experts are placed so that loads are most even (plan/expert_placement.h); else expert e is on
  // rank e / (E / ranks).
  bool is_placed = false;
  std::int64_t replicas = 0;  // additional experts that each rank holds: copies of those with most load
  std::int64_t groups = 1;    // of experts, under node-limited routing
  mutable PlacementMemo memo{};
};

// The placement by load, with `replicas`. Nodes are those of the worst placed expert group, if it has equally
// many ranks on each of them; otherwise nodes are ignored.
ExpertPlacement placement_of(const ExpertSkew& load, const Mesh& mesh, const Machine& machine);
// The figures of that placement, computed once for all meshes that agree in what it depends on.
PlacedExperts placed_experts(const ExpertSkew& load, const Mesh& mesh, const Machine& machine);

// Load of the busiest of the ranks that hold experts over the mean. 1 if one rank holds all.
double busiest_rank(const ExpertSkew& load, const Mesh& mesh, const Machine& machine);

// How many times as many experts a rank holds as it would without copies.
double kept_experts(const ExpertSkew& load, const Mesh& mesh);

// Reads a file with one number for each expert, separated by blanks, commas or line ends. RequestError naming
// `where` unless there are as many numbers as experts, all at least 0 and one above 0.
std::vector<double> read_expert_shares(const std::string& text, std::int64_t experts,
                                       const std::string& where);

}  // namespace echelon
