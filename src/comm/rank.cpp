#include "comm/rank.h"

#include <utility>

#include "base/error.h"

namespace echelon {

Rank::Rank(World& world, const Mesh& mesh, int index, const PrecisionRecipe& precision, Arena& arena,
           Kernels& kernels, Collectives collectives, int first, TraceRecorder* recorder)
    : world_(world),
      mesh_(mesh),
      index_(index),
      first_(first),
      precision_(precision),
      arena_(arena),
      kernels_(kernels),
      collectives_(collectives),
      recorder_(recorder),
      traffic_(std::make_unique<Traffic>()),
      messages_(std::make_unique<Traffic>()) {
  if (arena.device() == Device::cuda) {
    device_clock_ = std::make_unique<DeviceClock>(arena.stream(), world.time());
    if (recorder != nullptr) recorder->time_by(*device_clock_);
  }
  check(mesh.ep >= 1 && mesh.dp_cp_size() % mesh.ep == 0, "expert groups make up the dp x cp group");
  if (collectives_ == Collectives::nccl) {
    check(arena.device() == Device::cuda, "the collectives of devices are asked for without one");
    device_groups_ =
        std::make_unique<DeviceGroups>(world_, first_ + index_, arena.stream().driver().collectives());
  }
  for (GroupKind axis : {GroupKind::pp, GroupKind::dp, GroupKind::cp, GroupKind::tp})
    group(axis, mesh.size(traffic_axis(axis)));
}

std::vector<int> Rank::in_world(std::vector<int> ranks) const {
  for (int& rank : ranks) rank += first_;
  return ranks;
}

std::unique_ptr<Communicator> Rank::join(const std::vector<int>& ranks, const std::string& name,
                                         Axis axis) const {
  auto group = world_.join(first_ + index_, ranks, name);
  if (device_groups_ && group->size() > 1) {
    group = device_groups_->join(std::move(group), name, ranks);
  } else if (!device_groups_ && collectives_ != Collectives::direct) {
    auto channels = world_.join(first_ + index_, ranks, name + " collectives");
    group = with_algorithms(std::move(group),
                            record_traffic(std::move(channels), axis, *messages_,
                                           {recorder_, name + " collectives", ranks, true}),
                            collectives_);
  }
  return record_traffic(std::move(group), axis, *traffic_, {recorder_, name, ranks});
}

std::unique_ptr<Communicator> Rank::join_aside(const std::vector<int>& ranks, const std::string& name) const {
  return world_.join(first_ + index_, in_world(ranks), name);
}

std::unique_ptr<Communicator> Rank::join_job_aside(const std::string& name) const {
  return world_.join(first_ + index_, everyone(world_.num_ranks()), name);
}

Communicator& Rank::group(GroupKind kind, int size) const {
  auto& joined = groups_[{kind, size}];
  if (!joined)
    joined = join(in_world(group_ranks(mesh_, index_, kind, size)), group_name(kind), traffic_axis(kind));
  return *joined;
}

Communicator& Rank::dp_cp() const {
  return size(Axis::cp) == 1 ? along(Axis::dp) : group(GroupKind::dp_cp, mesh_.dp_cp_size());
}

Communicator& Rank::dp_cp_block(int size) const {
  return size == mesh_.dp_cp_size() ? dp_cp() : group(GroupKind::dp_shards, size);
}

Communicator& Rank::same_experts(int size) const {
  return mesh_.ep == 1 ? dp_cp_block(size) : group(GroupKind::same_experts, size / mesh_.ep);
}

Communicator& Rank::cp_block(int size) const {
  return size == this->size(Axis::cp) ? along(Axis::cp) : group(GroupKind::cp_heads, size);
}

Communicator& Rank::cp_across_blocks(int size) const {
  return size == 1 ? along(Axis::cp) : group(GroupKind::cp_ring, this->size(Axis::cp) / size);
}

}  // namespace echelon
