#include "comm/world.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "base/error.h"

namespace echelon {

void run_ranks(World& world, const std::function<void(int rank)>& body) { world.run(body); }

int place_in_group(int rank, const std::vector<int>& ranks, int num_ranks, const std::string& name) {
  for (int member : ranks)
    if (member < 0 || member >= num_ranks)
      refuse("group {} [{}]: {} is not a rank of a job of {}", name, fmt::join(ranks, ", "), member,
             num_ranks);
  if (std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size())
    refuse("group {} [{}]: a rank appears twice", name, fmt::join(ranks, ", "));
  const auto at = std::find(ranks.begin(), ranks.end(), rank);
  if (at == ranks.end()) refuse("group {} [{}]: rank {} is not in it", name, fmt::join(ranks, ", "), rank);
  return static_cast<int>(at - ranks.begin());
}

}  // namespace echelon
