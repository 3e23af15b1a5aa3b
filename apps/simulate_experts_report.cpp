#include "apps/simulate_experts_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

#include "apps/text_rows.h"
#include "base/units.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

std::string percent(double share) { return fmt::format("{:.1f}%", 100 * share); }

double copy_bytes(const ExpertsFlags::Request& request) {
  return static_cast<double>(request.hidden) * request.element_bytes;
}

std::string describe_request(const ExpertsFlags::Request& request) {
  const RoutingRequest& r = request.routing;
  const double total = std::accumulate(r.popularity.begin(), r.popularity.end(), 0.0);
  const auto [least, most] = std::minmax_element(r.popularity.begin(), r.popularity.end());
  return fmt::format("{}, top {}, {} on each of {}; {} a step, {}; first choices of an expert {} to {}\n",
                     counted(r.experts, "expert"), r.experts_per_token, r.experts / r.ep,
                     counted(r.ep, "device"), counted(r.tokens, "token"), counted(r.steps, "step"),
                     percent(*least / total), percent(*most / total));
}

std::string capacity_table(const RoutingRequest& r, const std::vector<RoutingReport>& reports) {
  if (r.capacities.empty()) return "";
  std::vector<TextRow> rows(1, TextRow{"dropped at capacity"});
  for (double factor : r.capacities) rows[0].push_back(fmt::format("{:.4g}", factor));
  const auto add = [&](const std::string& title, const RoutingReport& report, double CapacityMeasure::*what) {
    TextRow& row = rows.emplace_back(TextRow{title});
    for (const CapacityMeasure& c : report.capacities) row.push_back(percent(c.*what));
  };
  for (const RoutingReport& report : reports) add(report.method, report, &CapacityMeasure::dropped);
  add("  weight lost, likeliest kept", reports[0], &CapacityMeasure::weight_dropped_by_probability);
  add("  weight lost, first kept", reports[0], &CapacityMeasure::weight_dropped_by_position);
  TextRow& slowest = rows.emplace_back(TextRow{"  slowest device"});
  for (const CapacityMeasure& c : reports[0].capacities) slowest.push_back(fmt::format("{:.2f}", c.slowest));
  // The last three rows are for the first method.
  for (std::size_t i = rows.size() - 3; i < rows.size(); ++i) rows[i][0] += " (" + reports[0].method + ")";
  return aligned(rows);
}

std::vector<double> of_devices(const std::vector<double>& experts, int ep) {
  std::vector<double> devices(static_cast<std::size_t>(ep));
  const std::size_t each = experts.size() / devices.size();
  for (std::size_t e = 0; e < experts.size(); ++e) devices[e / each] += experts[e];
  return devices;
}

ordered_json json_of(const CapacityMeasure& c) {
  return {{"factor", c.factor},
          {"dropped", c.dropped},
          {"weight_dropped",
           {{"probability", c.weight_dropped_by_probability}, {"position", c.weight_dropped_by_position}}},
          {"slowest_device", c.slowest}};
}

}  // namespace

ordered_json to_json(const ExpertsFlags::Request& request, const std::vector<RoutingReport>& reports) {
  const RoutingRequest& r = request.routing;
  ordered_json methods = ordered_json::array();
  for (const RoutingReport& report : reports) {
    ordered_json capacities = ordered_json::array(), slowest = ordered_json::array();
    for (const CapacityMeasure& c : report.capacities) capacities.push_back(json_of(c));
    for (const std::vector<double>& load : report.kept)
      slowest.push_back(*std::max_element(load.begin(), load.end()) * static_cast<double>(r.experts) /
                        static_cast<double>(r.tokens * r.experts_per_token));
    methods.push_back({{"method", report.method},
                       {"busiest_expert", report.busiest_expert},
                       {"slowest_device", report.slowest_device},
                       {"expert_tokens", report.expert_tokens},
                       {"device_tokens", report.device_tokens},
                       {"dropped", report.dropped},
                       {"weight_dropped", report.weight_dropped},
                       {"moved", report.moved},
                       {"devices_per_token", report.devices_per_token},
                       {"groups_per_token", report.groups_per_token},
                       {"dispatch_bytes",
                        {{"sent", report.copies_sent * copy_bytes(request)},
                         {"most_received", report.most_copies_received * copy_bytes(request)}}},
                       {"combine_bytes",
                        {{"most_sent", report.most_copies_received * copy_bytes(request)},
                         {"received", report.copies_sent * copy_bytes(request)}}},
                       {"capacities", capacities},
                       {"busiest_expert_by_step", slowest}});
  }
  return {{"experts", r.experts},
          {"top_k", r.experts_per_token},
          {"ep", r.ep},
          {"groups", r.router.groups},
          {"most_groups", r.router.most_groups},
          {"tokens", r.tokens},
          {"steps", r.steps},
          {"seed", r.seed},
          {"popularity", r.popularity},
          {"methods", methods}};
}

