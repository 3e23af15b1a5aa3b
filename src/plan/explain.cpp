#include "plan/explain.h"
#include "base/json_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <vector>

#include "base/parse_number.h"
#include "base/units.h"
#include "plan/interval.h"
#include "spec/plan_fields.h"

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
    {"host_exposed", "the way to the host and back not hidden", &StepParts::host_exposed},
    {"optimizer", "optimizer step", &StepParts::optimizer},
    {"other", "stragglers and the step's own overhead", &StepParts::other},
};

ordered_json memory_json(const Memory& memory) {
  ordered_json object{{"total", memory.total()}};
  for (MemoryCategory c : all_memory_categories) object[memory_category_name(c)] = memory[c];
  return object;
}

ordered_json plan_json(const Estimate& e, const Workload& work) {
  Plan plan = e.plan;
  plan.mesh.etp = plan.model.experts == Experts::none ? 1 : plan.mesh.expert_cut();
  plan.sequence_parallel = plan.shards_sequence();
  plan.chunks = std::max(1, plan.chunks);
  ordered_json object;
  for (const PlanField& field : plan_fields()) {
    std::string key = field.name();
    std::replace(key.begin(), key.end(), '-', '_');
    if (field.is_searched()) with_value(field, plan, [&](const auto& value) { object[key] = value; });
  }
  object["layers_per_stage"] = e.layers;
  object.update({{"step_seconds", e.seconds},
                 {"step_seconds_p10", e.low},
                 {"step_seconds_p90", e.high},
                 {"tokens_per_second_per_gpu", e.tokens_per_second_per_gpu},
                 {"model_tflops_per_gpu", e.model_tflops_per_gpu},
                 {"mfu", e.mfu},
                 {"bubble_fraction", e.bubble_fraction},
                 {"memory_bytes", memory_json(e.memory)},
                 {"microbatches", e.microbatches},
                 {"not_run_by_software", not_run(work, e.plan)},
                 {"dtype", precision_name(work.precision)}});
  ordered_json ranks = ordered_json::array();
  for (const Memory& memory : e.rank_memory) ranks.push_back(memory.total());
  if (e.plan.offload != Offload::none)
    object["host"] = {
        {"bytes", e.host_bytes}, {"traffic_bytes", e.host_traffic}, {"seconds", e.host_seconds}};
  if (const ExpertSkew& load = work.expert_load;
      e.plan.mesh.ep > 1 && (load.imbalance > 1 || !load.shares.empty()))
    object["expert_load"] = {{"busiest_over_mean", busiest_rank(load, e.plan.mesh, work.machine)},
                             {"placed_by_load", load.is_placed},
                             {"replicas_per_rank", load.replicas}};
  if (const auto& a = e.documents) {
    ordered_json degrees = ordered_json::array();
    for (const PackedAttention::Degree& degree : a->degrees)
      degrees.push_back({{"ranks", degree.ranks}, {"share_of_tokens", degree.share}, {"keys", degree.keys}});
    object["documents"] = {{"mean_tokens", work.documents.mean()},
                           {"per_sequence", a->documents},
                           {"keys", a->keys},
                           {"busiest_over_mean", a->busiest},
                           {"busiest_in_cp_over_mean", a->in_group},
                           {"largest_microbatch_over_mean", a->largest},
                           {"dynamic_cp", work.dynamic_context},
                           {"degrees", degrees}};
  }
  object["rank_memory_bytes"] = ranks;
  object["traffic_bytes_per_gpu"] = {{"dp", e.traffic.dp},
                                     {"tp", e.traffic.tp},
                                     {"pp", e.traffic.pp},
                                     {"cp", e.traffic.cp},
                                     {"ep", e.traffic.ep}};
  for (const NamedPart& part : named_parts) object["time_seconds"][part.name] = e.parts.*part.member;
  return object;
}

// "73.4 GB = parameters 18.4 gradients 4.6 ...", the total right-aligned in `width`.
std::string memory_line(const Memory& memory, int width = 0) {
  const auto total = static_cast<double>(memory.total());
  std::string text = fmt::format("{:>{}} =", format_device_memory(total), width);
  for (MemoryCategory c : all_memory_categories)
    if (memory[c] > 0)
      text += fmt::format(" {} {:.1f}", memory_category_name(c),
                          static_cast<double>(memory[c]) / device_memory_unit(total));
  return text;
}

