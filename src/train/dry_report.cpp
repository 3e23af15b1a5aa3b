#include "train/dry_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/json_text.h"
#include "base/units.h"
#include "checkpoint/checkpoint_size.h"
#include "model/scratch_file.h"
#include "plan/assumptions.h"
#include "schedule/stage_flops.h"
#include "tensor/kernels.h"
#include "train/account_json.h"
#include "train/metrics.h"

namespace echelon {
namespace {

using nlohmann::ordered_json;

std::int64_t bytes_of(const Traffic& traffic) {
  std::int64_t sum = 0;
  for (Axis axis : traffic_axes) sum += traffic.bytes(axis);
  return sum;
}

// Of equal ones the class whose first rank is lower.
template <class Measure>
const RankClass& most(const DryJob& job, const Measure& measure) {
  return *std::min_element(job.classes.begin(), job.classes.end(), [&](const auto& a, const auto& b) {
    return std::pair{-measure(a), a.first} < std::pair{-measure(b), b.first};
  });
}
template <class Measure>
const RankClass& least(const DryJob& job, const Measure& measure) {
  return most(job, [&](const RankClass& of) { return -measure(of); });
}

std::int64_t held(const RankClass& of) { return of.run.peak.total(); }
std::int64_t sent(const RankClass& of) { return bytes_of(of.run.traffic); }

std::vector<std::int64_t> layers_of_stages(const PipelineLayout& pipeline) {
  std::vector<std::int64_t> layers;
  for (const StageSlice& slice : pipeline.slices()) layers.push_back(slice.layers.size());
  return layers;
}

// The schedule with the FLOPs of its stages for times, and messages that take none. Where steps run into each
// other no single one has a bubble.
std::optional<double> bubble_of(const Plan& plan, const PipelineLayout& pipeline) {
  const StepPrograms& programs = pipeline.programs(0);
  if (!programs.flushes() || !plan.optimizer_barrier) return {};
  return simulate(programs.schedule(), flops_of(plan, pipeline.slices())).timeline.bubble_fraction();
}

// "14 x 8, 2 x 7"
std::string in_runs(const std::vector<std::int64_t>& numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    const auto end = std::find_if(numbers.begin() + static_cast<std::ptrdiff_t>(i), numbers.end(),
                                  [&](std::int64_t n) { return n != numbers[i]; });
    const auto count = static_cast<std::size_t>(end - numbers.begin()) - i;
    text += fmt::format("{}{} x {}", text.empty() ? "" : ", ", count, numbers[i]);
    i += count;
  }
  return text;
}

std::string place_of(const Mesh& mesh, int rank) {
  const Coordinates at = mesh.coordinates(rank);
  return fmt::format("rank {} (pp {}, dp {}, cp {}, tp {})", rank, at.pp, at.dp, at.cp, at.tp);
}

std::string memory_text(const Mesh& mesh, const DryJob& job) {
  const RankClass &top = most(job, held), &bottom = least(job, held);
  return memory_table("memory of a rank", "largest", top.run.peak, "smallest", bottom.run.peak) +
         fmt::format("  largest: {}, one of {}; smallest: {}, one of {}\n", place_of(mesh, top.first),
                     top.ranks, place_of(mesh, bottom.first), bottom.ranks);
}

std::string traffic_text(const Mesh& mesh, const DryJob& job) {
  std::string text = fmt::format("  {:<18}{:>14}{:>14}\n", "sent in a step", "most", "least");
  for (Axis axis : traffic_axes)
    for (Verb verb : all_verbs) {
      const auto bytes = [&](const RankClass& of) { return of.run.traffic.at(axis, verb).bytes; };
      const std::int64_t largest = bytes(most(job, bytes));
      if (largest > 0)
        text += bytes_row(fmt::format("{} {}", axis_name(axis), verb_name(verb)), largest,
                          bytes(least(job, bytes)));
    }
  const RankClass &top = most(job, sent), &bottom = least(job, sent);
  return text + bytes_row("of one rank", sent(top), sent(bottom)) +
         fmt::format("  most: {}, one of {}; least: {}, one of {}\n", place_of(mesh, top.first), top.ranks,
                     place_of(mesh, bottom.first), bottom.ranks);
}

std::vector<Assumption> assumptions_of(const Plan& plan) {
  std::vector<Assumption> all = memory_assumptions(plan);
  for (Assumption a : traffic_assumptions(plan))
    if (std::find(all.begin(), all.end(), a) == all.end()) all.push_back(a);
  return all;
}

ordered_json with_place(const Mesh& mesh, int rank, ordered_json object = ordered_json::object()) {
  const Coordinates at = mesh.coordinates(rank);
  object["rank"] = rank;
  object["coordinates"] = {{"pp", at.pp}, {"dp", at.dp}, {"cp", at.cp}, {"tp", at.tp}};
  return object;
}

}  // namespace

std::int64_t left_of(std::int64_t memory_limit, const Plan& plan, const DryJob& job) {
  return memory_limit - held(most(job, held)) -
         (job.device == Device::cpu ? kernel_scratch_bytes(plan.precision, 1) : 0);
}

