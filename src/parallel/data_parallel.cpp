#include "parallel/data_parallel.h"

#include <algorithm>

namespace echelon {

DataParallel::DataParallel(const Rank& rank, Tensor gradients, std::vector<Range> buckets)
    : rank_(&rank), gradients_(std::move(gradients)), buckets_(std::move(buckets)) {
  if (rank.size(Axis::dp) == 1) buckets_.clear();
  for (const Range& bucket : buckets_) missing_.push_back(bucket.size());
}

void DataParallel::send_next() {
  const Range bucket = buckets_[next_++];
  under_way_.push_back(rank_->along(Axis::dp).all_reduce(gradients_.flat_range(bucket.begin, bucket.end)));
}

void DataParallel::ready(Range range) {
  for (std::size_t i = next_; i < buckets_.size(); ++i) {
    const std::int64_t begin = std::max(range.begin, buckets_[i].begin),
                       end = std::min(range.end, buckets_[i].end);
    if (begin < end) missing_[i] -= end - begin;
  }
  while (next_ < buckets_.size() && missing_[next_] == 0) send_next();
  for (Pending& pending : under_way_) pending.progress();
}

void DataParallel::finish() {
  while (next_ < buckets_.size()) send_next();
  for (Pending& pending : under_way_) pending.wait();
  under_way_.clear();
}

}  // namespace echelon
