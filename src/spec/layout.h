// Placements of a tensor along one mesh axis, and the conjugate table: which collective changes one placement
// into another in the forward pass, and which one its gradient needs in the backward pass. Data parallelism,
// ZeRO, tensor and sequence parallelism, Ulysses and expert parallelism all read this one table.
#pragma once

#include <string>

namespace echelon {

enum class PlacementKind {
  identical,   // I: same value on every rank, and same gradient
  replicated,  // R: same value on every rank, partial gradient (the true gradient is the sum over ranks)
  partial,     // P: partial value (the true value is the sum over ranks), same gradient
  sharded,     // S(d): cut along dimension d
};

struct Placement {
  PlacementKind kind = PlacementKind::identical;
  int dim = 0;  // of a sharded placement
  bool operator==(const Placement&) const = default;
};

inline constexpr Placement identical{PlacementKind::identical, 0};
inline constexpr Placement replicated{PlacementKind::replicated, 0};
inline constexpr Placement partial{PlacementKind::partial, 0};
constexpr Placement sharded(int dim) { return {PlacementKind::sharded, dim}; }

std::string to_string(const Placement& placement);  // "I", "R", "P", "S(0)"

enum class Collective { none, all_reduce, all_gather, reduce_scatter, all_to_all, slice };

// Placement of the gradient of a value with this placement: I -> I, R -> P, P -> R, S(d) -> S(d).
Placement gradient_of(const Placement& placement);

struct Transition {
  Collective forward = Collective::none;
  Collective backward = Collective::none;
  bool operator==(const Transition&) const = default;
};

// Looks a pair up in the conjugate table. InvariantError if the table does not have it (for example I -> P).
Transition transition(const Placement& from, const Placement& to);

}  // namespace echelon
