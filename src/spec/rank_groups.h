// Which ranks of a mesh form a group, and a rank's index in it. Rank reads this to join its groups;
// predictions read it for ranks that do not exist.
#pragma once

#include <string>
#include <vector>

#include "spec/mesh.h"

namespace echelon {

enum class GroupKind {
  pp,  // pp, dp, cp, tp: the ranks that differ along this axis only
  dp,
  cp,
  tp,
  ep,            // the ranks that routed experts are spread over: neighbours in dp x cp
  tp_replicas,   // neighbours in tp that hold the same key/value head, or the same group of a state space
  dp_cp,         // the ranks that hold the same parameters, by Mesh::dp_cp_index
  dp_shards,     // of those, a block of neighbours that state is sharded over (ZeRO)
  dp_replicas,   // the ranks at the same index of each such block (HSDP)
  same_experts,  // the ranks of a block that hold the same experts
  cp_heads,      // neighbours in cp that exchange heads
  cp_ring,       // the ranks at the same index of each such block
};
inline constexpr int num_group_kinds = static_cast<int>(GroupKind::cp_ring) + 1;

const char* group_name(GroupKind kind);          // "dp shards": for errors and traces
GroupKind group_named(const std::string& name);  // InvariantError if there is none
Axis traffic_axis(GroupKind kind);               // the axis on which the group's traffic is counted

// The ranks of the group of `size` that a rank is in, in the group's order; the rank's index in it.
std::vector<int> group_ranks(const Mesh& mesh, int rank, GroupKind kind, int size);
int place_in(const Mesh& mesh, const Coordinates& at, GroupKind kind, int size);

}  // namespace echelon