// A program's version, if its file states one.
std::string dated(const std::string& as_of) { return as_of.empty() ? "" : fmt::format(" ({})", as_of); }

bool is_interval(const std::string& key) { return key.ends_with("low") || key.ends_with("high"); }

// "  h100, published: peak_bf16 9.894e+14, ..." Numbers that have the default value are left out, unless the
// file says where they come from.
std::string sources_of(const std::string& name, const std::string& text, const Provenance& provenance,
                       const std::string& nothing_said) {
  std::map<std::string, std::vector<std::string>> numbers;
  std::istringstream in(text);
  std::string table;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("[[")) table = line.substr(2, line.size() - 4);
    const auto equals = line.find(" = ");
    if (equals == std::string::npos) continue;
    const std::string key = line.substr(0, equals), value = line.substr(equals + 3);
    if (value.find_first_not_of("0123456789.e+-") != std::string::npos || value == "0") continue;
    const char* source = provenance.of(table.empty() ? key : table);
    if (std::string_view(source) == "assumed" && table.empty() &&
        nothing_said.find(line + "\n") != std::string::npos)
      continue;
    if (is_interval(key)) continue;
    numbers[source].push_back(fmt::format("{}{} {:.6g}", table.empty() ? "" : table + " ", key,
                                          parse_plain_number<double>(key, value)));
  }
  std::string list;
  for (const char* source : {"measured", "published", "fitted", "assumed"})
    if (numbers.contains(source))
      list += fmt::format("  {}, {}: {}\n", name, source, fmt::join(numbers.at(source), ", "));
  return list;
}

// With four digits, so that products of such figures can be checked: "80", "35.28e9"; "2 bytes", "0.4205 GB".
std::string count_text(double count) {
  return count >= 1e5 ? fmt::format("{:.4g}e9", count / 1e9) : fmt::format("{:.4g}", count);
}
std::string size_text(double bytes) {
  const double unit = device_memory_unit(10 * bytes);  // from 10 MB on in GB
  const char* name = unit == 1e9 ? "GB" : unit == 1e6 ? "MB" : unit == 1e3 ? "kB" : "bytes";
  return fmt::format("{:.4g} {}", bytes / unit, name);
}

// "  activations    33.6 GB = 80 layers x microbatches in flight x 0.4205 GB"
std::string memory_count(const Estimate& e) {
  std::string text;
  for (const MemoryTerm& term : e.memory_terms)
    text +=
        fmt::format("  {:<13} {:>8} = {} {} x {}{}\n", memory_category_name(term.category),
                    format_device_memory(term.total()), count_text(term.count), term.what,
                    size_text(term.bytes), term.ranks > 1 ? fmt::format(" / {:.4g} ranks", term.ranks) : "");
  return text;
}

std::string seconds(double value) {
  return value >= 1 ? fmt::format("{:.3f} s", value) : fmt::format("{:.2f} ms", 1e3 * value);
}

// What placing experts differently, or copying them, would gain or cost the plan.
std::string placed_text(const Estimate& e, const Workload& work) {
  std::string text;
  constexpr std::int64_t most_replicas = 2;
  const ModelSpec& m = e.plan.model;
  for (std::int64_t replicas = 0; replicas <= most_replicas; ++replicas) {
    const ExpertSkew& now = work.expert_load;
    if ((now.is_placed && replicas <= now.replicas) ||
        m.num_experts / e.plan.mesh.ep + replicas > m.num_experts)
      continue;
    Workload other = work;
    other.expert_load.is_placed = true;
    other.expert_load.replicas = replicas;
    const Estimate placed = StepModel(other).estimate(e.plan);
    text += fmt::format("  {}: the busiest rank has {:.2f}, a step takes {}, {:+.1f}%, memory {:+.1f} GB\n",
                        replicas == 0 ? "placed by their load"
                                      : fmt::format("with {} further on each rank, {}", replicas,
                                                    replicas == 1 ? "a copy of one that has most"
                                                                  : "copies of those that have most"),
                        busiest_rank(other.expert_load, e.plan.mesh, work.machine), seconds(placed.seconds),
                        100 * (placed.seconds / e.seconds - 1),
                        static_cast<double>(placed.memory.total() - e.memory.total()) / 1e9);
  }
  return text;
}

