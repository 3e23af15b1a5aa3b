#include "plan/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "base/units.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

struct NamedPart {
  const char* name;
  const char* words;
  double StepParts::*member;
};
constexpr NamedPart named_parts[] = {
    {"compute", "computation", &StepParts::compute},
    {"tp_exposed", "tensor-parallel collectives", &StepParts::tp_exposed},
    {"pp_bubble", "pipeline bubble and hand-overs", &StepParts::pp_bubble},
    {"dp_exposed", "gradient reduction and gathers not hidden", &StepParts::dp_exposed},
    {"cp_exposed", "context-parallel exchange not hidden", &StepParts::cp_exposed},
    {"ep_exposed", "experts' all-to-all not hidden", &StepParts::ep_exposed},
    {"optimizer", "optimizer step", &StepParts::optimizer},
    {"other", "stragglers and the step's own overhead", &StepParts::other},
};

ordered_json memory_json(const Memory& memory) {
  ordered_json object{{"total", memory.total()}};
  for (MemoryCategory c : all_memory_categories) object[memory_category_name(c)] = memory[c];
  return object;
}

ordered_json plan_json(const Estimate& e, const Workload& work) {
  const Configuration& c = e.configuration;
  ordered_json object{{"dp", c.dp},
                      {"tp", c.tp},
                      {"pp", c.pp},
                      {"cp", c.cp},
                      {"ep", c.ep},
                      {"etp", c.etp},
                      {"sp", c.shards_sequence()},
                      {"zero", c.zero},
                      {"hsdp", c.hsdp},
                      {"schedule", c.schedule},
                      {"chunks", c.chunks},
                      {"layers_per_stage", e.layers},
                      {"micro_batch", c.micro_batch},
                      {"microbatches", e.microbatches},
                      {"recompute", recompute_name(c.recompute)},
                      {"dtype", precision_name(work.precision)},
                      {"step_seconds", e.seconds},
                      {"step_seconds_p10", e.low},
                      {"step_seconds_p90", e.high},
                      {"tokens_per_second_per_gpu", e.tokens_per_second_per_gpu},
                      {"model_tflops_per_gpu", e.model_tflops_per_gpu},
                      {"mfu", e.mfu},
                      {"bubble_fraction", e.bubble_fraction},
                      {"memory_bytes", memory_json(e.memory)}};
  if (c.cp > 1) object["cp_kind"] = context_kind_name(c.context);
  ordered_json ranks = ordered_json::array();
  for (const Memory& memory : e.rank_memory) ranks.push_back(memory.total());
  object["rank_memory_bytes"] = ranks;
  object["traffic_bytes_per_gpu"] = {{"dp", e.traffic.dp},
                                     {"tp", e.traffic.tp},
                                     {"pp", e.traffic.pp},
                                     {"cp", e.traffic.cp},
                                     {"ep", e.traffic.ep}};
  for (const NamedPart& part : named_parts) object["time_seconds"][part.name] = e.parts.*part.member;
  return object;
}

std::string seconds(double value) {
  return value >= 1 ? fmt::format("{:.3f} s", value) : fmt::format("{:.2f} ms", 1e3 * value);
}

}  // namespace

std::string plans_json(const SearchResult& result, const Workload& work) {
  ordered_json object{{"feasible", result.feasible},        {"considered", result.considered},
                      {"simulated", result.simulated},      {"rejected", ordered_json::object()},
                      {"examples", ordered_json::object()}, {"search_seconds", result.seconds},
                      {"plans", ordered_json::array()}};
  for (const auto& [reason, rejected] : result.rejected) {
    object["rejected"][reason] = rejected.count;
    if (!rejected.examples.empty()) object["examples"][reason] = rejected.examples;
  }
  if (result.nearest)
    object["nearest"] = {{"plan", describe(result.nearest->configuration)},
                         {"bytes", result.nearest->bytes},
                         {"usable_bytes", result.nearest->usable_bytes}};
  for (const Estimate& e : result.plans) object["plans"].push_back(plan_json(e, work));
  return object.dump();
}

std::string plans_table(const SearchResult& result) {
  std::string text;
  const auto out = std::back_inserter(text);
  if (!result.plans.empty())
    fmt::format_to(out, "{:>3} {:>10} {:>21} {:>6} {:>7} {:>9} {:>9}  plan\n", "", "step", "P10 - P90", "MFU",
                   "bubble", "memory", "tokens/s");
  int place = 0;
  for (const Estimate& e : result.plans)
    fmt::format_to(out, "{:>3} {:>10} {:>10} -{:>9} {:>5.1f}% {:>6.1f}% {:>9} {:>9.0f}  {}\n", ++place,
                   seconds(e.seconds), seconds(e.low), seconds(e.high), 100 * e.mfu, 100 * e.bubble_fraction,
                   format_device_memory(static_cast<double>(e.memory.total())), e.tokens_per_second_per_gpu,
                   describe(e.configuration));
  fmt::format_to(out, "{} configurations considered, {} simulated, in {}", result.considered,
                 result.simulated, seconds(result.seconds));
  const std::pair<const char*, const char*> words[] = {
      {"memory", "do not fit the memory"},
      {"schedule", "have no such schedule"},
      {"shape", "do not divide"},
      {"slower", "cannot come among the first, whatever their schedule"},
      {"same", "are duplicates"}};
  for (const auto& [reason, what] : words)
    if (const auto found = result.rejected.find(reason); found != result.rejected.end())
      fmt::format_to(out, "; {} {}", found->second.count, what);
  return text + "\n";
}

