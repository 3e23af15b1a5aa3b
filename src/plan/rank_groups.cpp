#include "plan/rank_groups.h"

#include <algorithm>
#include <numeric>
#include <optional>

namespace echelon {
namespace {

std::int64_t whole_steps(std::int64_t length, std::int64_t step) { return (length + step - 1) / step; }

std::int64_t num_blocks(const RankGroups& g) {
  return g.count > 0 ? 1 : std::max<std::int64_t>(1, g.job / (g.size * g.stride));
}

// Where the sizes alone say that all groups lie alike.
std::optional<WorstPlaced> placed_alike(const RankGroups& groups, std::int64_t unit) {
  const std::int64_t size = groups.size, apart = groups.stride, ranks = size * apart;
  if (size == 1) return WorstPlaced{};
  if (groups.count == 0) {
    if (unit % ranks == 0) return WorstPlaced{size, size, 1};
    if (ranks % unit == 0 && unit % apart == 0) return WorstPlaced{unit / apart, unit / apart, ranks / unit};
  }
  if (apart >= unit) return WorstPlaced{1, 1, size, num_blocks(groups) > 1 && ranks % unit != 0};
  return {};
}

// Looks at every group.
WorstPlaced worst_of_all(const RankGroups& groups, std::int64_t unit) {
  const std::int64_t size = groups.size, apart = groups.stride, blocks = num_blocks(groups);
  // Where a group begins in its unit is a multiple of the greatest common divisor of both.
  const std::int64_t step = std::gcd(unit, apart), room = unit / step, stride = apart / step,
                     block = size * stride, repeats = room / std::gcd(room, block),
                     begin_at = groups.first / step,
                     end_at = (groups.first + groups.num_neighbours() - 1) / step + 1;
  WorstPlaced worst{size, 1, 1, blocks > 1 && block % room != 0 && room % block != 0};
  for (std::int64_t k = 0; k < std::min(blocks, repeats); ++k)
    for (std::int64_t j = begin_at; j < end_at; ++j) {
      const std::int64_t first = (k * block + j) % room, last = first + (size - 1) * stride,
                         units = last / room + 1;
      if (units == 1) continue;
      const auto see = [&](std::int64_t members) {
        worst.fewest = std::min(worst.fewest, members);
        worst.most = std::max(worst.most, members);
      };
      worst.across = std::max(worst.across, units);
      see(whole_steps(room - first, stride));
      see(last % room / stride + 1);
      // Between the two ends, the number of members in a unit repeats after at most `stride` units.
      for (std::int64_t u = 1; u < std::min(units - 1, stride + 1); ++u) {
        const std::int64_t begin = u * room,
                           member = first + whole_steps(begin - first, stride) * stride - begin;
        see(whole_steps(room - member, stride));
      }
    }
  return worst.across == 1 ? WorstPlaced{size, size, 1} : worst;
}

}  // namespace

RankGroups expert_groups(const Mesh& mesh) { return {mesh.ep, mesh.expert_cut(), mesh.num_ranks()}; }

WorstPlaced worst_placed(const RankGroups& groups, std::int64_t unit) {
  const auto alike = placed_alike(groups, unit);
  return alike ? *alike : worst_of_all(groups, unit);
}

WorstPlaced Placements::worst(const RankGroups& groups, std::int64_t unit) {
  if (const auto alike = placed_alike(groups, unit)) return *alike;
  const auto [found, is_new] =
      found_.try_emplace({groups.size, groups.stride, groups.job, groups.count, groups.first, unit});
  if (is_new) found->second = worst_of_all(groups, unit);
  return found->second;
}

}  // namespace echelon
