#include "plan/expert_skew.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <sstream>

#include "base/error.h"
#include "base/parse_number.h"
#include "base/real.h"
#include "base/units.h"
#include "plan/rank_groups.h"

namespace echelon {

static double over_mean(const std::vector<double>& ranks) {
  const double sum = std::accumulate(ranks.begin(), ranks.end(), 0.0);
  return *std::max_element(ranks.begin(), ranks.end()) * real(std::ssize(ranks)) / sum;
}

double busiest_rank(const ExpertSkew& load, const Mesh& mesh, const Machine& machine) {
  if (mesh.ep == 1) return 1;
  if (load.shares.empty()) return std::min<double>(load.imbalance, mesh.ep);  // one rank has everything
  if (load.is_placed) return placed_experts(load, mesh, machine).busiest;
  const std::size_t ranks = static_cast<std::size_t>(mesh.ep), each = load.shares.size() / ranks;
  std::vector<double> held(ranks);
  for (std::size_t e = 0; e < each * ranks; ++e) held[e / each] += load.shares[e];
  return over_mean(held);
}

static int nodes_of(const Mesh& mesh, const Machine& machine) {
  const WorstPlaced worst = worst_placed(expert_groups(mesh), machine.node_of(mesh.num_ranks()));
  return worst.fewest == worst.most ? static_cast<int>(worst.across) : 1;
}

ExpertPlacement placement_of(const ExpertSkew& load, const Mesh& mesh, const Machine& machine) {
  const std::int64_t each = std::ssize(load.shares) / mesh.ep;
  return place_experts(load.shares, mesh.ep, each + load.replicas, nodes_of(mesh, machine), load.groups);
}

PlacedExperts placed_experts(const ExpertSkew& load, const Mesh& mesh, const Machine& machine) {
  return load.memo.find(load.shares, {mesh.ep, nodes_of(mesh, machine), load.replicas, load.groups}, [&] {
    const ExpertPlacement placed = placement_of(load, mesh, machine);
    return PlacedExperts{placed.busiest, placed.shared_slots(), placed.most_copies()};
  });
}

double kept_experts(const ExpertSkew& load, const Mesh& mesh) {
  if (load.replicas == 0 || mesh.ep == 1) return 1;
  const double each = real(std::ssize(load.shares)) / mesh.ep;
  return (each + real(load.replicas)) / each;
}

std::vector<double> read_expert_shares(const std::string& text, std::int64_t experts,
                                       const std::string& where) {
  std::string words = text;
  std::replace(words.begin(), words.end(), ',', ' ');
  std::istringstream in(words);
  std::vector<double> shares;
  for (std::string word; in >> word;) {
    const auto share = parse_number<double>(where, word);
    if (!(share >= 0 && std::isfinite(share))) refuse("{} {}: must be at least 0, and finite", where, word);
    shares.push_back(share);
  }
  if (std::ssize(shares) != experts)
    refuse("{}: has {}; legal: one of each of the {} experts", where, counted(std::ssize(shares), "number"),
           experts);
  if (std::accumulate(shares.begin(), shares.end(), 0.0) <= 0) refuse("{}: no expert has any load", where);
  return shares;
}

}  // namespace echelon
