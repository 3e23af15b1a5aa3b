#include "train/metrics.h"
#include "base/json_text.h"

#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/median.h"
#include "base/units.h"
#include "train/account_json.h"

namespace echelon {
using nlohmann::ordered_json;

ordered_json as_json(const Memory& memory) {
  ordered_json object{{"total", memory.total()}};
  for (MemoryCategory c : all_memory_categories) object[memory_category_name(c)] = memory[c];
  return object;
}

ordered_json as_json(const HostActivations& host) {
  return {{"out", host.out}, {"back", host.back}, {"most", host.most}};
}

ordered_json as_json(const Traffic& traffic) {
  ordered_json object = ordered_json::object();
  for (Axis axis : traffic_axes) {
    ordered_json verbs = ordered_json::object();
    for (Verb verb : all_verbs)
      if (traffic.at(axis, verb).calls > 0) verbs[verb_name(verb)] = traffic.at(axis, verb).bytes;
    object[axis_name(axis)] = verbs;
  }
  return object;
}

ordered_json assumption_names(const std::vector<Assumption>& assumptions) {
  ordered_json list = ordered_json::array();
  for (Assumption a : assumptions) list.push_back(assumption_name(a));
  return list;
}

static ordered_json json_of(const std::vector<ExpertLoad>& loads) {
  ordered_json list = ordered_json::array();
  for (const ExpertLoad& load : loads)
    list.push_back({{"layer", load.layer},
                    {"imbalance", load.imbalance},
                    {"drop_rate", load.drop_rate},
                    {"balance_loss", load.balance_loss},
                    {"tokens", load.tokens},
                    {"dropped", load.dropped}});
  return list;
}

std::string expert_table(const std::vector<ExpertLoad>& loads) {
  if (loads.empty()) return "";
  std::string text = fmt::format("{:<22}{:>14}{:>14}{:>14}\n", "  experts, last step", "load / average",
                                 "dropped", "balance loss");
  for (const ExpertLoad& load : loads)
    text += fmt::format("  layer {:<14}{:>14.2f}{:>13.1f}%{:>14.4f}\n", load.layer, load.imbalance,
                        100 * load.drop_rate, load.balance_loss);
  return text;
}

std::string expert_note(const std::vector<ExpertLoad>& loads) {
  if (loads.empty()) return "";
  const auto fullest =
      std::max_element(loads.begin(), loads.end(),
                       [](const ExpertLoad& a, const ExpertLoad& b) { return a.imbalance < b.imbalance; });
  double dropped = 0;
  for (const ExpertLoad& load : loads) dropped += load.drop_rate / static_cast<double>(loads.size());
  return fmt::format("experts {:.2f}x{}", fullest->imbalance,
                     dropped > 0 ? fmt::format(", {:.1f}% dropped", 100 * dropped) : "");
}

std::string loss_text(double loss) { return std::isnan(loss) ? "nan" : fmt::format("{:.4f}", loss); }

std::string step_line(const StepRecord& r, std::int64_t last_step, double seconds_left, int columns) {
  const std::string last = fmt::format("{}", last_step);
  struct Field {
    std::string text;
    int rank;  // the largest go first where there is no room
  };
  const std::vector<Field> fields{
      {fmt::format("step {:>{}}/{}", r.step, last.size(), last), 0},
      {"  loss " + loss_text(r.loss), 0},
      {r.mtp_loss > 0 ? fmt::format("  next {:.4f}", r.mtp_loss) : "", 3},
      {std::isfinite(r.grad_norm) ? fmt::format("  grad {:.3f}", r.grad_norm) : "", 4},
      {fmt::format("  lr {:.2e}", r.lr), 5},
      {r.experts.empty() ? "" : "  " + expert_note(r.experts), 3},
      {fmt::format("  {:>6.0f} tokens/s", r.tokens_per_second), 1},
      {fmt::format("  MFU {:.1f}%", 100 * r.mfu), 6},
      {r.step < last_step ? "  ETA " + format_whole_seconds(std::max(1.0, seconds_left)) : "", 2}};
  for (int most = 6;; --most) {
    std::string line;
    for (const Field& field : fields)
      if (field.rank <= most) line += field.text;
    if (most == 0 || line.size() <= static_cast<std::size_t>(std::max(0, columns))) return line;
  }
}

std::string to_json(const StepRecord& r) {
  ordered_json object{{"step", r.step},
                      {"loss", r.loss},
                      {"grad_norm", r.grad_norm},
                      {"lr", r.lr},
                      {"tokens", r.tokens},
                      {"tokens_per_second", r.tokens_per_second},
                      {"mfu", r.mfu},
                      {"step_seconds", r.step_seconds}};
  if (r.mtp_loss > 0) object["mtp_loss"] = r.mtp_loss;
  if (!r.experts.empty()) object["experts"] = json_of(r.experts);
  if (!r.skipped.empty()) object["skipped"] = r.skipped;
  return json_text(object);
}

int WorkSpread::slowest() const {
  return static_cast<int>(std::max_element(seconds.begin(), seconds.end()) - seconds.begin());
}

double WorkSpread::slowdown() const {
  std::vector<double> others = seconds;
  others.erase(others.begin() + slowest());
  const double usual = median(others);
  return usual > 0 ? seconds[static_cast<std::size_t>(slowest())] / usual : 1;
}

std::string to_json(const WorkSpread& spread) {
  return json_text(ordered_json{{"first_step", spread.first_step},
                                {"last_step", spread.last_step},
                                {"rank_seconds", spread.seconds},
                                {"slowest_rank", spread.slowest()}});
}

std::string to_json(const Corruption& c) {
  return json_text(ordered_json{
      {"step", c.found_after},
      {"corruption", {{"step", c.step}, {"ranks", c.ranks}, {"what", c.what}, {"repaired", c.repaired}}}});
}

std::string evaluation_json(std::int64_t step, double validation_loss) {
  return json_text(ordered_json{{"step", step}, {"validation_loss", validation_loss}});
}

std::string fingerprint_json(std::int64_t step, const std::string& fingerprint) {
  return json_text(ordered_json{{"step", step}, {"fingerprint", fingerprint}});
}

std::string to_json(const TrainSummary& s) {
  if (s.complete)
    return json_text(ordered_json{{"complete", true},
                                  {"steps", 0},
                                  {"last_step", s.last_step},
                                  {"params", s.num_params},
                                  {"trained_params", s.trained_params},
                                  {"checkpoint", s.checkpoint}});
  ordered_json memory{{"predicted", as_json(s.predicted_memory)}, {"measured", as_json(s.measured_memory)}},
      traffic{{"predicted", as_json(s.predicted_traffic)}, {"measured", as_json(s.measured_traffic)}};
  if (!s.memory_assumptions.empty()) memory["assumes"] = assumption_names(s.memory_assumptions);
  if (!s.traffic_assumptions.empty()) {
    traffic["assumes"] = assumption_names(s.traffic_assumptions);
    traffic["by_data"] = as_json(s.traffic_by_data);
  }
  ordered_json object{
      {"steps", s.steps},
      {"last_step", s.last_step},
      {"final_loss", s.final_loss},
      {"tokens_per_second", s.tokens_per_second},
      {"mfu", s.mfu},
      {"peak_flops", s.peak_flops},
      {"ranks", s.ranks},
      {"cores", s.cores.cores},
      {"ranks_share_cores", s.cores.are_shared(s.ranks)},
      {"params", s.num_params},
      {"trained_params", s.trained_params},
      {"memory_bytes", memory},
      {"traffic_bytes", traffic},
      {"step_seconds", {{"predicted", s.predicted_step_seconds}, {"measured", s.step_seconds}}},
      {"bubble_fraction", {{"predicted", s.predicted_bubble}, {"measured", s.measured_bubble}}},
      {"pipeline_seconds",
       {{"simulated_from_trace", s.simulated_timeline.makespan()},
        {"measured", s.measured_timeline.makespan()}}}};
  if (!s.measured_staleness.empty())
    object["staleness"] = {{"predicted", s.predicted_staleness}, {"measured", s.measured_staleness}};
  if (const auto& a = s.asynchronous) {
    object["staleness"] = {{"bound", a->bound ? ordered_json(*a->bound) : ordered_json("inf")},
                           {"histogram", a->histogram},
                           {"updates_late", {{"mean", a->mean_updates_late}, {"max", a->max_updates_late}}}};
    object["updates"] = a->updates;
    object["server_memory_bytes"] = {{"predicted", as_json(a->predicted_memory)},
                                     {"measured", as_json(a->measured_memory)}};
  }
  if (s.measured_messages != Traffic{}) object["collective_messages"] = as_json(s.measured_messages);
  if (s.predicted_host != HostActivations{})
    object["offloaded_activation_bytes"] = {{"predicted", as_json(s.predicted_host)},
                                            {"measured", as_json(s.measured_host)}};
  object["taken_back"] = s.taken_back;
  object["missed_predictions"] = missed_predictions(s);
  if (s.gathers)
    object["parameter_gathers"] = {{"gathers", s.gathers->gathers},
                                   {"ahead", s.gathers->ahead},
                                   {"beside_seconds", s.gathers->beside_seconds},
                                   {"wait_seconds", s.gathers->wait_seconds}};
  if (!s.experts.empty()) object["experts"] = json_of(s.experts);
  if (s.validation_loss) object["validation_loss"] = *s.validation_loss;
  if (!s.checkpoint.empty()) {
    object["checkpoint"] = s.checkpoint;
    object["checkpoint_seconds"] = s.checkpoint_seconds;
  }
  if (!s.fingerprint.empty()) object["fingerprint"] = s.fingerprint;
  if (s.stopped) object["stopped"] = true;
  if (s.checked_steps > 0)
    object["checks"] = {{"steps", s.checked_steps},
                        {"seconds", s.check_seconds},
                        {"traffic_bytes", as_json(s.checked_traffic)},
                        {"corruptions", s.corruptions}};
  if (s.graphs) object["cuda_graphs"] = {{"captured", s.graphs->captured}, {"replayed", s.graphs->replayed}};
  if (s.skipped > 0) object["skipped_steps"] = s.skipped;
  return json_text(object);
}

std::string memory_table(const std::string& title, const char* first, const Memory& a, const char* second,
                         const Memory& b) {
  std::string table = fmt::format("  {:<18}{:>14}{:>14}\n", title, first, second);
  for (MemoryCategory c : all_memory_categories)
    if (a[c] != 0 || b[c] != 0) table += bytes_row(memory_category_name(c), a[c], b[c]);
  return table + bytes_row("total", a.total(), b.total());
}

std::string bytes_row(const std::string& name, std::int64_t first, std::int64_t second) {
  return fmt::format("  {:<18}{:>14}{:>14}\n", name, format_bytes(static_cast<double>(first)),
                     format_bytes(static_cast<double>(second)));
}

std::string offload_table(const char* first, const HostActivations& a, const char* second,
                          const HostActivations& b) {
  if (a == HostActivations{} && b == HostActivations{}) return {};
  return fmt::format("  {:<18}{:>14}{:>14}\n", "offloaded", first, second) +
         bytes_row("out in a step", a.out, b.out) + bytes_row("back", a.back, b.back) +
         bytes_row("most at once", a.most, b.most);
}

std::vector<std::string> missed_predictions(const TrainSummary& s) {
  constexpr double bar = 0.1;
  std::vector<std::string> missed;
  const auto compare = [&](const char* what, double predicted, double measured) {
    if (measured <= 0 || std::abs(predicted / measured - 1) <= bar) return;
    missed.push_back(fmt::format("{}: the prediction is {:.0f}% {} what was measured", what,
                                 100 * std::abs(predicted / measured - 1),
                                 predicted > measured ? "above" : "below"));
  };
  const auto bytes = [](const Traffic& traffic) {
    std::int64_t sum = 0;
    for (Axis axis : traffic_axes) sum += traffic.bytes(axis);
    return static_cast<double>(sum);
  };
  compare("memory", static_cast<double>(s.predicted_memory.total()),
          static_cast<double>(s.measured_memory.total()));
  compare("offloaded activations", static_cast<double>(s.predicted_host.out),
          static_cast<double>(s.measured_host.out));
  compare("traffic", bytes(s.predicted_traffic), bytes(s.measured_traffic));
  compare("step time", s.predicted_step_seconds, s.step_seconds);
  if (std::abs(s.predicted_bubble - s.measured_bubble) > bar)
    missed.push_back(fmt::format("bubble: {:.1f}% of the step predicted, {:.1f}% measured",
                                 100 * s.predicted_bubble, 100 * s.measured_bubble));
  return missed;
}

std::string staleness_table(const AsynchronousSummary& s) {
  constexpr std::size_t most_rows = 16, width = 40;
  const std::size_t bins = s.histogram.size(),
                    in_row = std::max<std::size_t>(1, (bins + most_rows - 1) / most_rows);
  std::vector<std::int64_t> rows((bins + in_row - 1) / in_row);
  for (std::size_t n = 0; n < bins; ++n) rows[n / in_row] += s.histogram[n];
  const std::int64_t most = rows.empty() ? 1 : *std::max_element(rows.begin(), rows.end());
  std::string table =
      fmt::format("  staleness, bound {}: batches ahead of the slowest worker, and how many gradients\n",
                  s.bound ? fmt::format("{}", *s.bound) : "inf");
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const std::size_t first = row * in_row, last = std::min(bins, first + in_row) - 1;
    const auto bar =
        static_cast<std::size_t>((static_cast<std::int64_t>(width) * rows[row] + most - 1) / most);
    table += fmt::format("  {:>9} {:>8}  {}\n",
                         first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last),
                         rows[row], std::string(bar, '#'));
  }
  return table +
         fmt::format("  {} optimizer steps; a gradient was late by {:.2f} of them on average, {} at most\n",
                     s.updates, s.mean_updates_late, s.max_updates_late);
}