std::string dry_run_text(const Plan& plan, const PipelineLayout& pipeline, const DryJob& job,
                         std::int64_t memory_limit) {
  const Mesh& mesh = plan.mesh;
  std::string text = fmt::format("model   {}: {} parameters\n", plan.model.name, num_parameters(plan.model));
  text += fmt::format("mesh    {}{}\n", mesh.describe(), plan.shards_sequence() ? ", sequence parallel" : "");
  if (plan.zero_stage() > 0)
    text += fmt::format("zero    stage {}, cut over {} ranks{}\n", plan.zero, plan.shards(),
                        plan.hsdp > 1 ? fmt::format(", in {} replicas", plan.hsdp) : "");
  if (plan.offload != Offload::none)
    text +=
        fmt::format("offload {} in files, not in the memory that follows\n", offloaded_words(plan.offload));
  text += fmt::format("batch   {} of {} a step, {} at once on a rank, in {}\n",
                      counted(plan.global_batch, "sequence"), counted(plan.seq_len, "token"),
                      sequences_at_once(plan), plan.precision.name);
  if (mesh.size(Axis::pp) > 1) {
    const auto bubble = bubble_of(plan, pipeline);
    const std::vector<std::int64_t> layers = layers_of_stages(pipeline);
    text += fmt::format(
        "stages  {}: {} of {} layers; {}{}\n", plan.schedule, counted(std::ssize(layers), "stage"),
        in_runs(layers), counted(pipeline.programs(0).microbatches(), "microbatch"),
        bubble ? fmt::format(", bubble {:.1f}% where passes take their FLOPs and messages nothing",
                             100 * *bubble)
               : "");
  }
  text += fmt::format("ranks   {} of {}; one of each is run, without data and without memory{}\n\n",
                      counted(std::ssize(job.classes), "kind"), counted(mesh.num_ranks(), "rank"),
                      job.device == Device::cuda ? ", as on a GPU" : "");
  text += memory_text(mesh, job);
  text += fmt::format("  beside it {} for each compute thread that runs on a cpu: its kernels' scratch\n",
                      format_bytes(static_cast<double>(kernel_scratch_bytes(plan.precision, 1))));
  if (memory_limit > 0) {
    const auto limit = static_cast<double>(memory_limit),
               left = static_cast<double>(left_of(memory_limit, plan, job));
    const char* const beside = job.device == Device::cpu ? ", with one such thread" : "";
    text += left < 0 ? fmt::format("  {} more than --memory-limit {}{}\n", format_bytes(-left),
                                   format_bytes(limit), beside)
                     : fmt::format("  fits in --memory-limit {}{}: {} are left\n", format_bytes(limit),
                                   beside, format_bytes(left));
  }
  text += fmt::format("  a checkpoint takes {} on disk, written by all ranks\n",
                      format_bytes(static_cast<double>(checkpoint_bytes(plan))));
  const auto there = [](const RankClass& of) { return of.run.host.most; };
  text += offload_table("most", most(job, there).run.host, "least", least(job, there).run.host);
  return text + "\n" + traffic_text(mesh, job) + assumption_note(assumptions_of(plan));
}

std::string dry_run_json(const Plan& plan, const PipelineLayout& pipeline, const DryJob& job,
                         std::int64_t memory_limit) {
  const Mesh& mesh = plan.mesh;
  std::set<int> microbatches;
  for (int dp = 0; dp < mesh.size(Axis::dp); ++dp) microbatches.insert(pipeline.programs(dp).microbatches());
  ordered_json schedule{{"name", plan.schedule},
                        {"stages", pipeline.slices().size()},
                        {"layers", layers_of_stages(pipeline)},
                        {"microbatches", *microbatches.rbegin()}};
  const auto bubble = bubble_of(plan, pipeline);
  schedule["bubble_fraction"] = bubble ? ordered_json(*bubble) : ordered_json();
  const auto memory = [&](const RankClass& of) { return with_place(mesh, of.first, as_json(of.run.peak)); };
  const auto traffic = [&](const RankClass& of) {
    ordered_json object = with_place(mesh, of.first, as_json(of.run.traffic));
    object["total"] = sent(of);
    return object;
  };
  ordered_json classes = ordered_json::array();
  for (const RankClass& of : job.classes) {
    ordered_json object = with_place(mesh, of.first, {{"ranks", of.ranks}});
    object["memory_bytes"] = as_json(of.run.peak);
    object["traffic_bytes"] = as_json(of.run.traffic);
    if (of.run.host != HostActivations{}) object["offloaded_activation_bytes"] = as_json(of.run.host);
    classes.push_back(std::move(object));
  }
  ordered_json object{
      {"dry_run", true},
      {"model", plan.model.name},
      {"params", num_parameters(plan.model)},
      {"precision", plan.precision.name},
      {"device", job.device == Device::cuda ? "cuda" : "cpu"},
      {"ranks", mesh.num_ranks()},
      {"mesh",
       {{"pp", mesh.size(Axis::pp)},
        {"dp", mesh.size(Axis::dp)},
        {"cp", mesh.size(Axis::cp)},
        {"tp", mesh.size(Axis::tp)},
        {"ep", mesh.ep}}},
      {"schedule", std::move(schedule)},
      {"memory_bytes", {{"largest", memory(most(job, held))}, {"smallest", memory(least(job, held))}}},
      {"scratch_bytes_of_a_thread", kernel_scratch_bytes(plan.precision, 1)},
      {"checkpoint_bytes", checkpoint_bytes(plan)},
      {"traffic_bytes", {{"most", traffic(most(job, sent))}, {"least", traffic(least(job, sent))}}},
      {"assumes", assumption_names(assumptions_of(plan))},
      {"classes", std::move(classes)}};
  if (memory_limit > 0) {
    const std::int64_t left = left_of(memory_limit, plan, job);
    object["memory_limit"] = {{"bytes", memory_limit}, {"left_bytes", left}, {"fits", left >= 0}};
  }
  return json_text(object);
}

}  // namespace echelon
