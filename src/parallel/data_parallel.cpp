#include "parallel/data_parallel.h"

#include <algorithm>

namespace echelon {

DataParallel::DataParallel(const Rank& rank, int shards, GradientReducer& reducer, std::int64_t step,
                           std::vector<BucketTensors> buckets)
    : rank_(&rank), shards_(shards), reducer_(&reducer), step_(step), buckets_(std::move(buckets)) {
  if (rank.mesh().dp_cp_size() == 1) buckets_.clear();
  for (const BucketTensors& bucket : buckets_) missing_.push_back(bucket.range.size());
}

ReductionGroups DataParallel::groups(const Rank& rank, const Plan& plan) {
  const int ranks = plan.zero_stage() == 0 ? rank.mesh().dp_cp_size() : plan.shards();
  return {rank.dp_cp_block(ranks), rank.same_experts(ranks)};
}

void DataParallel::send_next() {
  const BucketTensors& bucket = buckets_[next_];
  if (bucket.comes_and_goes) {
    finish_oldest();
    bucket.own.acquire_memory();
  }
  reducer_->begin(next_++, step_, bucket.whole, bucket.own);
}

bool DataParallel::finish_oldest() {
  const auto index = reducer_->finish_oldest();
  if (!index) return false;
  const BucketTensors& bucket = buckets_[*index];
  if (bucket.comes_and_goes) bucket.whole.release_memory();
  if (bucket.own.defined() && rank_->mesh().dp_cp_size() > shards_)
    across_blocks_.push_back(rank_->dp_cp_across_blocks(shards_).all_reduce(bucket.own));
  return true;
}

void DataParallel::ready(Range range) {
  for (std::size_t i = next_; i < buckets_.size(); ++i) {
    const std::int64_t begin = std::max(range.begin, buckets_[i].range.begin),
                       end = std::min(range.end, buckets_[i].range.end);
    if (begin < end) missing_[i] -= end - begin;
  }
  while (next_ < buckets_.size() && missing_[next_] == 0) send_next();
  reducer_->progress();
  for (Pending& pending : across_blocks_) pending.progress();
}

void DataParallel::finish() {
  while (next_ < buckets_.size()) send_next();
  while (finish_oldest()) {
  }
  for (Pending& pending : across_blocks_) pending.wait();
  across_blocks_.clear();
}

}  // namespace echelon