std::string traffic_table(const TrainSummary& s) {
  const bool by_data = !s.traffic_assumptions.empty();
  const auto column = [&](const std::string& text) { return by_data ? fmt::format("{:>14}", text) : ""; };
  std::string table;
  for (Axis axis : traffic_axes)
    for (Verb verb : all_verbs) {
      const VerbTraffic &a = s.predicted_traffic.at(axis, verb), &b = s.measured_traffic.at(axis, verb);
      if (a.calls == 0 && b.calls == 0) continue;
      const auto bytes = [](const VerbTraffic& cell) {
        return format_bytes(static_cast<double>(cell.bytes));
      };
      table += fmt::format("  {:<18}{:>14}{}{:>14}{:>8} {}\n",
                           fmt::format("{} {}", axis_name(axis), verb_name(verb)), bytes(a),
                           column(bytes(s.traffic_by_data.at(axis, verb))), bytes(b), b.calls,
                           b.calls == 1 ? "call" : "calls");
    }
  if (table.empty()) return table;
  return fmt::format("  {:<18}{:>14}{}{:>14}\n", "sent in a step", "predicted", column("by its data"),
                     "measured") +
         table + assumption_note(s.traffic_assumptions);
}

std::string assumption_note(const std::vector<Assumption>& assumptions) {
  std::vector<std::string> parts;
  for (Assumption a : assumptions)
    parts.push_back(a == Assumption::even_expert_load ? "an even load of the experts" : "no step taken back");
  return parts.empty() ? "" : fmt::format("  predicted assuming {}\n", fmt::join(parts, " and "));
}

}  // namespace echelon
