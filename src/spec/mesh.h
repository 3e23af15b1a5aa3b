// The device mesh: named axes and sizes, rank <-> coordinates, groups along an axis. Arithmetic only.
#pragma once

#include <array>
#include <string>
#include <vector>

namespace echelon {

enum class Axis { pp, dp, cp, tp, ep };
// The axes that number the ranks. Expert parallelism (ep) has no axis of its own: its groups lie within dp x
// cp.
inline constexpr std::array<Axis, 4> all_axes{Axis::pp, Axis::dp, Axis::cp, Axis::tp};
// The axes by which sent bytes are counted.
inline constexpr std::array<Axis, 5> traffic_axes{Axis::pp, Axis::dp, Axis::cp, Axis::tp, Axis::ep};
const char* axis_name(Axis axis);  // "pp", "dp", "cp", "tp", "ep"

// Axes from the outermost (ranks far apart) to the innermost (neighbouring ranks). A mesh can reorder them.
// tp is innermost so that its groups sit inside a node; pp is outermost because it moves the least.
inline constexpr std::array<Axis, 4> default_axis_order{Axis::pp, Axis::dp, Axis::cp, Axis::tp};

// Where a rank stands.
struct Coordinates {
  int pp = 0, dp = 0, cp = 0, tp = 0;
};

struct Mesh {
  static constexpr int most_ranks = 1'000'000;

  std::array<int, 4> sizes{1, 1, 1, 1};  // indexed by Axis
  std::array<Axis, 4> order = default_axis_order;
  // The number of ranks that routed experts are spread over: blocks of `ep` neighbours in the dp x cp group.
  int ep = 1;
  // The number of ranks that each routed expert is cut over; 0: all tp ranks, like MLPs, which is what this
  // trainer does.
  int etp = 0;

  int size(Axis axis) const { return axis == Axis::ep ? ep : sizes[static_cast<std::size_t>(axis)]; }
  void set(Axis axis, int size) { (axis == Axis::ep ? ep : sizes[static_cast<std::size_t>(axis)]) = size; }
  int pp() const { return size(Axis::pp); }
  int dp() const { return size(Axis::dp); }
  int cp() const { return size(Axis::cp); }
  int tp() const { return size(Axis::tp); }
  int expert_cut() const { return etp == 0 ? tp() : etp; }
  int expert_ranks() const {
    return ep * expert_cut();
  }  // ranks that together hold every expert of a layer once
  int num_ranks() const;

  // Position of `rank` along `axis`, 0 <= result < size(axis).
  int coordinate(int rank, Axis axis) const;

  // Ranks that differ from `rank` along `axis` only, in order of their coordinate; contains `rank`.
  std::vector<int> group(int rank, Axis axis) const;

  Coordinates coordinates(int rank) const;
  int rank_at(const Coordinates& at) const;

  // The ranks that hold the same parameters and compute different tokens: the dp and cp axes together.
  // Gradients are summed over them and ZeRO shards state over them. A rank's index there is dp * size(cp) +
  // cp.
  int dp_cp_size() const { return size(Axis::dp) * size(Axis::cp); }
  int dp_cp_index(const Coordinates& at) const { return at.dp * size(Axis::cp) + at.cp; }
  std::vector<int> dp_cp_group(int rank) const;  // in the order of that index
  // A rank's index in its expert group, and how many ranks hold the same experts.
  int ep_index(const Coordinates& at) const { return dp_cp_index(at) % ep; }
  int expert_replicas() const { return dp_cp_size() / ep; }

  // "8 ranks = pp 2 x dp 2 x tp 2 (outermost first)"
  std::string describe() const;
  bool operator==(const Mesh&) const = default;
};

// RequestError unless every size is at least 1.
void validate(const Mesh& mesh);

}  // namespace echelon