std::string describe(const ExpertsFlags::Request& request, const std::vector<RoutingReport>& reports) {
  const bool has_devices = request.routing.ep > 1;
  std::vector<TextRow> rows{{"load / average", "busiest expert"}};
  if (has_devices) rows[0].emplace_back("slowest device");
  for (const char* title : {"dropped", "moved"}) rows[0].emplace_back(title);
  if (has_devices)
    for (const char* title : {"devices a token", "dispatched by a device", "most received"})
      rows[0].emplace_back(title);
  for (const RoutingReport& r : reports) {
    TextRow& row = rows.emplace_back(TextRow{r.method, fmt::format("{:.2f}", r.busiest_expert)});
    if (has_devices) row.push_back(fmt::format("{:.2f}", r.slowest_device));
    row.push_back(percent(r.dropped));
    row.push_back(percent(r.moved));
    if (!has_devices) continue;
    row.push_back(fmt::format("{:.2f}", r.devices_per_token));
    row.push_back(format_bytes(r.copies_sent * copy_bytes(request)));
    row.push_back(format_bytes(r.most_copies_received * copy_bytes(request)));
  }
  const std::string bytes = has_devices
                                ? "bytes of one layer's dispatch; the combine and the backward pass send "
                                  "as many again\n"
                                : "";
  return describe_request(request) + "\n" + aligned(rows) + bytes + "\n" +
         capacity_table(request.routing, reports);
}

std::vector<HeatMap> heat_maps(const ExpertsFlags::Request& request,
                               const std::vector<RoutingReport>& reports) {
  const RoutingRequest& r = request.routing;
  std::vector<HeatMap> maps;
  for (const RoutingReport& report : reports) {
    HeatMap& map = maps.emplace_back();
    map.title = report.method;
    map.note = fmt::format("busiest expert {:.2f}, slowest device {:.2f} (load / average)",
                           report.busiest_expert, report.slowest_device);
    if (report.dropped > 0) map.note += fmt::format("; {} dropped", percent(report.dropped));
    map.row_name = request.shows_devices ? "device" : "expert";
    const auto rows = static_cast<std::size_t>(request.shows_devices ? r.ep : r.experts);
    map.values.resize(rows);
    for (const std::vector<double>& experts : report.kept) {
      const std::vector<double> load = request.shows_devices ? of_devices(experts, r.ep) : experts;
      for (std::size_t i = 0; i < rows; ++i)
        map.values[i].push_back(load[i] * static_cast<double>(rows) /
                                static_cast<double>(r.tokens * r.experts_per_token));
    }
  }
  return maps;
}

std::string to_csv(const ExpertsFlags::Request& request, const std::vector<RoutingReport>& reports) {
  const std::int64_t each = request.routing.experts / request.routing.ep;
  std::string text = "method,step,expert,device,chosen,kept\n";
  for (const RoutingReport& report : reports)
    for (std::size_t step = 0; step < report.kept.size(); ++step)
      for (std::size_t e = 0; e < report.kept[step].size(); ++e)
        text +=
            fmt::format("{},{},{},{},{},{}\n", report.method, step, e, static_cast<std::int64_t>(e) / each,
                        report.chosen[step][e], report.kept[step][e]);
  return text;
}

}  // namespace echelon
