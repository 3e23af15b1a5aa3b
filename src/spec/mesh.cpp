#include "spec/mesh.h"

#include "base/error.h"

namespace echelon {

const char* axis_name(Axis axis) {
  switch (axis) {
    case Axis::pp:
      return "pp";
    case Axis::dp:
      return "dp";
    case Axis::cp:
      return "cp";
    case Axis::tp:
      return "tp";
    case Axis::ep:
      return "ep";
  }
  return "?";
}

int Mesh::num_ranks() const { return sizes[0] * sizes[1] * sizes[2] * sizes[3]; }

// Ranks between neighbours along `axis`: the product of the sizes of all axes inside it.
static int stride_of(const Mesh& mesh, Axis axis) {
  int stride = 1;
  for (std::size_t i = mesh.order.size(); i-- > 0;) {
    if (mesh.order[i] == axis) return stride;
    stride *= mesh.size(mesh.order[i]);
  }
  throw InvariantError("mesh order does not name every axis");
}

int Mesh::coordinate(int rank, Axis axis) const { return rank / stride_of(*this, axis) % size(axis); }

std::vector<int> Mesh::group(int rank, Axis axis) const {
  const int stride = stride_of(*this, axis), first = rank - coordinate(rank, axis) * stride;
  std::vector<int> ranks;
  for (int i = 0; i < size(axis); ++i) ranks.push_back(first + i * stride);
  return ranks;
}

Coordinates Mesh::coordinates(int rank) const {
  return {coordinate(rank, Axis::pp), coordinate(rank, Axis::dp), coordinate(rank, Axis::cp),
          coordinate(rank, Axis::tp)};
}

int Mesh::rank_at(const Coordinates& at) const {
  return at.pp * stride_of(*this, Axis::pp) + at.dp * stride_of(*this, Axis::dp) +
         at.cp * stride_of(*this, Axis::cp) + at.tp * stride_of(*this, Axis::tp);
}

std::vector<int> Mesh::dp_cp_group(int rank) const {
  std::vector<int> ranks;
  for (int dp : group(rank, Axis::dp))
    for (int member : group(dp, Axis::cp)) ranks.push_back(member);
  return ranks;
}

std::string Mesh::describe() const {
  std::string axes;
  for (Axis axis : order)
    if (size(axis) > 1)
      axes += fmt::format("{}{} {}", axes.empty() ? "" : " x ", axis_name(axis), size(axis));
  const int ranks = num_ranks();
  return axes.empty() ? "1 rank"
                      : fmt::format("{} ranks = {} (outermost first){}", ranks, axes,
                                    ep > 1 ? fmt::format(", ep {} over dp x cp", ep) : "");
}

void validate(const Mesh& mesh) {
  for (Axis axis : all_axes)
    if (mesh.size(axis) < 1) refuse("--{} {}: an axis has at least 1 rank", axis_name(axis), mesh.size(axis));
  std::int64_t ranks = 1;
  for (Axis axis : all_axes)
    if ((ranks *= mesh.size(axis)) > Mesh::most_ranks)
      refuse("--{} {}: the mesh would have {} ranks or more; legal: up to {}", axis_name(axis),
             mesh.size(axis), ranks, Mesh::most_ranks);
  if (mesh.ep < 1) refuse("--ep {}: an axis has at least 1 rank", mesh.ep);
}

}  // namespace echelon
