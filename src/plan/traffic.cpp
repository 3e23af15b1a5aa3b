#include "plan/traffic.h"

#include <algorithm>

#include "spec/flat_layout.h"

namespace echelon {
namespace {

class Counter {
 public:
  Counter(Traffic& traffic, Axis axis, int size, int index)
      : traffic_(traffic), axis_(axis), size_(size), index_(index) {}

  void all_reduce(std::int64_t count, std::int64_t width) {
    add(Verb::all_reduce, all_reduce_bytes_sent(count, size_, index_, width));
  }
  // A matrix of rows x cols whose rows are cut over the group.
  void rows(Verb verb, std::int64_t count, std::int64_t cols, std::int64_t width) {
    std::vector<std::int64_t> parts;
    for (int i = 0; i < size_; ++i) parts.push_back(split_range(count, size_, i).size() * cols);
    add(verb, bytes_sent(verb, parts, index_, width));
  }

 private:
  void add(Verb verb, std::int64_t bytes) {
    if (size_ == 1) return;
    traffic_.at(axis_, verb).calls += 1;
    traffic_.at(axis_, verb).bytes += bytes;
  }

  Traffic& traffic_;
  Axis axis_;
  int size_, index_;
};

void count_microbatch(const Plan& plan, std::int64_t rows, Counter& tp) {
  const std::int64_t width = element_bytes(plan.dtype), hidden = plan.model.hidden;
  const bool sp = plan.shards_sequence();
  const auto enter = [&](bool backward) {
    if (sp)
      tp.rows(backward ? Verb::reduce_scatter : Verb::all_gather, rows, hidden, width);
    else if (backward)
      tp.all_reduce(rows * hidden, width);
  };
  const auto leave = [&](bool backward) {
    if (sp)
      tp.rows(backward ? Verb::all_gather : Verb::reduce_scatter, rows, hidden, width);
    else if (!backward)
      tp.all_reduce(rows * hidden, width);
  };
  for (bool backward : {false, true}) {
    leave(backward);                                                                  // embedding
    for (std::int64_t regions = 2 * plan.model.num_layers; regions > 0; --regions) {  // attention and MLP
      enter(backward);
      leave(backward);
    }
    enter(backward);  // output layer
  }
  // Cross-entropy: the maxima, then sums and targets' logits.
  for (std::int64_t begin = 0; begin < rows; begin += logits_chunk_rows) {
    const std::int64_t chunk = std::min(logits_chunk_rows, rows - begin);
    tp.all_reduce(chunk, width);
    tp.all_reduce(2 * chunk, width);
  }
}

}  // namespace

Traffic predict_traffic(const Plan& plan, int dp_rank, int tp_rank) {
  Traffic traffic;
  const int tp = plan.mesh.size(Axis::tp), dp = plan.mesh.size(Axis::dp);
  const std::int64_t width = element_bytes(plan.dtype);
  Counter along_tp(traffic, Axis::tp, tp, tp_rank), along_dp(traffic, Axis::dp, dp, dp_rank);
  for (const Range& batch : microbatches(plan, dp_rank))
    count_microbatch(plan, batch.size() * plan.seq_len, along_tp);

  const auto groups = layer_groups(plan.model);
  const FlatLayout layout = flat_layout(groups, tp, tp_rank);
  std::int64_t num_parameters = 0;
  for (const auto& group : groups)
    for (const ParamSpec& spec : group) {
      ++num_parameters;
      const int replicas = tp_replicas(spec, tp);
      if (spec.shard_dim >= 0 && replicas > 1)  // key/value heads that several ranks share
        Counter(traffic, Axis::tp, replicas, tp_rank % replicas)
            .all_reduce(local_numel(spec, tp, tp_rank), width);
    }
  if (plan.shards_sequence() && layout.whole_range.size() > 0)
    along_tp.all_reduce(layout.whole_range.size(), width);
  along_tp.all_reduce(num_parameters, 8);  // squares of the gradient norm
  for (const Range& bucket : gradient_buckets(layout, default_bucket_bytes / width))
    along_dp.all_reduce(bucket.size(), width);
  along_dp.all_reduce(1, 8);  // number of targets
  along_dp.all_reduce(1, 8);  // the loss
  return traffic;
}

}  // namespace echelon
