#include "plan/pins.h"

#include <algorithm>

#include "spec/plan_fields.h"

namespace echelon {

void Pins::read(const std::string& name, const std::string& text, const std::string& where) {
  read_text(*find_field(name), plan, text, where);
  names.insert(name);
}

Pins pins_of(const Plan& plan) {
  Pins pins{plan, {}};
  for (const PlanField& field : plan_fields())
    if (field.is_searched()) pins.names.insert(field.name());
  if (plan.chunks == 0) pins.names.erase("chunks");
  if (plan.mesh.etp == 0)
    pins.plan.mesh.etp = plan.model.experts == Experts::none ? 1 : plan.mesh.size(Axis::tp);
  pins.plan.precision = DType::f32;  // a workload has a precision of its own
  return pins;
}

std::int64_t given_ranks(const Pins& pins) {
  std::int64_t ranks = 1;
  for (Axis axis : all_axes)
    if (pins.has(axis_name(axis))) ranks *= pins.plan.mesh.size(axis);
  return ranks;
}

bool gives_mesh(const Pins& pins) {
  return std::all_of(all_axes.begin(), all_axes.end(), [&](Axis axis) { return pins.has(axis_name(axis)); });
}

}  // namespace echelon