std::string explain_winner(const SearchResult& result, const Workload& work) {
  if (result.plans.empty()) return {};
  const Estimate& e = result.plans.front();
  std::string text = fmt::format("\n{}\n", describe(e.configuration));
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "a step of {} microbatch{} takes {}: on the pipeline rank that ends last\n",
                 e.microbatches, e.microbatches == 1 ? "" : "es", seconds(e.seconds));
  for (const NamedPart& part : named_parts) {
    const double value = e.parts.*part.member;
    if (value != 0)
      fmt::format_to(out, "  {:>12} {:>5.1f}%  {}\n", seconds(value), 100 * value / e.seconds, part.words);
  }
  fmt::format_to(out, "layers of each stage: {}\n", fmt::join(e.layers, " "));
  fmt::format_to(out, "memory of each pipeline rank, of {}:\n",
                 format_device_memory(work.machine.memory_bytes - work.machine.reserved_bytes));
  for (std::size_t r = 0; r < e.rank_memory.size(); ++r) {
    const Memory& m = e.rank_memory[r];
    if (r >= 8 && r + 1 < e.rank_memory.size()) {
      if (r == 8) fmt::format_to(out, "  ...\n");
      continue;
    }
    const auto total = static_cast<double>(m.total());
    fmt::format_to(out, "  {:>3} {:>9} =", r, format_device_memory(total));
    for (MemoryCategory c : all_memory_categories)
      if (m[c] > 0)
        fmt::format_to(out, " {} {:.1f}", memory_category_name(c),
                       static_cast<double>(m[c]) / device_memory_unit(total));
    fmt::format_to(out, "\n");
  }
  if (result.plans.size() > 1)
    fmt::format_to(out, "\nwhy not the next: {}", explain_loser(e, result.plans[1]));
  if (!result.rejected.empty()) fmt::format_to(out, "\nrejected, an example of each kind:\n");
  for (const auto& [reason, rejected] : result.rejected)
    for (const std::string& example : rejected.examples) fmt::format_to(out, "  {}\n", example);
  return text;
}

std::string explain_loser(const Estimate& winner, const Estimate& other) {
  std::string text = fmt::format("{} takes {}, {:.1f}% longer\n", describe(other.configuration),
                                 seconds(other.seconds), 100 * (other.seconds / winner.seconds - 1));
  struct Difference {
    const char* words;
    double value;
  };
  std::vector<Difference> differences;
  for (const NamedPart& part : named_parts)
    differences.push_back({part.words, other.parts.*part.member - winner.parts.*part.member});
  std::sort(differences.begin(), differences.end(),
            [](const Difference& a, const Difference& b) { return std::abs(a.value) > std::abs(b.value); });
  for (const Difference& d : differences)
    if (std::abs(d.value) > 1e-4 * winner.seconds)
      text += fmt::format("  {:>12} {} in {}\n", seconds(std::abs(d.value)), d.value > 0 ? "more" : "less",
                          d.words);
  const double more = static_cast<double>(other.memory.total() - winner.memory.total());
  return text +
         fmt::format("  {} {} memory\n", format_device_memory(std::abs(more)), more > 0 ? "more" : "less");
}

std::string explain_nothing(const SearchResult& result, int gpus) {
  if (!result.nearest) {
    std::string example;
    for (const char* reason : {"shape", "schedule"})
      if (const auto found = result.rejected.find(reason);
          example.empty() && found != result.rejected.end() && !found->second.examples.empty())
        example = ", as " + found->second.examples.front();
    return fmt::format("no configuration of {} GPUs has a legal shape and schedule{}\n", gpus, example);
  }
  const Nearest& n = *result.nearest;
  return fmt::format("no configuration of {} GPUs fits; the nearest needs {} of {}, {} too much: {}\n", gpus,
                     format_device_memory(n.bytes), format_device_memory(n.usable_bytes),
                     format_device_memory(n.bytes - n.usable_bytes), describe(n.configuration));
}

std::string plan_file(const Estimate& e, const Workload& work) {
  const Configuration& c = e.configuration;
  std::string text = fmt::format("# {}: {}, {} {} a step predicted on {}\n", work.model.name, describe(c),
                                 seconds(e.seconds), precision_name(work.precision), work.machine.name);
  return text + to_toml(as_plan(work, c, e.layers));
}

}  // namespace echelon
