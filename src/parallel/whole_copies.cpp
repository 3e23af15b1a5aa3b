#include "parallel/whole_copies.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/split.h"
#include "comm/host_group.h"
#include "tensor/host.h"

namespace echelon {

PositionRuns::PositionRuns(const Plan& plan) : ranks(plan.mesh.size(Axis::cp)) {
  order.clear();
  const ContextLayout layout(plan);
  std::vector<std::pair<std::int64_t, Place>> places;  // by their first position
  for (int r = 0; r < ranks; ++r) {
    // Ranks that exchange heads share out what runs of a ring index have, and may cut inside of one.
    const PositionRun core = layout.runs(layout.ring_index(r)).front();
    const std::int64_t size = core.stride > 1 ? 1 : std::gcd(core.size, layout.tokens_here());
    of_rank = static_cast<int>(layout.tokens_here() / size);
    const std::vector<std::int64_t> positions = layout.positions(r);
    for (int i = 0; i < of_rank; ++i)
      places.push_back({positions[static_cast<std::size_t>(i * size)], {r, i}});
  }
  std::sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [position, place] : places) order.push_back(place);
}

WholeCopies::WholeCopies(const Rank& rank, const PositionRuns& runs, const ExpertBounds& by_run,
                         std::int64_t sequences, MovedCopies& moved)
    : rank_(&rank), moved_(&moved) {
  const auto ranks = static_cast<std::size_t>(runs.ranks), width = by_run.size() - 1;
  std::vector<std::int32_t> leaving;  // the same to each
  for (std::size_t r = 0; r < ranks; ++r)
    for (std::size_t i = 0; i < width; ++i)
      leaving.push_back(static_cast<std::int32_t>(by_run[i + 1] - by_run[i]));
  const std::vector<std::int32_t> coming = HostGroup(rank.along(Axis::cp)).exchange(leaving);
  std::vector<std::int32_t> first(coming.size() + 1);  // place of each run's first copy
  std::partial_sum(coming.begin(), coming.end(), first.begin() + 1);
  for (std::size_t r = 0; r < ranks; ++r) counts_.push_back(first[(r + 1) * width] - first[r * width]);
  const auto of_rank = static_cast<std::size_t>(runs.of_rank),
             groups = width / of_rank;  // an expert's of a sequence
  check(static_cast<std::int64_t>(groups) % sequences == 0, "there are runs of each sequence");
  std::vector<std::int32_t> places;
  for (std::size_t g = 0; g < groups; ++g) {
    for (const PositionRuns::Place& place : runs.order) {
      const std::size_t at =
          static_cast<std::size_t>(place.cp_rank) * width + g * of_rank + static_cast<std::size_t>(place.run);
      for (std::int32_t i = 0; i < coming[at]; ++i) places.push_back(first[at] + i);
    }
    of_sequences_.push_back(std::ssize(places));
  }
  places_ = Tensor(rank.arena(), MemoryCategory::activations, DType::i32, {std::ssize(places)});
  copy_from_host(places, places_);
}

Tensor WholeCopies::in_order(const Tensor& by_rank) const {
  if (by_rank.numel() == 0) return by_rank;
  const Tensor all(rank_->arena(), MemoryCategory::activations, by_rank.dtype(), by_rank.shape());
  rank_->kernels().embedding(places_, by_rank, 0, all);
  return all;
}

Tensor WholeCopies::gather(const WholeRows& rows, const Tensor& here) const {
  Communicator& cp = rank_->along(Axis::cp);
  const std::int64_t own = counts_[static_cast<std::size_t>(cp.rank())];
  moved_->gathered_bytes += (cp.size() - 1) * own * here.cols() * element_bytes(here.dtype());
  return in_order(rows.all_of(cp, here.row_range(0, own), counts_));
}

Tensor WholeCopies::gather_part(const WholeRows& rows, const Tensor& here) const {
  Communicator& cp = rank_->along(Axis::cp);
  const std::int64_t own = counts_[static_cast<std::size_t>(cp.rank())],
                     others = here.cols() - split_range(here.cols(), cp.size(), cp.rank()).size();
  moved_->exchanged_bytes += own * others * element_bytes(here.dtype());
  return in_order(rows.part_of_all(cp, here.row_range(0, own), counts_));
}

}  // namespace echelon
