#include "parallel/zero.h"

namespace echelon {

void all_gather_units(Communicator& block, const std::vector<ShardedUnit>& units) {
  std::vector<Pending> under_way;
  for (const ShardedUnit& unit : units)
    if (unit.whole.numel() > 0) under_way.push_back(block.all_gather(unit.own, unit.whole, unit.counts));
  for (Pending& pending : under_way) pending.wait();
}

}  // namespace echelon
