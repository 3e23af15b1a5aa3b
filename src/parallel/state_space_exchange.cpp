#include "parallel/state_space_exchange.h"

#include <algorithm>
#include <set>

#include "base/error.h"

namespace echelon {

static std::int64_t width_of(const std::vector<Range>& columns) {
  std::int64_t sum = 0;
  for (const Range& range : columns) sum += range.size();
  return sum;
}

static StateSpaceShape part_of(StateSpaceShape all, std::int64_t ranks) {
  check(all.heads % ranks == 0 && (all.groups % ranks == 0 || ranks % all.groups == 0),
        "ranks that exchange heads have as many");
  all.heads /= ranks;
  all.groups = std::max<std::int64_t>(all.groups / ranks, 1);
  return all;
}

StateSpaceExchange::StateSpaceExchange(const Rank& rank, const Plan& plan, const StateSpaceShape& all)
    : rank_(&rank), all_(all), here_(part_of(all, rank.size(Axis::cp))), rows_(rank, plan) {
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

Tensor StateSpaceExchange::to_heads(const Tensor& x, const Columns& columns) const {
  const std::int64_t rows = x.rows(), width = width_of(columns.front()), ranks = std::ssize(columns);
  const Tensor packed = rank_->activation({ranks * rows, width}),
               arrived = rank_->activation({ranks * rows, width});
  for (std::int64_t r = 0; r < ranks; ++r) {
    const Tensor to = packed.row_range(r * rows, (r + 1) * rows);
    std::int64_t begin = 0;
    for (const Range& range : columns[static_cast<std::size_t>(r)]) {
      rank_->kernels().copy(x.column_range(range.begin, range.end),
                            to.column_range(begin, begin + range.size()));
      begin += range.size();
    }
  }
  const std::vector<std::int64_t> counts(columns.size(), rows * width);
  rank_->along(Axis::cp).all_to_all(packed.flat(), counts, arrived.flat(), counts).wait();
  return rows_.in_order(arrived);
}

void StateSpaceExchange::to_tokens(const Tensor& core, const Columns& columns, const Tensor& x) const {
  const std::int64_t rows = x.rows(), width = core.cols();
  const Tensor packed = rows_.by_rank(core), arrived = rank_->activation({core.rows(), width});
  const std::vector<std::int64_t> counts(columns.size(), rows * width);
  rank_->along(Axis::cp).all_to_all(packed.flat(), counts, arrived.flat(), counts).wait();
  std::set<std::int64_t> written;  // where ranges begin
  for (std::size_t r = 0; r < columns.size(); ++r) {
    const auto from_rank = static_cast<std::int64_t>(r) * rows;
    const Tensor part = arrived.row_range(from_rank, from_rank + rows);
    std::int64_t begin = 0;
    for (const Range& range : columns[r]) {
      const Tensor from = part.column_range(begin, begin + range.size()),
                   to = x.column_range(range.begin, range.end);
      if (written.insert(range.begin).second)
        rank_->kernels().copy(from, to);
      else  // a group that an earlier rank had too
        rank_->kernels().add(from, to);
      begin += range.size();
    }
  }
}

}  // namespace echelon