// Which ranks wait for which because of where documents lie.
std::string packed_text(const Estimate& e, const Workload& work) {
  const PackedAttention& a = *e.documents;
  std::string text;
  const auto out = std::back_inserter(text);
  fmt::format_to(
      out,
      "documents: {:.1f} in a sequence, {:.0f} tokens on average; a token sees {:.0f} keys, of {:.0f} "
      "without the mask\n",
      a.documents, work.documents.mean(), a.keys, e.plan.model.mean_keys(e.plan.seq_len));
  fmt::format_to(out, "  all wait for a rank with {:.2f} of the mean attention", a.busiest);
  if (work.dynamic_context) {
    text += "; of the tokens";
    for (const PackedAttention::Degree& degree : a.degrees)
      fmt::format_to(out, "{} {:.1f}% are on {}", &degree == a.degrees.data() ? "" : ",", 100 * degree.share,
                     counted(degree.ranks, "rank"));
  } else if (e.plan.mesh.cp() > 1) {
    fmt::format_to(out, ", {:.2f} of it among the ranks of cp ({})", a.in_group,
                   e.plan.context_kind == ContextKind::ulysses ? "which cut heads"
                   : work.software.context_cuts_documents      ? "which cut each document"
                                                               : name_of(e.plan.context_balance));
  }
  if (e.plan.mesh.pp() > 1)
    fmt::format_to(out,
                   "; the largest microbatch has {:.2f} of its rank's mean, which the pipeline waits for",
                   a.largest);
  return text + "\n";
}

// Added if a search found nothing with everything on the device.
std::string looked_at_again(Offload offload) {
  return fmt::format(
      "nothing fits with everything on the device: every --offload was tried, and {} is best\n",
      name_of(offload));
}

}  // namespace

ordered_json run_json(const RunCost& run) {
  return {{"steps", run.steps},
          {"training_seconds", run.training_seconds},
          {"goodput", run.goodput},
          {"checkpoint_seconds", run.checkpoint_seconds},
          {"failures", run.failures},
          {"wall_seconds", run.wall_seconds},
          {"gpu_hours", run.gpu_hours},
          {"money", run.money},
          {"joules", run.joules},
          {"wall_seconds_p10", run.low * run.wall_seconds},
          {"wall_seconds_p90", run.high * run.wall_seconds},
          {"money_p10", run.low * run.money},
          {"money_p90", run.high * run.money}};
}

std::string plans_json(const SearchResult& result, const Workload& work, const std::optional<RunCost>& run,
                       const std::vector<NearSize>& near) {
  ordered_json object{{"feasible", result.feasible},        {"considered", result.considered},
                      {"simulated", result.simulated},      {"rejected", ordered_json::object()},
                      {"examples", ordered_json::object()}, {"search_seconds", result.seconds},
                      {"plans", ordered_json::array()}};
  if (!work.machine.omitted.empty()) object["machine_omits"] = work.machine.omitted;
  for (const auto& [reason, rejected] : result.rejected) {
    object["rejected"][reason] = rejected.count;
    if (!rejected.examples.empty()) object["examples"][reason] = rejected.examples;
  }
  if (result.nearest)
    object["nearest"] = {{"plan", summary(result.nearest->plan)},
                         {"bytes", result.nearest->bytes},
                         {"usable_bytes", result.nearest->usable_bytes},
                         {"memory_bytes", memory_json(result.nearest->memory)}};
  for (std::size_t i = 0; i < result.plans.size(); ++i) {
    object["plans"].push_back(plan_json(result.plans[i], work));
    object["plans"].back().update(
        {{"rank", result.places[i].rank}, {"rank_is_shared", result.places[i].is_shared}});
  }
  if (run) object["run"] = run_json(*run);
  for (const NearSize& one : near) {
    object["near"].push_back({{"gpus", one.gpus}, {"global_batch", one.global_batch}});
    object["near"].back().update(plan_json(one.best, work));
  }
  return json_text(object);
}

std::string omitted_of_machine(const Workload& work) {
  if (work.machine.omitted.empty()) return {};
  return fmt::format("the file of {} does not say {}: a preset's are taken, and intervals are wider\n",
                     work.machine.name, fmt::join(work.machine.omitted, ", "));
}

std::string priced_beyond(const SearchResult& result, const Workload& work) {
  std::set<std::string> missing;
  for (const Estimate& e : result.plans)
    for (const std::string& what : not_run(work, e.plan)) missing.insert(what);
  if (missing.empty()) return {};
  return fmt::format("{} does not run {}; priced as if it did\n", work.software.name,
                     fmt::join(missing, ", "));
}

