#include "parallel/channel_exchange.h"

#include <set>

namespace echelon {

static std::int64_t width_of(const std::vector<Range>& columns) {
  std::int64_t sum = 0;
  for (const Range& range : columns) sum += range.size();
  return sum;
}

Tensor ChannelExchange::to_channels(const Tensor& x, const ExchangedColumns& columns) const {
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

void ChannelExchange::to_tokens(const Tensor& of_channels, const ExchangedColumns& columns,
                                const Tensor& x) const {
  const std::int64_t rows = x.rows(), width = of_channels.cols();
  const Tensor packed = rows_.by_rank(of_channels), arrived = rank_->activation({of_channels.rows(), width});
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
      else  // which an earlier rank had too
        rank_->kernels().add(from, to);
      begin += range.size();
    }
  }
}

}  // namespace echelon
