// Everything that one rank needs: its place in the mesh, its device, and its communicators. Built once and
// passed down.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/algorithm_communicator.h"
#include "comm/communicator.h"
#include "comm/device_groups.h"
#include "comm/recording.h"
#include "comm/threads.h"
#include "spec/precision.h"
#include "spec/rank_groups.h"
#include "spec/traffic.h"
#include "tensor/kernels.h"

namespace echelon {

class Rank {
 public:
  // `arena` and `kernels` belong to this rank's thread and outlive it. Every rank of the job passes the same
  // `collectives`. `first`: the world rank of the mesh's rank 0, if the mesh is only a part of the world.
  // `recorder`, if any, outlives it too, and receives the rank's trace.
  Rank(World& world, const Mesh& mesh, int index, const PrecisionRecipe& precision, Arena& arena,
       Kernels& kernels, Collectives collectives = Collectives::direct, int first = 0,
       TraceRecorder* recorder = nullptr);

  const Mesh& mesh() const { return mesh_; }
  int index() const { return index_; }
  int coordinate(Axis axis) const { return mesh_.coordinate(index_, axis); }
  Coordinates coordinates() const { return mesh_.coordinates(index_); }
  int size(Axis axis) const { return mesh_.size(axis); }
  const PrecisionRecipe& precision() const { return precision_; }
  Arena& arena() const { return arena_; }
  Kernels& kernels() const { return kernels_; }

  // The groups of spec/rank_groups.h that this rank is in. Each is joined at its first use.
  Communicator& group(GroupKind kind, int size) const;
  // Ranks that differ along one axis only.
  Communicator& along(Axis axis) const { return group(static_cast<GroupKind>(axis), size(axis)); }
  // Neighbours in tp that hold the same part of something cut into fewer parts than there are ranks.
  Communicator& tp_replicas(int size) const {
    return size == this->size(Axis::tp) ? along(Axis::tp) : group(GroupKind::tp_replicas, size);
  }
  Communicator& dp_cp() const;
  Communicator& ep() const { return group(GroupKind::ep, mesh_.ep); }
  // The block of `size` ranks, and the group across blocks; if there is only one block, the larger group
  // itself.
  Communicator& dp_cp_block(int size) const;
  Communicator& dp_cp_across_blocks(int size) const {
    return group(GroupKind::dp_replicas, mesh_.dp_cp_size() / size);
  }
  Communicator& same_experts(int size) const;
  Communicator& cp_block(int size) const;
  Communicator& cp_across_blocks(int size) const;
  // Joins a further group of world ranks; traffic in it counts on `axis`. See World::join.
  std::unique_ptr<Communicator> join(const std::vector<int>& ranks, const std::string& name, Axis axis) const;
  // What this rank has sent so far, by verb. A collective counts the least that any algorithm sends
  // (spec/traffic.h), whichever runs.
  const Traffic& traffic() const { return *traffic_; }
  // What the algorithms have sent, as sends, if collectives are not direct.
  const Traffic& messages() const { return *messages_; }
  // Joins all ranks of the job, also those outside the mesh; its traffic does not count.
  std::unique_ptr<Communicator> join_job_aside(const std::string& name) const;
  // Joins a further group of ranks of the mesh whose traffic does not count: for communication outside
  // training.
  std::unique_ptr<Communicator> join_aside(const std::vector<int>& ranks, const std::string& name) const;
  // How long this rank has waited for others so far.
  double waited_seconds() const { return world_.recorder(first_ + index_).waited_seconds(); }
  const std::string& job() const { return world_.job(); }  // World::job
  // The clock of the job; it times everything that people compare.
  const Time& time() const { return world_.time(); }
  // As long as the result lives, this rank waits for these world ranks, in something other than a group's
  // operation.
  AnnouncedWait announce_wait(std::string what, std::vector<int> ranks) const {
    return {world_.recorder(first_ + index_), std::move(what), std::move(ranks)};
  }
  // Announces what this rank is doing, for the report of a failure.
  void at(std::string_view instruction) const { world_.recorder(first_ + index_).at(instruction); }

  // Null if only traffic is recorded.
  TraceRecorder* recorder() const { return recorder_; }
  // Tells when its device did its work; null on the CPU.
  DeviceClock* device_clock() const { return device_clock_.get(); }
  // Traces an activity of the rank as long as the result lives.
  [[nodiscard]] Doing doing(Activity activity, std::int32_t which = -1) const {
    return {recorder_, activity, which};
  }

  Tensor activation(std::vector<std::int64_t> shape) const {
    return {arena_, MemoryCategory::activations, precision_.activations, std::move(shape)};
  }
  // A statistic among a pass's activations.
  Tensor statistic(std::vector<std::int64_t> shape) const {
    return {arena_, MemoryCategory::activations, precision_.statistics, std::move(shape)};
  }

 private:
  std::vector<int> in_world(std::vector<int> ranks) const;

  World& world_;
  Mesh mesh_;
  int index_, first_;
  PrecisionRecipe precision_;
  Arena& arena_;
  Kernels& kernels_;
  Collectives collectives_;
  TraceRecorder* recorder_;
  std::unique_ptr<DeviceClock> device_clock_;
  std::unique_ptr<Traffic> traffic_, messages_;
  std::unique_ptr<DeviceGroups> device_groups_;  // if collectives are the device library's
  mutable std::map<std::pair<GroupKind, int>, std::unique_ptr<Communicator>> groups_;
};

}  // namespace echelon
