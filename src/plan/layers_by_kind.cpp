#include "plan/layers_by_kind.h"

#include "base/error.h"

namespace echelon {

LayerParts layer_parts(const ModelSpec& m, std::int64_t layer) {
  return {m.has_attention(layer), m.has_state_space(layer), m.has_short_conv(layer), m.has_mlp(layer),
          m.has_experts(layer)};
}

LayersByKind::LayersByKind(const ModelSpec& m) : kinds_(layer_kinds(m)) {
  check(kinds_.size() <= most_layer_kinds, "a model has a few kinds of layers");
  before_.resize(1);
  for (std::int64_t layer = 0; layer < m.num_layers; ++layer) {
    std::size_t kind = 0;
    while (kind < kinds_.size() && !(layer_parts(m, kinds_[kind].layer) == layer_parts(m, layer))) ++kind;
    check(kind < kinds_.size(), "each layer is of a kind");
    of_layer_.push_back(kind);
    before_.push_back(before_.back());
    before_.back()[kind] += 1;
  }
}

bool LayersByKind::are_mixed() const {
  std::size_t changes = 0;
  for (std::size_t i = 1; i < of_layer_.size(); ++i) changes += of_layer_[i] != of_layer_[i - 1];
  return changes + 1 > kinds_.size();
}

PerKind LayersByKind::among(std::int64_t begin, std::int64_t end) const {
  PerKind count = before_[static_cast<std::size_t>(end)];
  for (std::size_t k = 0; k < most_layer_kinds; ++k) count[k] -= before_[static_cast<std::size_t>(begin)][k];
  return count;
}

}  // namespace echelon