PlansTable plans_table(const SearchResult& result, const Workload& work, int columns) {
  PlansTable table;
  std::vector<std::string> numbers, plans;
  std::size_t width = 0;
  for (std::size_t i = 0; i < result.plans.size(); ++i) {
    const Estimate& e = result.plans[i];
    const Place& place = result.places[i];
    numbers.push_back(fmt::format(
        "{:>3} {:>10} {:>10} -{:>10} {:>5.1f}% {:>6.1f}% {:>9} {:>12.0f}",
        fmt::format("{}{}", place.rank, place.is_shared ? "=" : ""), seconds(e.seconds), seconds(e.low),
        seconds(e.high), 100 * e.mfu, 100 * e.bubble_fraction,
        format_device_memory(static_cast<double>(e.memory.total())), e.tokens_per_second_per_gpu));
    plans.push_back(summary(e.plan));
    width = std::max(width, numbers.back().size() + 2 + plans.back().size());
  }
  const bool is_below = width > static_cast<std::size_t>(columns);
  if (!plans.empty())
    table.head = fmt::format("{:>3} {:>10} {:>22} {:>6} {:>7} {:>9} {:>12}{}\n", "", "step", "P10 - P90",
                             "MFU", "bubble", "memory", "tokens/s/GPU", is_below ? "\n  plan" : "  plan");
  for (std::size_t i = 0; i < plans.size(); ++i)
    (i == 0 ? table.best : table.others) +=
        fmt::format("{}{}{}\n", numbers[i], is_below ? "\n  " : "  ", plans[i]);
  const auto out = std::back_inserter(table.counts);
  fmt::format_to(out, "{} considered, {} simulated, in {}", counted(result.considered, "configuration"),
                 result.simulated, seconds(result.seconds));
  struct Words {
    const char *reason, *one, *several;
  };
  const Words words[] = {{"memory", "does not fit in memory", "do not fit in memory"},
                         {"schedule", "does not suit its schedule", "do not suit their schedule"},
                         {"shape", "does not divide", "do not divide"},
                         {"slower", "is too slow by a lower bound", "are too slow by a lower bound"},
                         {"same", "is a duplicate", "are duplicates"}};
  for (const Words& w : words)
    if (const auto found = result.rejected.find(w.reason);
        found != result.rejected.end() && found->second.count > 0) {
      const std::int64_t count = found->second.count;
      fmt::format_to(out, "; {} {}", count, count == 1 ? w.one : w.several);
    }
  table.counts += "\n";
  if (!result.plans.empty() && result.plans.front().plan.offload != Offload::none &&
      work.plan.offload == Offload::none)
    table.counts += looked_at_again(result.plans.front().plan.offload);
  table.beyond = omitted_of_machine(work) + priced_beyond(result, work);
  return table;
}

