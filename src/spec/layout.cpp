#include "spec/layout.h"

#include "base/error.h"

namespace echelon {

std::string to_string(const Placement& placement) {
  switch (placement.kind) {
    case PlacementKind::identical:
      return "I";
    case PlacementKind::replicated:
      return "R";
    case PlacementKind::partial:
      return "P";
    case PlacementKind::sharded:
      return fmt::format("S({})", placement.dim);
  }
  return "?";
}

Placement gradient_of(const Placement& placement) {
  switch (placement.kind) {
    case PlacementKind::replicated:
      return partial;
    case PlacementKind::partial:
      return replicated;
    default:
      return placement;
  }
}

// What brings a value from one placement to another. Applied to (from, to) it is the forward column; applied
// to (gradient_of(to), gradient_of(from)) it is the backward column: one rule, so the two columns cannot
// disagree.
static Collective change(const Placement& from, const Placement& to) {
  using Kind = PlacementKind;
  if (from == to) return Collective::none;
  const bool whole = to.kind == Kind::identical || to.kind == Kind::replicated;
  switch (from.kind) {
    case Kind::identical:
    case Kind::replicated:
      if (whole) return Collective::none;
      if (to.kind == Kind::sharded) return Collective::slice;
      break;
    case Kind::partial:
      if (whole) return Collective::all_reduce;
      if (to.kind == Kind::sharded) return Collective::reduce_scatter;
      break;
    case Kind::sharded:
      if (whole) return Collective::all_gather;
      if (to.kind == Kind::sharded) return Collective::all_to_all;
      break;
  }
  throw InvariantError(
      fmt::format("no collective changes placement {} into {}", to_string(from), to_string(to)));
}

Transition transition(const Placement& from, const Placement& to) {
  return {change(from, to), change(gradient_of(to), gradient_of(from))};
}

}  // namespace echelon
