#include "plan/expert_skew.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <sstream>

#include "base/error.h"
#include "base/parse_number.h"
#include "base/real.h"

namespace echelon {

static double over_mean(const std::vector<double>& ranks) {
  const double sum = std::accumulate(ranks.begin(), ranks.end(), 0.0);
  return *std::max_element(ranks.begin(), ranks.end()) * real(std::ssize(ranks)) / sum;
}

double busiest_rank(const ExpertSkew& load, const Mesh& mesh) {
  if (mesh.ep == 1) return 1;
  if (load.shares.empty()) return std::min<double>(load.imbalance, mesh.ep);  // which has all then
  const std::size_t ranks = static_cast<std::size_t>(mesh.ep), each = load.shares.size() / ranks;
  std::vector<double> held(ranks);
  for (std::size_t e = 0; e < each * ranks; ++e) held[e / each] += load.shares[e];
  return over_mean(held);
}

double busiest_rank_placed(const std::vector<double>& shares, int ranks) {
  std::vector<double> largest_first = shares;
  std::sort(largest_first.begin(), largest_first.end(), std::greater<>());
  const std::size_t room = shares.size() / static_cast<std::size_t>(ranks);
  std::vector<double> held(static_cast<std::size_t>(ranks));
  std::vector<std::size_t> experts(held.size());
  for (double share : largest_first) {
    std::size_t least = held.size();
    for (std::size_t r = 0; r < held.size(); ++r)
      if (experts[r] < room && (least == held.size() || held[r] < held[least])) least = r;
    held[least] += share;
    ++experts[least];
  }
  return over_mean(held);
}

std::vector<double> read_expert_shares(const std::string& text, std::int64_t experts,
                                       const std::string& where) {
  std::string words = text;
  std::replace(words.begin(), words.end(), ',', ' ');
  std::istringstream in(words);
  std::vector<double> shares;
  for (std::string word; in >> word;) {
    const auto share = parse_number<double>(where, word);
    if (!(share >= 0 && std::isfinite(share))) refuse("{}: {} must be a number of at least 0", where, word);
    shares.push_back(share);
  }
  if (std::ssize(shares) != experts)
    refuse("{}: has {} numbers; legal: one of each of the {} experts", where, shares.size(), experts);
  if (std::accumulate(shares.begin(), shares.end(), 0.0) <= 0) refuse("{}: no expert has any load", where);
  return shares;
}

}  // namespace echelon
