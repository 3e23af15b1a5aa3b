#include "parallel/state_space_exchange.h"

#include <algorithm>

#include "base/error.h"

namespace echelon {

static StateSpaceShape part_of(StateSpaceShape all, std::int64_t ranks) {
  check(all.heads % ranks == 0 && (all.groups % ranks == 0 || ranks % all.groups == 0),
        "ranks that exchange heads have as many");
  all.heads /= ranks;
  all.groups = std::max<std::int64_t>(all.groups / ranks, 1);
  return all;
}

StateSpaceExchange::StateSpaceExchange(const Rank& rank, const Plan& plan, const StateSpaceShape& all)
    : rank_(&rank), all_(all), here_(part_of(all, rank.size(Axis::cp))), exchange_(rank, plan) {
  const std::int64_t width = all.width(), steps = width + all.mixed_width();
  for (int r = 0; r < rank.size(Axis::cp); ++r) {
    const Range heads = heads_of(r), channels{heads.begin * all.head_dim, heads.end * all.head_dim};
    made_.push_back({channels});
    given_.push_back({channels});
    for (const Range& range : mixed_of(r)) given_.back().push_back({width + range.begin, width + range.end});
    given_.back().push_back({steps + heads.begin, steps + heads.end});
    if (all.delta) given_.back().push_back({steps + all.heads + heads.begin, steps + all.heads + heads.end});
  }
}

Range StateSpaceExchange::heads_of(int rank) const { return {rank * here_.heads, (rank + 1) * here_.heads}; }

std::vector<Range> StateSpaceExchange::mixed_of(int rank) const {
  const Range heads = heads_of(rank);
  const std::int64_t first = heads.begin / (all_.heads / all_.groups) * all_.state,
                     size = here_.groups * all_.state, b = all_.width(), c = b + all_.groups * all_.state;
  return {{heads.begin * all_.head_dim, heads.end * all_.head_dim},
          {b + first, b + first + size},
          {c + first, c + first + size}};
}

}  // namespace echelon
