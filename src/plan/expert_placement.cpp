#include "plan/expert_placement.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/real.h"

namespace echelon {
namespace {

using Indices = std::vector<std::size_t>;

// Packs with equally many items: the largest item first, each into the least loaded pack that has room.
std::vector<Indices> balanced_packs(const std::vector<double>& loads, std::size_t packs) {
  const std::size_t room = loads.size() / packs;
  Indices order(loads.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return loads[a] > loads[b]; });
  std::vector<Indices> packed(packs);
  std::vector<double> held(packs);
  for (std::size_t item : order) {
    std::size_t least = packs;
    for (std::size_t p = 0; p < packs; ++p)
      if (packed[p].size() < room && (least == packs || held[p] < held[least])) least = p;
    packed[least].push_back(item);
    held[least] += loads[item];
  }
  return packed;
}

}  // namespace

std::int64_t ExpertPlacement::shared_slots() const {
  std::int64_t most = 0;
  for (const Indices& experts : held)
    most = std::max<std::int64_t>(
        most, std::count_if(experts.begin(), experts.end(), [&](std::size_t e) { return copies[e] > 1; }));
  return most;
}

int ExpertPlacement::most_copies() const { return *std::max_element(copies.begin(), copies.end()); }

ExpertPlacement place_experts(const std::vector<double>& shares, int ranks, std::int64_t slots, int nodes,
                              std::int64_t groups) {
  const auto experts = std::ssize(shares);
  check(ranks > 0 && slots * ranks >= experts && experts % groups == 0, "every expert has a slot");
  if (nodes < 1 || ranks % nodes != 0 || groups % nodes != 0 || experts % nodes != 0) nodes = 1;
  if (nodes == 1) groups = 1;
  const auto size = static_cast<std::size_t>(experts / groups);
  std::vector<double> of_groups(static_cast<std::size_t>(groups));
  for (std::size_t e = 0; e < shares.size(); ++e) of_groups[e / size] += shares[e];

  ExpertPlacement placed{std::vector<int>(shares.size(), 1), {}, 1};
  double busiest = 0;
  for (const Indices& groups_here : balanced_packs(of_groups, static_cast<std::size_t>(nodes))) {
    Indices of_slot;  // the expert in each of the node's slots
    for (std::size_t g : groups_here)
      for (std::size_t e = g * size; e < (g + 1) * size; ++e) of_slot.push_back(e);
    const Indices here = of_slot;
    const auto load = [&](std::size_t e) { return shares[e] / placed.copies[e]; };
    while (std::ssize(of_slot) < slots * ranks / nodes) {
      const auto most = std::max_element(here.begin(), here.end(),
                                         [&](std::size_t a, std::size_t b) { return load(a) < load(b); });
      ++placed.copies[*most];
      of_slot.push_back(*most);
    }
    std::vector<double> loads;
    for (std::size_t e : of_slot) loads.push_back(load(e));
    for (const Indices& pack : balanced_packs(loads, static_cast<std::size_t>(ranks / nodes))) {
      double sum = 0;
      Indices& held = placed.held.emplace_back();
      for (std::size_t slot : pack) {
        held.push_back(of_slot[slot]);
        sum += loads[slot];
      }
      busiest = std::max(busiest, sum);
    }
  }
  placed.busiest = busiest * ranks / std::accumulate(shares.begin(), shares.end(), 0.0);
  return placed;
}

}  // namespace echelon
