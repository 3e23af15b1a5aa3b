// Where groups of ranks lie on the nodes of a machine, and on what joins several of them: ranks are in order,
// as the launch files start them.
#pragma once

#include <cstdint>

#include "spec/mesh.h"

namespace echelon {

// Groups of `size` ranks that are `stride` ranks apart: every block of size x stride ranks of a job is
// `stride` of them, one behind the other.
struct RankGroups {
  std::int64_t size = 1, stride = 1;
  std::int64_t job = 0;  // ranks of it; of fewer than two blocks there is one, whose first rank is the job's
};

// Of ranks that share out a layer's experts: neighbours along tp (where experts are not cut over it), cp and
// dp.
RankGroups expert_groups(const Mesh& mesh);

// How the group lies that is placed worst: the worst of each number among the groups that one unit does not
// hold, or the whole group where each is in one.
struct WorstPlaced {
  std::int64_t fewest = 1;  // members in one unit, of those that have any
  std::int64_t most = 1;
  std::int64_t across = 1;  // units
  bool is_broken = false;   // two blocks share a unit that does not hold both: a unit is left in two ways
};

// Over units of so many ranks: nodes, or leaves of a network. Groups fill units alike where size x stride is
// a multiple or a divisor of `unit`, and so is the stride; elsewhere one group may lie worse than another,
// and all wait for it.
WorstPlaced worst_placed(const RankGroups& groups, std::int64_t unit);

}  // namespace echelon
