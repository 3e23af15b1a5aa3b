// A pipeline schedule of one's own: GPipe in waves. It is checked, simulated, and run beside one rank.
#include <fmt/core.h>

#include <algorithm>

#include "schedule/schedules.h"
#include "schedule/simulate.h"
#include "schedule/text.h"
#include "schedule/validate.h"
#include "verify/verify.h"

using namespace echelon;

namespace {

// All forwards and all backwards of `wave` microbatches, then those of the next. Peak `wave` activations;
// bubble (P-1)(F+B+W) for each wave.
Schedule waves(int ranks, int microbatches, int wave) {
  Schedule schedule{"waves", ranks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    auto& list = schedule.ranks.emplace_back();
    for (int first = 0; first < microbatches; first += wave) {
      const int end = std::min(microbatches, first + wave);
      for (int m = first; m < end; ++m) list.push_back({Op::F, r, m});
      for (int m = first; m < end; ++m) list.push_back({Op::BW, r, m});
    }
  }
  return schedule;
}

}  // namespace

int main() {
  const Schedule mine = waves(/*ranks=*/2, /*microbatches=*/4, /*wave=*/2);
  validate(mine);  // each pass once, in order, and its messages never wait in a circle
  const Simulation simulation = simulate(mine, {});
  const double peak = *std::max_element(simulation.peak_activations.begin(), simulation.peak_activations.end());
  fmt::print("makespan {}, peak {} activations\n", simulation.timeline.makespan(), peak);
  if (peak != 2 || simulation.timeline.makespan() != 18) return 1;

  VerifyRequest request;
  Plan& plan = request.plan;
  plan.model = load_model("llama-tiny");
  plan.model.num_layers = 2;
  plan.mesh.set(Axis::pp, 2);
  plan.global_batch = 4;
  plan.seq_len = 8;
  plan.precision = DType::f64;
  plan.schedule = mine.name;
  plan.schedule_text = to_text(mine);
  request.steps = 1;
  const VerifyReport report = verify(request);
  fmt::print("one rank and two, to the last bit: {}\n", report.bitwise);
  return report.pass && report.bitwise ? 0 : 1;
}
