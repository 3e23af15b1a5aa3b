#include "comm/world.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "base/error.h"
#include "base/json_text.h"
#include "base/random_name.h"
#include "base/utf8.h"

namespace echelon {

World::World() : job_(random_name()) {}

void run_ranks(World& world, const std::function<void(int rank)>& body) { world.run(body); }

std::string failure_report(const std::string& why, const std::vector<std::string>& further, int origin,
                           const std::vector<RankState>& states, const std::vector<std::string>& nodes) {
  std::string text = why;
  for (const std::string& other : further) text += "\n  " + other;
  for (std::size_t i = 0; i < states.size(); ++i)
    text += fmt::format("\n  rank {}{}{}: {}", states[i].rank, states[i].rank == origin ? ", at fault" : "",
                        nodes.empty() ? "" : fmt::format(" [{}]", nodes[i]), describe(states[i]));
  return text;
}

std::string cause_line(int rank, const std::string& cause) {
  return json_text({{"rank", rank}, {"failed", printable(cause)}}) + "\n";
}

std::vector<int> everyone(int n) {
  std::vector<int> ranks(static_cast<std::size_t>(n));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

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
