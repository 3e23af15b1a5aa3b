#include "parallel/zero.h"

#include <utility>

#include "base/error.h"

namespace echelon {

void all_gather_units(const std::vector<ShardedUnit>& units) {
  std::vector<Pending> under_way;
  for (const ShardedUnit& unit : units)
    if (unit.whole.numel() > 0)
      under_way.push_back(unit.group->all_gather(unit.own, unit.whole, unit.counts));
  for (Pending& pending : under_way) pending.wait();
}

ParameterGather::ParameterGather(std::vector<std::vector<ShardedUnit>> groups,
                                 std::vector<ShardedUnit> always, int ahead, Time time)
    : groups_(std::move(groups)), ahead_(ahead), time_(std::move(time)) {
  groups_.push_back(std::move(always));
}

void ParameterGather::begin(std::vector<int> uses) {
  check(under_way_.empty() && window_.finished(), "a run of uses begins when the one before has ended");
  measures_ = {};
  window_ = GatherWindow(std::move(uses), ahead_);
  const int always = static_cast<int>(groups_.size()) - 1;
  gather(always);
  for (int group : window_.begin()) {
    gather(group);
    ++measures_.ahead;
  }
  wait_for(always);
}

void ParameterGather::end() {
  check(under_way_.empty() && window_.finished(), "a run of uses ends when all are over");
  release(static_cast<int>(groups_.size()) - 1);
}

void ParameterGather::use(int group) {
  for (int next : window_.use(group)) {
    gather(next);
    measures_.ahead += next != group;
  }
  wait_for(group);
}

void ParameterGather::done() {
  for (int group : window_.done()) release(group);
}

void ParameterGather::gather(int group) {
  for (const ShardedUnit& u : groups_[static_cast<std::size_t>(group)]) {
    if (u.whole.numel() == 0) continue;
    u.whole.acquire_memory();
    under_way_[group].push_back({u.group->all_gather(u.own, u.whole, u.counts), time_.now()});
    ++measures_.gathers;
  }
}

void ParameterGather::wait_for(int group) {
  const auto found = under_way_.find(group);
  if (found == under_way_.end()) return;
  for (UnderWay& of : found->second) {
    const auto begin = time_.now();
    measures_.beside_seconds += seconds_between(of.begin, begin);
    of.pending.wait();
    measures_.wait_seconds += seconds_between(begin, time_.now());
  }
  under_way_.erase(found);
}

void ParameterGather::release(int group) {
  for (const ShardedUnit& u : groups_[static_cast<std::size_t>(group)])
    if (u.whole.numel() > 0) u.whole.release_memory();
}

}  // namespace echelon
