#include "parallel/zero.h"

#include <utility>

#include "base/error.h"

namespace echelon {

void all_gather_units(Communicator& block, const std::vector<ShardedUnit>& units) {
  std::vector<Pending> under_way;
  for (const ShardedUnit& unit : units)
    if (unit.whole.numel() > 0) under_way.push_back(block.all_gather(unit.own, unit.whole, unit.counts));
  for (Pending& pending : under_way) pending.wait();
}

ParameterGather::ParameterGather(Communicator& block, std::vector<ShardedUnit> units, int ahead)
    : block_(&block), units_(std::move(units)), ahead_(ahead) {}

void ParameterGather::begin(std::vector<int> uses) {
  check(under_way_.empty() && window_.finished(), "a run of uses begins when the one before has ended");
  measures_ = {};
  window_ = GatherWindow(std::move(uses), ahead_);
  const int always = static_cast<int>(units_.size()) - 1;
  gather(always);
  for (int unit : window_.begin()) {
    gather(unit);
    ++measures_.ahead;
  }
  wait_for(always);
}

void ParameterGather::end() {
  check(under_way_.empty() && window_.finished(), "a run of uses ends when all are over");
  release(static_cast<int>(units_.size()) - 1);
}

void ParameterGather::use(int unit) {
  for (int next : window_.use(unit)) {
    gather(next);
    measures_.ahead += next != unit;
  }
  wait_for(unit);
}

void ParameterGather::done() {
  for (int unit : window_.done()) release(unit);
}

void ParameterGather::gather(int unit) {
  const ShardedUnit& u = units_[static_cast<std::size_t>(unit)];
  if (u.whole.numel() == 0) return;
  u.whole.acquire_memory();
  under_way_[unit] = {block_->all_gather(u.own, u.whole, u.counts), Clock::now()};
  ++measures_.gathers;
}

void ParameterGather::wait_for(int unit) {
  const auto found = under_way_.find(unit);
  if (found == under_way_.end()) return;
  measures_.beside_seconds += seconds_since(found->second.begin);
  const auto begin = Clock::now();
  found->second.pending.wait();
  measures_.wait_seconds += seconds_since(begin);
  under_way_.erase(found);
}

void ParameterGather::release(int unit) {
  const Tensor& whole = units_[static_cast<std::size_t>(unit)].whole;
  if (whole.numel() > 0) whole.release_memory();
}

}  // namespace echelon
