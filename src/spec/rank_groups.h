// Which ranks of a mesh form a group, and where a rank stands in it: read by Rank, which joins the groups,
// and by what reasons about ranks that are not there.
#pragma once

#include <string>
#include <vector>

#include "spec/mesh.h"

namespace echelon {

enum class GroupKind {
  pp,  // ranks that differ along one axis only, of as many as that has
  dp,
  cp,
  tp,
  ep,            // the ranks that routed experts are spread over: neighbours in dp x cp
  tp_replicas,   // neighbours in tp that hold the same key/value head, or group of a state space's heads
  dp_cp,         // the ranks that hold the same parameters, by Mesh::dp_cp_index
  dp_shards,     // neighbours among those, that state is cut over (ZeRO)
  dp_replicas,   // the ranks at the same place in each such block (HSDP)
  same_experts,  // those of a block of neighbours that hold the same experts
  cp_heads,      // neighbours in cp that exchange heads
  cp_ring,       // the ranks at the same place in each such block
};
inline constexpr int num_group_kinds = static_cast<int>(GroupKind::cp_ring) + 1;

const char* group_name(GroupKind kind);          // "dp shards": of errors and traces
GroupKind group_named(const std::string& name);  // InvariantError where there is none of this name
Axis traffic_axis(GroupKind kind);               // that what its ranks send counts on

// The group of `size` ranks that a rank is in, in its order; its place there.
std::vector<int> group_ranks(const Mesh& mesh, int rank, GroupKind kind, int size);
int place_in(const Mesh& mesh, const Coordinates& at, GroupKind kind, int size);

}  // namespace echelon