std::string explain_winner(const SearchResult& result, const Workload& work) {
  if (result.plans.empty()) return {};
  const Estimate& e = result.plans.front();
  std::string text = fmt::format("\n{}\n", summary(e.plan));
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "a step of {} takes {}{}:\n", counted(e.microbatches, "microbatch"), seconds(e.seconds),
                 e.plan.mesh.pp() > 1 ? "; on the pipeline rank that waits least" : "");
  for (const NamedPart& part : named_parts) {
    const double value = e.parts.*part.member;
    if (value > 1e-9 * e.seconds)  // and not rounding
      fmt::format_to(out, "  {:>12} {:>5.1f}%  {}{}\n", seconds(value), 100 * value / e.seconds, part.words,
                     part.member == &StepParts::pp_bubble && e.plan.mesh.pp() > 1
                         ? fmt::format(" ({:.1f}% in the mean of all ranks)", 100 * e.bubble_fraction)
                         : "");
  }
  const Interval interval = interval_of(work, e.plan, num_parameters(e.plan.model));
  fmt::format_to(out, "80% between {} and {}: {}\n", seconds(e.low), seconds(e.high),
                 interval.distance == Distance::measured
                     ? fmt::format("as far as {} was off {}", work.software.name, interval.why)
                     : fmt::format("{}; {}", work.software.name, interval.why));
  if (const double busiest = busiest_rank(work.expert_load, e.plan.mesh, work.machine); busiest > 1) {
    fmt::format_to(out, "experts: all wait for the rank with {:.2f} of the mean load\n", busiest);
    if (!work.expert_load.shares.empty()) text += placed_text(e, work);
  }
  if (e.documents) text += packed_text(e, work);
  fmt::format_to(out, "layers of each stage: {}\n", fmt::join(e.layers, " "));
  fmt::format_to(out, "memory of each pipeline rank, of {}:\n",
                 format_device_memory(work.machine.memory_bytes - work.machine.reserved_bytes));
  for (std::size_t r = 0; r < e.rank_memory.size(); ++r) {
    const Memory& m = e.rank_memory[r];
    if (r >= 8 && r + 1 < e.rank_memory.size()) {
      if (r == 8) fmt::format_to(out, "  ...\n");
      continue;
    }
    fmt::format_to(out, "  {:>3} {}\n", r, memory_line(m, 9));
  }
  if (!e.memory_terms.empty()) text += fmt::format("counted on rank {}:\n{}", e.memory_rank, memory_count(e));
  if (e.plan.offload != Offload::none)
    fmt::format_to(
        out,
        "kept on the host for each GPU: {}{}; over the link to it go {} a step, and {} of the step are the "
        "host's and the link's\n",
        format_device_memory(e.host_bytes),
        work.machine.host_memory_bytes > 0
            ? fmt::format(" of {}", format_device_memory(work.machine.host_memory_bytes))
            : "",
        format_device_memory(e.host_traffic), seconds(e.host_seconds));
  text += "\nnumbers behind it, by source:\n";
  text += sources_of(work.machine.name, to_toml(work.machine), work.machine.provenance, to_toml(Machine()));
  text +=
      sources_of(work.software.name, to_toml(work.software), work.software.provenance, to_toml(Software()));
  if (result.plans.size() > 1)
    fmt::format_to(out, "\nwhy not the next: {}", explain_loser(e, result.plans[1]));
  std::string examples;
  for (const auto& [reason, rejected] : result.rejected)
    for (const std::string& example : rejected.examples) examples += fmt::format("  {}\n", example);
  if (!examples.empty()) text += "\nrejected, an example of each kind:\n" + examples;
  return text;
}

std::string explain_loser(const Estimate& winner, const Estimate& other) {
  const double longer = other.seconds / winner.seconds - 1;
  const bool is_tie = longer < 0 && winner.seconds / other.seconds - 1 <= tie;
  std::string text = fmt::format(
      "{} takes {}, {:.1f}% {}{}\n", summary(other.plan), seconds(other.seconds), 100 * std::abs(longer),
      longer < 0 ? "less" : "longer",
      is_tie ? fmt::format("; within {:.0f}% the plan with less memory comes first", 100 * tie) : "");
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
  if (more == 0) return text + "  as much memory\n";
  text += fmt::format("  {} {} memory:", format_device_memory(std::abs(more)), more > 0 ? "more" : "less");
  const double unit = device_memory_unit(static_cast<double>(winner.memory.total()));
  for (MemoryCategory c : all_memory_categories)
    if (const double by = static_cast<double>(other.memory[c] - winner.memory[c]) / unit;
        std::abs(by) >= 0.05)
      text += fmt::format(" {} {:+.1f}", memory_category_name(c), by);
  return text + "\n";
}

std::string explain_alone(const std::string& pin, const Estimate& winner, const SearchResult& alone) {
  if (alone.plans.empty())
    return fmt::format("  {} alone: {}\n", pin, explain_nothing(alone, winner.plan.mesh.num_ranks()));
  const Estimate& best = alone.plans.front();
  std::string text = fmt::format("  {} alone: {:+.1f}%", pin, 100 * (best.seconds / winner.seconds - 1));
  const NamedPart* most = nullptr;
  double by = 0;
  for (const NamedPart& part : named_parts)
    if (const double more = best.parts.*part.member - winner.parts.*part.member; more > by)
      by = more, most = &part;
  if (most != nullptr && by > 1e-4 * winner.seconds)
    text += fmt::format(", {} more in {}", seconds(by), most->words);
  return text + fmt::format(", with {}\n", summary(best.plan));
}

