#include "parallel/expert_exchange.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/split.h"
#include "comm/host_group.h"
#include "tensor/host.h"

namespace echelon {
namespace {

std::vector<std::int64_t> times(std::vector<std::int64_t> counts, std::int64_t width) {
  for (std::int64_t& count : counts) count *= width;
  return counts;
}

Tensor elements(const Tensor& rows, std::int64_t count) { return rows.flat_range(0, count * rows.cols()); }

}  // namespace

ExpertExchange::Route ExpertExchange::route(const ExpertBounds& bounds, std::int64_t copies,
                                            std::int64_t room, const ExpertBounds& by_run,
                                            const PositionRuns& order) const {
  Route route;
  if (is_local()) {
    route.bounds = bounds;
    route.of_sequences = by_run;
    route.room = copies;
    return route;
  }
  const auto ranks = static_cast<std::size_t>(rank_->size(Axis::ep));
  const auto here = static_cast<std::size_t>(num_experts_) / ranks;
  const ExpertBounds& runs = by_run.empty() ? bounds : by_run;
  const std::size_t of_expert = (runs.size() - 1) / (ranks * here);
  std::vector<std::int32_t> leaving;
  for (std::size_t i = 0; i + 1 < runs.size(); ++i)
    leaving.push_back(static_cast<std::int32_t>(runs[i + 1] - runs[i]));
  const std::vector<std::int32_t> coming = HostGroup(rank_->ep()).exchange(leaving);
  std::vector<std::int32_t> counts;  // [rank][expert here]
  for (auto at = coming.begin(); at != coming.end(); at += static_cast<std::ptrdiff_t>(of_expert))
    counts.push_back(std::accumulate(at, at + static_cast<std::ptrdiff_t>(of_expert), 0));
  route.bounds.assign(here + 1, 0);
  for (std::size_t r = 0; r < ranks; ++r) {
    route.sent.push_back(bounds[(r + 1) * here] - bounds[r * here]);
    const auto first = counts.begin() + static_cast<std::ptrdiff_t>(r * here);
    route.received.push_back(
        std::accumulate(first, first + static_cast<std::ptrdiff_t>(here), std::int64_t{0}));
    for (std::size_t e = 0; e < here; ++e) route.bounds[e + 1] += counts[r * here + e];
  }
  std::partial_sum(route.bounds.begin(), route.bounds.end(), route.bounds.begin());
  route.away = sum_of(route.sent) - route.sent[static_cast<std::size_t>(rank_->ep().rank())];
  const std::int64_t total = route.bounds.back();
  route.from_others = total - route.received[static_cast<std::size_t>(rank_->ep().rank())];
  check(room == 0 || total <= room, "capacities bound what arrives");
  route.room = room == 0 ? total : room;
  route.arrived = integers(route.room);
  route.rows = integers(route.room);
  // For each expert, the copies of one rank (or cp group) after another; within a cp group sequence by
  // sequence. A dry run only counts them.
  const bool imagined = route.rows.device() == Device::none;
  const auto room_rows = imagined ? 0 : static_cast<std::size_t>(route.room);
  std::vector<std::int32_t> arrived(room_rows, -1),
      rows(room_rows, -1);  // what is not used stands for nothing
  std::vector<std::int32_t> first(coming.size() + 1);  // where each run's first copy arrived
  std::partial_sum(coming.begin(), coming.end(), first.begin() + 1);
  const bool together = !by_run.empty() && order.ranks > 1;
  const std::size_t group = together ? static_cast<std::size_t>(order.ranks) : 1,
                    of_sequence = together ? static_cast<std::size_t>(order.of_rank) : 1;
  std::int32_t row = 0;
  const auto take = [&](std::size_t rank, std::size_t expert, std::size_t run) {
    const std::size_t at = (rank * here + expert) * of_expert + run;
    if (imagined) row += coming[at];
    for (std::int32_t place = first[at]; !imagined && place < first[at + 1]; ++place, ++row) {
      arrived[static_cast<std::size_t>(row)] = place;
      rows[static_cast<std::size_t>(place)] = row;
    }
  };
  if (!by_run.empty()) route.of_sequences.assign(1, 0);
  for (std::size_t e = 0; e < here; ++e)
    for (std::size_t r = 0; r < ranks; r += group)
      for (std::size_t s = 0; s < of_expert / of_sequence; ++s) {
        if (together)
          for (const PositionRuns::Place& p : order.order)
            take(r + static_cast<std::size_t>(p.cp_rank), e,
                 s * of_sequence + static_cast<std::size_t>(p.run));
        else
          take(r, e, s);
        if (!by_run.empty()) route.of_sequences.push_back(row);
      }
  if (imagined) return route;
  copy_from_host(arrived, route.arrived);
  copy_from_host(rows, route.rows);
  return route;
}

InFlight ExpertExchange::begin_dispatch(const Tensor& copies, const Route& route) const {
  if (is_local()) return InFlight(copies);
  const std::int64_t width = copies.cols();
  const Tensor arrived = like(copies, route.room);
  return {arrived,
          rank_->ep().all_to_all(elements(copies, sum_of(route.sent)), times(route.sent, width),
                                 elements(arrived, sum_of(route.received)), times(route.received, width)),
          until_then(copies)};
}

Tensor ExpertExchange::arrange(InFlight arriving, const Route& route) const {
  const Tensor arrived = arriving.get();
  if (is_local()) return arrived;
  const Tensor rows = like(arrived, route.room);
  rank_->kernels().embedding(route.arrived, arrived, 0, rows);
  return rows;
}

Tensor ExpertExchange::dispatch(Tensor copies, const Route& route) const {
  InFlight arriving = begin_dispatch(copies, route);
  copies = Tensor();
  return arrange(std::move(arriving), route);
}

InFlight ExpertExchange::begin_combine(Tensor rows, const Route& route, std::int64_t copies) const {
  if (is_local()) return InFlight(rows);
  const std::int64_t width = rows.cols();
  const Tensor leaving = like(rows, route.room);
  rank_->kernels().embedding(route.rows, rows, 0, leaving);
  rows = Tensor();
  const Tensor back = like(leaving, copies);
  return {back,
          rank_->ep().all_to_all(elements(leaving, sum_of(route.received)), times(route.received, width),
                                 elements(back, sum_of(route.sent)), times(route.sent, width)),
          until_then(leaving)};
}

}  // namespace echelon
