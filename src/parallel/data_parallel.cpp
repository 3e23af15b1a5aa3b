#include "parallel/data_parallel.h"

namespace echelon {

DataParallel::DataParallel(const Rank& rank, Tensor gradients, std::vector<Range> buckets)
    : rank_(&rank), gradients_(std::move(gradients)), buckets_(std::move(buckets)) {
  if (rank.size(Axis::dp) == 1) buckets_.clear();
}

void DataParallel::send_next() {
  const Range bucket = buckets_[next_++];
  under_way_.push_back(rank_->along(Axis::dp).all_reduce(gradients_.flat_range(bucket.begin, bucket.end)));
}

void DataParallel::ready_from(std::int64_t begin) {
  // The last bucket (the parameters that are whole on each tp rank) lies behind the others and waits for
  // finish().
  while (next_ + 1 < buckets_.size() && buckets_[next_].begin >= begin) send_next();
  for (Pending& pending : under_way_) pending.progress();
}

void DataParallel::finish() {
  while (next_ < buckets_.size()) send_next();
  for (Pending& pending : under_way_) pending.wait();
  under_way_.clear();
}

}  // namespace echelon
