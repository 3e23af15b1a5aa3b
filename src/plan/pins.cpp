#include "plan/pins.h"

namespace echelon {

Pins pins_of(const Plan& plan) {
  Pins pins;
  pins.dp = plan.mesh.size(Axis::dp);
  pins.tp = plan.mesh.size(Axis::tp);
  pins.pp = plan.mesh.size(Axis::pp);
  pins.cp = plan.mesh.size(Axis::cp);
  pins.ep = plan.mesh.ep;
  pins.etp = plan.model.experts == Experts::none ? 1 : plan.mesh.etp > 0 ? plan.mesh.etp : *pins.tp;
  pins.zero = plan.zero;
  pins.hsdp = plan.hsdp;
  pins.sequence_parallel = plan.sequence_parallel;
  pins.context = plan.context_kind;
  pins.schedule = plan.schedule;
  if (plan.chunks > 0) pins.chunks = plan.chunks;
  pins.micro_batch = plan.micro_batch;
  pins.recompute = plan.recompute;
  pins.layers_per_stage = plan.layers_per_stage;
  pins.balance_layers = plan.balance_layers;
  return pins;
}

}  // namespace echelon
