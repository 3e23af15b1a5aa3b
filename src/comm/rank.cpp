#include "comm/rank.h"

#include "base/error.h"
#include "comm/recording.h"

namespace echelon {

Rank::Rank(ThreadWorld& world, const Mesh& mesh, int index, DType dtype, Arena& arena, Kernels& kernels)
    : world_(world),
      mesh_(mesh),
      index_(index),
      dtype_(dtype),
      arena_(arena),
      kernels_(kernels),
      traffic_(std::make_unique<Traffic>()) {
  for (Axis axis : all_axes)
    axes_[static_cast<std::size_t>(axis)] =
        record_traffic(world.join(index, mesh.group(index, axis), axis_name(axis)), axis, *traffic_);
}

Communicator& Rank::tp_replicas(int replicas) const {
  if (!replicas_) {
    const std::vector<int> tp = mesh_.group(index_, Axis::tp);
    const int first = coordinate(Axis::tp) / replicas * replicas;
    const std::vector<int> group(tp.begin() + first, tp.begin() + first + replicas);
    replicas_ = record_traffic(world_.join(index_, group, "tp replicas"), Axis::tp, *traffic_);
  }
  check(replicas_->size() == replicas, "one number of key/value replicas a run");
  return *replicas_;
}

}  // namespace echelon
