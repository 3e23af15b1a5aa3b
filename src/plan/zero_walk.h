// What of parameters and gradients comes and goes under ZeRO while a rank runs its program: the twin of
// ParameterStore, DataParallel and ParameterGather.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <vector>

#include "plan/account.h"
#include "schedule/pipeline_layout.h"
#include "spec/gather_window.h"
#include "spec/shard_layout.h"

namespace echelon {

class ZeroWalk {
 public:
  // All outlive this.
  ZeroWalk(const Plan& plan, const PipelineLayout& pipeline, const Coordinates& at, Account& account);

  // `uses`: of the step's program, see group_uses().
  void begin_step(std::vector<int> uses);
  void use(int group);
  void done();
  void need_gradients(int group);
  // `group` has the output layer's matrix.
  void need_output_gradient(int group);
  // A layer group of a stage has got a microbatch's part of its gradients.
  void group_done(int stage, int group);
  // The pipeline is empty: what is left is summed.
  void end_step();

 private:
  std::size_t num_groups() const { return num_groups_of(units_.size()); }
  std::array<std::size_t, 2> units_of(int group) const { return units_of_group(units_.size(), group); }
  void allocate_values(const std::vector<int>& groups);
  std::int64_t own_bytes(std::size_t unit) const { return units_[unit].shard(shard_).size() * width_; }
  std::int64_t bytes(std::size_t unit) const { return units_[unit].range.size() * width_; }
  void begin_unit(std::size_t unit);
  void finish_group(int group);
  void send(std::size_t unit);

  Account& account_;
  int zero_, prefetch_;
  Shards shard_;
  std::int64_t width_;  // bytes of an element
  std::vector<ShardUnit> units_;
  std::set<int> late_;
  std::map<int, int> passes_;    // microbatches of each stage
  std::int64_t tied_bytes_ = 0;  // of the output layer's part of a tied gradient, where it is kept apart

  // The state of the step under way.
  std::vector<int> done_;       // microbatches, by group
  std::vector<bool> begun_;     // by unit
  std::vector<bool> finished_;  // by group
  bool tied_begun_ = false;
  GatherWindow window_;
  std::size_t left_ = 0;  // groups whose units are not sent: they go from the last to the first
  std::optional<std::size_t> scattering_;
};

}  // namespace echelon
