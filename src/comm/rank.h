// All that one rank needs: where it stands in the mesh, its device, and its communicators. Built once and
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
  // Joins the groups of every axis in `world`. `arena` and `kernels` belong to this rank's thread and outlive
  // it. Every rank of the job names the same `collectives`.
  // `first`: the world rank of the mesh's rank 0, where a mesh is a part of the world. `recorder`, if any,
  // outlives it too, and gets the rank's trace.
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

  // The groups of spec/rank_groups.h that this rank is in, each joined at its first use.
  Communicator& group(GroupKind kind, int size) const;
  // Ranks that differ along one axis only.
  Communicator& along(Axis axis) const { return group(static_cast<GroupKind>(axis), size(axis)); }
  // Neighbours in tp that hold the same part of what is cut into fewer parts than there are ranks.
  Communicator& tp_replicas(int size) const {
    return size == this->size(Axis::tp) ? along(Axis::tp) : group(GroupKind::tp_replicas, size);
  }
  Communicator& dp_cp() const;
  Communicator& ep() const { return group(GroupKind::ep, mesh_.ep); }
  // Of blocks of `size` ranks, and across them; the larger group itself where there is one block.
  Communicator& dp_cp_block(int size) const;
  Communicator& dp_cp_across_blocks(int size) const {
    return group(GroupKind::dp_replicas, mesh_.dp_cp_size() / size);
  }
  Communicator& same_experts(int size) const;
  Communicator& cp_block(int size) const;
  Communicator& cp_across_blocks(int size) const;
  // A further group, of world ranks; what this rank sends there counts on `axis`. See World::join.
  std::unique_ptr<Communicator> join(const std::vector<int>& ranks, const std::string& name, Axis axis) const;
  // What this rank has sent so far, by the verbs that it called: of a collective the least that any algorithm
  // sends (spec/traffic.h), whichever does it.
  const Traffic& traffic() const { return *traffic_; }
  // What the algorithms of other than direct collectives have sent for it, as sends.
  const Traffic& messages() const { return *messages_; }
  // All ranks of the job, those beside the mesh too; not counted.
  std::unique_ptr<Communicator> join_job_aside(const std::string& name) const;
  // A further group of ranks of the mesh, whose traffic is not counted: for what is said beside the training.
  std::unique_ptr<Communicator> join_aside(const std::vector<int>& ranks, const std::string& name) const;
  // Seconds that this rank has waited for others so far.
  double waited_seconds() const { return world_.recorder(first_ + index_).waited_seconds(); }
  const std::string& job() const { return world_.job(); }  // World::job
  // The clock of the job: what is timed for people to compare is timed by it.
  const Time& time() const { return world_.time(); }
  // While the result lives this rank waits for these ranks of the world, in something else than an operation
  // of a group.
  AnnouncedWait announce_wait(std::string what, std::vector<int> ranks) const {
    return {world_.recorder(first_ + index_), std::move(what), std::move(ranks)};
  }
  // Says what this rank is at, for the report of a failure.
  void at(std::string_view instruction) const { world_.recorder(first_ + index_).at(instruction); }

  // Null where nothing but traffic is recorded.
  TraceRecorder* recorder() const { return recorder_; }
  // When its device did what it was told; null on the cpu.
  DeviceClock* device_clock() const { return device_clock_.get(); }
  // What the rank is at, for its trace, while the result lives.
  [[nodiscard]] Doing doing(Activity activity, std::int32_t which = -1) const {
    return {recorder_, activity, which};
  }

  Tensor activation(std::vector<std::int64_t> shape) const {
    return {arena_, MemoryCategory::activations, precision_.activations, std::move(shape)};
  }
  // A value of a pass that is a statistic of others.
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
  std::unique_ptr<DeviceGroups> device_groups_;  // where the collectives are the device's library's
  mutable std::map<std::pair<GroupKind, int>, std::unique_ptr<Communicator>> groups_;
};

}  // namespace echelon