std::string explain_programs(const std::vector<OtherProgram>& others, const Estimate& best,
                             const Workload& work) {
  std::string text;
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "\nwhat other programs would gain over {}{}:\n", work.software.name,
                 dated(work.software.as_of));
  const std::vector<std::string> unknown = not_compared(work);
  const std::string rest =
      unknown.empty() ? ""
                      : fmt::format("  not compared, as their numbers do not say what {} cost: {}\n",
                                    work.plan.model.num_state_space_layers() > 0 ? "layers with a state space"
                                                                                 : "experts",
                                    fmt::join(unknown, ", "));
  if (others.empty() && work.plan.model.num_state_space_layers() > 0) return text + rest;
  if (others.empty()) return text + "  no preset is predicted to take 1% less\n" + rest;
  for (const OtherProgram& other : others) {
    fmt::format_to(out, "  {}{}: {}, {:.1f}% less: {}",
                   other.name.empty() ? "itself " + other.how : other.name,
                   other.name.empty() ? "" : dated(other.as_of), seconds(other.plan.seconds),
                   100 * (1 - other.plan.seconds / best.seconds), summary(other.plan.plan));
    if (!other.beyond.empty())
      fmt::format_to(out, " ({} does not run {})", work.software.name, fmt::join(other.beyond, ", "));
    if (!other.name.empty() && best.low < other.plan.high)
      text += "; the intervals do not tell the two apart";
    text += "\n";
  }
  return text + rest;
}

std::string explain_nothing(const SearchResult& result, int gpus) {
  if (!result.nearest) {
    std::string example;
    for (const bool is_asked : {true, false})
      for (const char* reason : {"shape", "schedule"})
        if (const auto found = result.rejected.find(reason);
            example.empty() && found != result.rejected.end() && !found->second.examples.empty() &&
            (found->second.is_asked || !is_asked))
          example = ", as " + found->second.examples.front();
    return fmt::format("no configuration of {} has a legal shape and schedule{}", counted(gpus, "GPU"),
                       example);
  }
  const Nearest& n = *result.nearest;
  return fmt::format("no configuration of {} fits; the nearest needs {} of {}, {} too much: {} ({})",
                     counted(gpus, "GPU"), format_device_memory(n.bytes),
                     format_device_memory(n.usable_bytes), format_device_memory(n.bytes - n.usable_bytes),
                     summary(n.plan), memory_line(n.memory));
}

std::string explain_nothing(const SearchResult& result, const SearchRequest& request,
                            const std::vector<NearSize>& near) {
  std::string text = explain_nothing(result, request.gpus);
  if (near.empty()) return text;
  text += "\nnear it:";
  for (const NearSize& one : near)
    text += fmt::format("\n  {}: {} a step: {}",
                        one.gpus != request.gpus ? fmt::format("--gpus {}", one.gpus)
                                                 : fmt::format("--global-batch {}", one.global_batch),
                        seconds(one.best.seconds), summary(one.best.plan));
  return text;
}

std::string explain_fewer(const NearSize& fewer, const Estimate& best) {
  return fmt::format(
      "\nfewer GPUs take less time, for more plans are legal:\n  --gpus {}: {}, {:.1f}% less: {}\n",
      fewer.gpus, seconds(fewer.best.seconds), 100 * (1 - fewer.best.seconds / best.seconds),
      summary(fewer.best.plan));
}

std::string explain_offload(const NearSize& offloaded, const Estimate& best) {
  const Estimate& e = offloaded.best;
  return fmt::format(
      "\nwith state on the host less is recomputed:\n  --offload {}: {}, {:.1f}% less, between {} and {}: "
      "{}\n",
      name_of(e.plan.offload), seconds(e.seconds), 100 * (1 - e.seconds / best.seconds), seconds(e.low),
      seconds(e.high), summary(e.plan));
}

Plan trained_plan(const Estimate& e, const Workload& work) {
  Plan plan = e.plan;
  plan.precision = trained_recipe(work.precision);
  plan.layers_per_stage = e.layers;
  plan.balance_layers = false;
  plan.priced = {work.machine.name, work.software.name, precision_name(work.precision), work.machine.node()};
  return plan;
}

std::string plan_file(const Estimate& e, const Workload& work) {
  return fmt::format("# {}: {}, {} {} a step predicted on {}\n", e.plan.model.name, summary(e.plan),
                     seconds(e.seconds), precision_name(work.precision), work.machine.name) +
         to_toml(trained_plan(e, work));
}

}  // namespace echelon
