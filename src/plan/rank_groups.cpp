#include "plan/rank_groups.h"

#include <algorithm>
#include <numeric>

namespace echelon {
namespace {

std::int64_t whole_steps(std::int64_t length, std::int64_t step) { return (length + step - 1) / step; }

}  // namespace

RankGroups expert_groups(const Mesh& mesh) { return {mesh.ep, mesh.expert_cut(), mesh.num_ranks()}; }

WorstPlaced worst_placed(const RankGroups& groups, std::int64_t unit) {
  const auto [size, apart, job] = groups;
  const std::int64_t ranks = size * apart;
  if (size == 1) return {};
  if (unit % ranks == 0) return {size, size, 1};
  if (ranks % unit == 0 && unit % apart == 0) return {unit / apart, unit / apart, ranks / unit};
  const std::int64_t blocks = std::max<std::int64_t>(1, job / ranks);
  if (apart >= unit) return {1, 1, size, blocks > 1 && ranks % unit != 0};
  // Where a group begins in its unit is a multiple of the greatest common divisor of both.
  const std::int64_t step = std::gcd(unit, apart), room = unit / step, stride = apart / step,
                     block = size * stride, repeats = room / std::gcd(room, block);
  WorstPlaced worst{size, 1, 1, blocks > 1 && block % room != 0 && room % block != 0};
  for (std::int64_t k = 0; k < std::min(blocks, repeats); ++k)
    for (std::int64_t j = 0; j < stride; ++j) {
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

}  // namespace echelon
