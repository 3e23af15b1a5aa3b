// The routing of a mixture of experts, simulated.
#include <memory>

#include "apps/simulate_experts_report.h"
#include "base/json_text.h"
#include "bindings/bindings.h"
#include "bindings/words.h"

namespace echelon::python {
namespace {

struct RoutingAnswer {
  ExpertsFlags::Request request;
  std::vector<RoutingReport> reports;

  std::vector<HeatMap> maps(bool devices) const {
    ExpertsFlags::Request shown = request;
    shown.shows_devices = devices;
    return heat_maps(shown, reports);
  }
};

RoutingAnswer simulated(const Words& words) {
  CLI::App app{"", "simulate_experts"};
  SimulateFlags shared;
  ExpertsFlags flags;
  shared.add_to(app);
  flags.add_to(app);
  read_words(app, words, not_of_simulate_experts());
  shared.json = true;  // nothing is drawn
  shared.is_steps_given = words.contains("steps");
  RoutingAnswer answer{flags.read(shared), {}};
  run_apart([&](const Progress& progress) {
    answer.reports = simulate_routing(answer.request.routing, answer.request.methods, progress);
  });
  return answer;
}

}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<RoutingReport>(m, "Routing", "One way of balancing, over the last tenth of the steps.")
      .def_ro("method", &RoutingReport::method)
      .def_ro("chosen", &RoutingReport::chosen, "By step and expert: tokens that choose it.")
      .def_ro("kept", &RoutingReport::kept, "Those of them that are not dropped.")
      .def_ro("expert_tokens", &RoutingReport::expert_tokens)
      .def_ro("device_tokens", &RoutingReport::device_tokens)
      .def_ro("busiest_expert", &RoutingReport::busiest_expert, "Its load over the even one.")
      .def_ro("slowest_device", &RoutingReport::slowest_device, "Its load over the even one.")
      .def_ro("dropped", &RoutingReport::dropped, "Of all choices, from 0 to 1.")
      .def_ro("moved", &RoutingReport::moved, "Choices that the token would not have made by itself.")
      .def("__repr__", [](const RoutingReport& r) {
        return fmt::format("<Routing {}: slowest device {:.2f}x, {:.1f}% dropped>", r.method,
                           r.slowest_device, 100 * r.dropped);
      });
  nb::class_<RoutingAnswer>(m, "RoutingAnswer",
                            "How a router of popular experts loads the devices, by way of balancing. Drawn "
                            "where a notebook shows it.")
      .def_ro("methods", &RoutingAnswer::reports)
      .def(
          "to_dict",
          [](const RoutingAnswer& a) { return from_json(json_text(to_json(a.request, a.reports))); },
          "As `echelon simulate --moe --json`.")
      .def("to_csv", [](const RoutingAnswer& a) { return to_csv(a.request, a.reports); })
      .def(
          "to_svg", [](const RoutingAnswer& a, bool devices) { return heat_map_svg(a.maps(devices)); },
          "devices"_a = false, "Loads over the steps, of experts or of devices.")
      .def("_repr_svg_", [](const RoutingAnswer& a) { return heat_map_svg(a.maps(false)); })
      .def("__str__", [](const RoutingAnswer& a) { return describe(a.request, a.reports); })
      .def("__repr__", [](const RoutingAnswer& a) {
        return fmt::format("<RoutingAnswer of {} ways to balance {} experts>", a.reports.size(),
                           a.request.routing.experts);
      });
  m.def("_simulate_experts", &simulated, "words"_a);
}

}  // namespace echelon::python
