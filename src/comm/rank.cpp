#include "comm/rank.h"

#include "base/error.h"
#include "comm/recording.h"

namespace echelon {

Rank::Rank(ThreadWorld& world, const Mesh& mesh, int index, DType dtype, Arena& arena, Kernels& kernels,
           Collectives collectives)
    : world_(world),
      mesh_(mesh),
      index_(index),
      dtype_(dtype),
      arena_(arena),
      kernels_(kernels),
      collectives_(collectives),
      traffic_(std::make_unique<Traffic>()) {
  for (Axis axis : all_axes)
    axes_[static_cast<std::size_t>(axis)] = join(mesh.group(index, axis), axis_name(axis), axis);
}

std::unique_ptr<Communicator> Rank::join(const std::vector<int>& ranks, const std::string& name,
                                         Axis axis) const {
  const auto recorded = [&](const std::string& group) {
    return record_traffic(world_.join(index_, ranks, group), axis, *traffic_);
  };
  if (collectives_ == Collectives::direct) return recorded(name);
  return with_algorithms(recorded(name), recorded(name + " collectives"), collectives_);
}

Communicator& Rank::tp_replicas(int replicas) const {
  if (!replicas_) {
    const std::vector<int> tp = mesh_.group(index_, Axis::tp);
    const int first = coordinate(Axis::tp) / replicas * replicas;
    const std::vector<int> group(tp.begin() + first, tp.begin() + first + replicas);
    replicas_ = join(group, "tp replicas", Axis::tp);
  }
  check(replicas_->size() == replicas, "one number of key/value replicas a run");
  return *replicas_;
}

}  // namespace echelon
