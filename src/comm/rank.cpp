#include "comm/rank.h"

#include "base/error.h"
#include "comm/recording.h"

namespace echelon {

Rank::Rank(ThreadWorld& world, const Mesh& mesh, int index, DType dtype, Arena& arena, Kernels& kernels,
           Collectives collectives, int first)
    : world_(world),
      mesh_(mesh),
      index_(index),
      first_(first),
      dtype_(dtype),
      arena_(arena),
      kernels_(kernels),
      collectives_(collectives),
      traffic_(std::make_unique<Traffic>()) {
  for (Axis axis : all_axes) axes_[static_cast<std::size_t>(axis)] = join(group(axis), axis_name(axis), axis);
}

std::vector<int> Rank::group(Axis axis) const {
  std::vector<int> ranks = mesh_.group(index_, axis);
  for (int& rank : ranks) rank += first_;
  return ranks;
}

std::unique_ptr<Communicator> Rank::join(const std::vector<int>& ranks, const std::string& name,
                                         Axis axis) const {
  const auto recorded = [&](const std::string& group) {
    return record_traffic(world_.join(first_ + index_, ranks, group), axis, *traffic_);
  };
  if (collectives_ == Collectives::direct) return recorded(name);
  return with_algorithms(recorded(name), recorded(name + " collectives"), collectives_);
}

Communicator& Rank::joined(std::unique_ptr<Communicator>& place, const std::vector<int>& group,
                           const char* name, Axis axis) const {
  if (!place) place = join(group, name, axis);
  check(place->size() == static_cast<int>(group.size()), "a part of an axis has one size in a run");
  return *place;
}

Communicator& Rank::tp_replicas(int replicas) const {
  const std::vector<int> tp = group(Axis::tp);
  const auto first = tp.begin() + coordinate(Axis::tp) / replicas * replicas;
  return joined(replicas_, {first, first + replicas}, "tp replicas", Axis::tp);
}

Communicator& Rank::dp_block(int size) const {
  const std::vector<int> dp = group(Axis::dp);
  if (size == this->size(Axis::dp)) return along(Axis::dp);
  const auto first = dp.begin() + coordinate(Axis::dp) / size * size;
  return joined(dp_block_, {first, first + size}, "dp shards", Axis::dp);
}

Communicator& Rank::dp_across_blocks(int size) const {
  const std::vector<int> dp = group(Axis::dp);
  std::vector<int> ranks;
  for (std::size_t i = static_cast<std::size_t>(coordinate(Axis::dp) % size); i < dp.size();
       i += static_cast<std::size_t>(size))
    ranks.push_back(dp[i]);
  return joined(dp_across_blocks_, ranks, "dp replicas", Axis::dp);
}

}  // namespace echelon
