#include "plan/interval.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/units.h"

namespace echelon {
namespace {

// A value within this factor of the measured range counts as measured.
constexpr double near = 2;

bool is_inside(const std::optional<std::vector<std::int64_t>>& range, std::int64_t value) {
  return !range || (static_cast<double>(value) * near >= static_cast<double>(range->front()) &&
                    static_cast<double>(value) <= near * static_cast<double>(range->back()));
}

Interval at_least(Interval wide, double high) {
  wide.low = std::min(wide.low, 1 / high);
  wide.high = std::max(wide.high, high);
  return wide;
}

// If the machine's file says what it reaches of its peaks.
Interval interval_on_known_machine(const Workload& work, const Plan& plan, std::int64_t parameters) {
  const Software& s = work.software;
  const bool scans = plan.model.num_state_space_layers() > 0, experts = plan.model.num_expert_layers() > 0;
  if (s.high == 0) {
    const double high = scans ? unknown_scan_high : experts ? unknown_expert_high : unknown_high;
    return {Distance::unknown, 1 / high, high, "no run of it was measured"};
  }
  const bool nodes = plan.mesh.num_ranks() > work.machine.node();
  const std::string on = fmt::format("{} {}", work.machine.name, precision_name(work.precision));
  const auto far = [&](const std::string& why) {
    return Interval{Distance::far, s.far_low, s.far_high, "wider: none was measured " + why};
  };
  if (s.far_high > 0) {
    if (plan.offload != Offload::none) return far("with state on the host");
    if (plan.mesh.ep > 1 && work.expert_load.is_placed) return far("with experts placed by their load");
    if (!work.documents.empty()) return far("of packed documents");
    // Mixtures of experts with Mamba-2 layers were measured for programs that were fitted on mixtures.
    const bool is_delta = plan.model.state_space.is_delta();
    if (scans && (is_delta || !(experts && s.experts_high > 0)))
      return at_least(far(is_delta ? "of layers of the gated delta rule" : "of layers with a state space"),
                      unknown_scan_high);
    if (plan.model.num_short_conv_layers() > 0) return far("of layers with a short convolution");
    if (s.measured_on && std::find(s.measured_on->begin(), s.measured_on->end(), on) == s.measured_on->end())
      return far(fmt::format("on {} in {}", work.machine.name, precision_name(work.precision)));
    if (!is_inside(s.measured_gpus, plan.mesh.num_ranks()))
      return far(fmt::format("on about {}", counted(plan.mesh.num_ranks(), "GPU")));
    if (!is_inside(s.measured_parameters, parameters))
      return far(fmt::format("of about {:.2g} billion parameters", static_cast<double>(parameters) / 1e9));
    if (!is_inside(s.measured_seq_len, plan.seq_len))
      return far(fmt::format("with sequences of about {}", counted(plan.seq_len, "token")));
    if (experts && s.experts_high == 0) return at_least(far("of mixtures of experts"), unknown_expert_high);
    if (!experts && nodes && s.nodes_high == 0) return far("on several nodes");
  }
  if (experts && s.experts_high > 0)
    return {Distance::measured, s.experts_low, s.experts_high, "of mixtures of experts"};
  if (nodes && s.nodes_high > 0)
    return {Distance::measured, s.nodes_low, s.nodes_high, "of dense models on several nodes"};
  return {Distance::measured, s.low, s.high, "of dense models on one node"};
}

}  // namespace

Interval interval_of(const Workload& work, const Plan& plan, std::int64_t parameters) {
  const Interval known = interval_on_known_machine(work, plan, parameters);
  if (work.machine.omitted.empty() || known.distance == Distance::unknown) return known;
  // Another machine's numbers are no nearer than another program's.
  Interval wide = at_least(known, unknown_high);
  wide.distance = Distance::far;
  wide.why = fmt::format("wider: the file of {} leaves out what it reaches", work.machine.name);
  return wide;
}

}  // namespace echelon
