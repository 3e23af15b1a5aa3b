#include "spec/rank_groups.h"

#include <array>

#include "base/error.h"

namespace echelon {
namespace {

// A group is made of ranks that lie a stride apart: neighbours, or as far apart as fills the line of ranks
// that it is cut from, or as those that have the same experts.
enum class Stride { one, widest, experts };

struct GroupForm {
  const char* name;
  Axis axis;  // of traffic
  Axis line;  // ranks that it is cut from: along an axis; ep: dp x cp
  Stride stride = Stride::one;
};

const GroupForm& form_of(GroupKind kind) {
  static constexpr std::array<GroupForm, num_group_kinds> forms{{
      {"pp", Axis::pp, Axis::pp},
      {"dp", Axis::dp, Axis::dp},
      {"cp", Axis::cp, Axis::cp},
      {"tp", Axis::tp, Axis::tp},
      {"ep", Axis::ep, Axis::ep},
      {"tp replicas", Axis::tp, Axis::tp},
      {"dp x cp", Axis::dp, Axis::ep},
      {"dp shards", Axis::dp, Axis::ep},
      {"dp replicas", Axis::dp, Axis::ep, Stride::widest},
      {"same experts", Axis::dp, Axis::ep, Stride::experts},
      {"cp heads", Axis::cp, Axis::cp},
      {"cp ring", Axis::cp, Axis::cp, Stride::widest},
  }};
  return forms[static_cast<std::size_t>(kind)];
}

int stride_in(const Mesh& mesh, const GroupForm& form, int size) {
  const int line = form.line == Axis::ep ? mesh.dp_cp_size() : mesh.size(form.line);
  const int stride = form.stride == Stride::one ? 1 : form.stride == Stride::experts ? mesh.ep : line / size;
  check(size >= 1 && line % (size * stride) == 0, "blocks make up their line of ranks");
  return stride;
}

int index_in_line(const Mesh& mesh, const Coordinates& at, Axis line) {
  switch (line) {
    case Axis::pp:
      return at.pp;
    case Axis::dp:
      return at.dp;
    case Axis::cp:
      return at.cp;
    case Axis::tp:
      return at.tp;
    case Axis::ep:
      return mesh.dp_cp_index(at);
  }
  throw InvariantError("a group is cut from a line of ranks");
}

}  // namespace

const char* group_name(GroupKind kind) { return form_of(kind).name; }

GroupKind group_named(const std::string& name) {
  for (int kind = 0; kind < num_group_kinds; ++kind)
    if (name == group_name(static_cast<GroupKind>(kind))) return static_cast<GroupKind>(kind);
  throw InvariantError("a group of ranks has one of the names that there are");
}

Axis traffic_axis(GroupKind kind) { return form_of(kind).axis; }

int place_in(const Mesh& mesh, const Coordinates& at, GroupKind kind, int size) {
  const GroupForm& form = form_of(kind);
  return index_in_line(mesh, at, form.line) / stride_in(mesh, form, size) % size;
}

std::vector<int> group_ranks(const Mesh& mesh, int rank, GroupKind kind, int size) {
  const GroupForm& form = form_of(kind);
  const std::vector<int> line = form.line == Axis::ep ? mesh.dp_cp_group(rank) : mesh.group(rank, form.line);
  const Coordinates at = mesh.coordinates(rank);
  const int stride = stride_in(mesh, form, size);
  const int first = index_in_line(mesh, at, form.line) - place_in(mesh, at, kind, size) * stride;
  std::vector<int> ranks;
  for (int i = 0; i < size; ++i) ranks.push_back(line[static_cast<std::size_t>(first + i * stride)]);
  return ranks;
}

}  // namespace echelon
