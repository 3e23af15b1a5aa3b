// The layers of a model by kind. If kinds alternate, as in hybrids of attention and state spaces, each
// pipeline stage is priced by the layers that it has.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "spec/model_spec.h"

namespace echelon {

// A number for each kind, in the order of layer_kinds().
inline constexpr std::size_t most_layer_kinds = 4;
using PerKind = std::array<double, most_layer_kinds>;

inline double product_sum(const PerKind& a, const PerKind& b) {
  double sum = 0;
  for (std::size_t k = 0; k < most_layer_kinds; ++k) sum += a[k] * b[k];
  return sum;
}
inline double sum_of(const PerKind& a) {
  double sum = 0;
  for (double one : a) sum += one;
  return sum;
}

// The parts of a layer.
struct LayerParts {
  bool attention = false, state_space = false, short_conv = false, mlp = false, experts = false;
  bool operator==(const LayerParts&) const = default;
};
LayerParts layer_parts(const ModelSpec& model, std::int64_t layer);

class LayersByKind {
 public:
  explicit LayersByKind(const ModelSpec& model);

  const std::vector<LayerKind>& kinds() const { return kinds_; }
  std::size_t of(std::int64_t layer) const { return of_layer_[static_cast<std::size_t>(layer)]; }
  std::int64_t num_layers() const { return static_cast<std::int64_t>(of_layer_.size()); }
  // Whether kinds alternate, rather than all layers of one kind following all of another.
  bool are_mixed() const;
  // How many of each kind there are in layers [begin, end).
  PerKind among(std::int64_t begin, std::int64_t end) const;
  PerKind all() const { return among(0, num_layers()); }

 private:
  std::vector<LayerKind> kinds_;
  std::vector<std::size_t> of_layer_;
  std::vector<PerKind> before_;  // counts before each layer, and after the last
};

}  // namespace echelon
