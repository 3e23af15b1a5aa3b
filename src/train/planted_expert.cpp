#include "train/planted_expert.h"

#include <algorithm>
#include <numbers>
#include <vector>

#include "tensor/host.h"
#include "tensor/reference_view.h"

namespace echelon {

// With the direction as long as an embedding is on average, the norm before the router divides by
// sqrt(2) init_std: x is 1 / sqrt(2) along each of the C dimensions.
void plant_expert(const ParameterStore& parameters, const ModelSpec& model, const PlantedExpert& planted) {
  const double along = planted.strength * std::numbers::sqrt2 / static_cast<double>(model.hidden);
  for (const Parameter& p : parameters.all()) {
    const Tensor& held = p.value_stays ? p.value : p.own_value;
    if (held.numel() == 0) continue;
    const std::int64_t begin = p.value_stays ? 0 : p.own.begin;
    const auto add = [&](std::int64_t from, std::int64_t to, double what) {
      const Range part{std::max(from - begin, std::int64_t{0}), std::min(to - begin, held.numel())};
      if (part.begin >= part.end) return;
      const Tensor where = held.flat_range(part.begin, part.end);
      with_float_type(where, [&]<class F>(F) {
        std::vector<F> values = copy_to_host(where, F(0));
        for (F& value : values) value += static_cast<F>(what);
        copy_from_host(values, where);
      });
    };
    if (p.spec.name == embedding_parameters(model).front().name)
      add(0, p.value.numel(), model.init_std);
    else if (p.spec.name.ends_with("gate.weight") || p.spec.name.ends_with("router.weight"))
      add(planted.expert * model.hidden, (planted.expert + 1) * model.hidden, along);
  }
}

}  // namespace echelon
