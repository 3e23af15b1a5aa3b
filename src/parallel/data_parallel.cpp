#include "parallel/data_parallel.h"

#include <algorithm>

namespace echelon {

DataParallel::DataParallel(const Rank& rank, int shards, std::vector<GradientBucket> buckets)
    : rank_(&rank), shards_(shards), buckets_(std::move(buckets)) {
  if (rank.size(Axis::dp) == 1) buckets_.clear();
  for (const GradientBucket& bucket : buckets_) missing_.push_back(bucket.range.size());
}

void DataParallel::send_next() {
  const std::size_t index = next_++;
  const GradientBucket& bucket = buckets_[index];
  if (!bucket.own.defined()) {
    all_reducing_.push_back(rank_->along(Axis::dp).all_reduce(bucket.whole));
    return;
  }
  if (bucket.releases_whole && !scattering_.empty()) finish_oldest_scatter();
  scattering_.push_back(
      {index, rank_->dp_block(shards_).reduce_scatter(bucket.whole, bucket.own, bucket.counts)});
}

void DataParallel::finish_oldest_scatter() {
  const GradientBucket& bucket = buckets_[scattering_.front().bucket];
  scattering_.front().pending.wait();
  scattering_.pop_front();
  if (bucket.releases_whole) bucket.whole.release_memory();
  if (rank_->size(Axis::dp) > shards_)
    all_reducing_.push_back(rank_->dp_across_blocks(shards_).all_reduce(bucket.own));
}

void DataParallel::ready(Range range) {
  for (std::size_t i = next_; i < buckets_.size(); ++i) {
    const std::int64_t begin = std::max(range.begin, buckets_[i].range.begin),
                       end = std::min(range.end, buckets_[i].range.end);
    if (begin < end) missing_[i] -= end - begin;
  }
  while (next_ < buckets_.size() && missing_[next_] == 0) send_next();
  for (Scatter& scatter : scattering_) scatter.pending.progress();
  for (Pending& pending : all_reducing_) pending.progress();
}

void DataParallel::finish() {
  while (next_ < buckets_.size()) send_next();
  while (!scattering_.empty()) finish_oldest_scatter();
  for (Pending& pending : all_reducing_) pending.wait();
  all_reducing_.clear();
}

}  // namespace echelon
