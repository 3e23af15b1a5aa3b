// Where groups of ranks lie on a machine's nodes, and on larger units that join several nodes. Ranks are in
// order, as the launch files start them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>

#include "spec/mesh.h"

namespace echelon {

// Groups of `size` ranks that are `stride` ranks apart: every block of size x stride consecutive ranks of a
// job has `stride` interleaved groups.
struct RankGroups {
  std::int64_t size = 1, stride = 1;
  std::int64_t job = 0;  // its ranks; with fewer than two blocks: one block, from the job's first rank
  // Unless 0: only so many neighbours, the first of which begins at rank `first`.
  std::int64_t count = 0, first = 0;
  std::int64_t num_neighbours() const { return count > 0 ? count : stride; }
  // Groups that communicate at the same time through the links of one unit; 0: the neighbours.
  std::int64_t at_once = 0;
  std::int64_t num_at_once() const { return at_once > 0 ? at_once : num_neighbours(); }
};

// The ranks that share a layer's experts: neighbours along tp (unless experts are cut over it), cp and dp.
RankGroups expert_groups(const Mesh& mesh);

// How the worst placed group lies: the worst of each number over all groups that are on several units; or the
// whole group if each is in one unit.
struct WorstPlaced {
  std::int64_t fewest = 1;  // members on one unit, among units with any
  std::int64_t most = 1;
  std::int64_t across = 1;  // units
  bool is_broken = false;   // two blocks share a unit that does not hold both, so more groups leave it
};

// For units of `unit` ranks: nodes, or leaves of a network. All groups lie alike if size x stride is a
// multiple or a divisor of `unit`, and so is the stride; otherwise one group may be placed worse than
// another, and all wait for it.
WorstPlaced worst_placed(const RankGroups& groups, std::int64_t unit);

// Keeps what was found: where groups lie differently, each has to be looked at, up to some 100,000 of a large
// job, and a search asks for the same few again and again. For one thread at a time.
class Placements {
 public:
  WorstPlaced worst(const RankGroups& groups, std::int64_t unit);
  std::size_t num_found() const { return found_.size(); }

 private:
  std::map<std::array<std::int64_t, 6>, WorstPlaced> found_;
};

}  // namespace echelon
