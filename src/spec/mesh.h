// The device mesh: named axes and sizes, rank <-> coordinates, groups along an axis. Arithmetic only.
#pragma once

#include <array>
#include <string>
#include <vector>

namespace echelon {

enum class Axis { pp, dp, cp, tp };
inline constexpr std::array<Axis, 4> all_axes{Axis::pp, Axis::dp, Axis::cp, Axis::tp};
const char* axis_name(Axis axis);  // "pp", "dp", "cp", "tp"

// Axes from the outermost (ranks far apart) to the innermost (neighbouring ranks). The order is data: tp is
// innermost so that its groups sit inside a node, pp outermost because it moves the least.
inline constexpr std::array<Axis, 4> default_axis_order{Axis::pp, Axis::dp, Axis::cp, Axis::tp};

struct Mesh {
  std::array<int, 4> sizes{1, 1, 1, 1};  // indexed by Axis
  std::array<Axis, 4> order = default_axis_order;
  int ep = 1;  // expert groups, laid over dp x cp; not an axis of its own

  int size(Axis axis) const { return sizes[static_cast<std::size_t>(axis)]; }
  void set(Axis axis, int size) { sizes[static_cast<std::size_t>(axis)] = size; }
  int num_ranks() const;

  // Position of `rank` along `axis`, 0 <= result < size(axis).
  int coordinate(int rank, Axis axis) const;

  // Ranks that differ from `rank` along `axis` only, in order of their coordinate; contains `rank`.
  std::vector<int> group(int rank, Axis axis) const;

  // "8 ranks = pp 2 x dp 2 x tp 2 (outermost first)"
  std::string describe() const;
  bool operator==(const Mesh&) const = default;
};

// Throws RequestError unless every size is at least 1.
void validate(const Mesh& mesh);

}  // namespace echelon
