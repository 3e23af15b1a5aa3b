// How the copies of tokens are shared out over experts, where routers do not do it evenly: all ranks of an
// expert group wait for the one that has most.
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

// What a price asks of a placement.
struct PlacedExperts {
  double busiest = 1;  // as ExpertPlacement has them
  std::int64_t shared_slots = 0;
  int most_copies = 1;
};

// Those that were asked for: a search asks for the same few again and again, of several threads. A copy
// begins without any.
class PlacementMemo {
 public:
  PlacementMemo() = default;
  PlacementMemo(const PlacementMemo&) noexcept {}
  PlacementMemo& operator=(const PlacementMemo&) noexcept { return *this; }  // which says what its own are of

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
  std::vector<double> shares_;  // that all found are of
  std::map<std::tuple<int, int, std::int64_t, std::int64_t>, PlacedExperts> found_;
};

struct ExpertSkew {
  double imbalance = 1;          // load of the busiest rank over the mean, however many ranks there are
  std::vector<double> shares{};  // or of each expert, in any unit: then where the experts are says the former
  // Experts are where their loads are most even (plan/expert_placement.h); else expert e is on rank
  // e / (E / ranks).
  bool is_placed = false;
  std::int64_t replicas = 0;  // further experts that each rank keeps, copies of those with most load
  std::int64_t groups = 1;    // of experts, under node-limited routing
  mutable PlacementMemo memo{};
};

// Placed by their load, with `replicas`: on the nodes of the expert group that lies worst, where it has as
// many ranks on each; nodes that have more of it than others count for nothing.
ExpertPlacement placement_of(const ExpertSkew& load, const Mesh& mesh, const Machine& machine);
// The same in numbers, made once for all meshes that are alike in it.
PlacedExperts placed_experts(const ExpertSkew& load, const Mesh& mesh, const Machine& machine);

// Load of the busiest of the ranks that hold experts over the mean. 1 where one rank holds all.
double busiest_rank(const ExpertSkew& load, const Mesh& mesh, const Machine& machine);

// Experts that a rank keeps over those that it would without copies.
double kept_experts(const ExpertSkew& load, const Mesh& mesh);

// From a file of one number an expert, between blanks, commas or ends of lines. RequestError naming `where`
// unless there are as many as experts, none below 0 and one above.
std::vector<double> read_expert_shares(const std::string& text, std::int64_t experts,
                                       const std::string& where);

}  // namespace echelon
