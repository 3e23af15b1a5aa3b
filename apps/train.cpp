#include <fmt/core.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "apps/command_text.h"
#include "apps/file_kind.h"
#include "apps/flag_needs.h"
#include "apps/help.h"
#include "apps/launched.h"
#include "apps/progress_line.h"
#include "apps/run_page.h"
#include "apps/stop_signals.h"
#include "apps/terminal.h"
#include "apps/train_flags.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/on_off.h"
#include "base/output_file.h"
#include "base/private_directory.h"
#include "base/units.h"
#include "checkpoint/hugging_face.h"
#include "model/scratch_file.h"
#include "plan/price.h"
#include "schedule/pipeline_layout.h"
#include "spec/plan_fields.h"
#include "train/dry_report.h"
#include "train/dry_run.h"
#include "train/refuse_request.h"

namespace echelon {
namespace {

// Priced for the machine that `echelon calibrate` measured, which gave each rank separate cores.
StepPrediction priced_step(const TrainFlags& f) {
  const TrainRequest& request = f.request;
  const Machine machine = load_machine(f.machine);
  const int threads = request.run.threads_per_rank;
  const auto [ranks, cores] = ranks_here(request.plan, f.job.processes());
  if (request.asynchronous) refuse("--machine {}: steps around parameter servers are not priced", f.machine);
  if (threads != machine.cores)
    refuse(
        "--machine {}: has {} cores a device, and a rank here {} threads; legal: what `echelon calibrate "
        "--threads {}` wrote",
        f.machine, machine.cores, threads, threads);
  if (ranks * threads > cores)
    refuse("--machine {}: prices cores of its own for each rank, and {} ranks of {} threads share {} here",
           f.machine, ranks, threads, cores);
  const Estimate estimate = price(request.plan, machine, exact_memory());
  return {estimate.seconds, estimate.bubble_fraction};
}

// Ids of token files are shown as numbers unless a tokenizer was named.
std::string as_text(const std::vector<std::int32_t>& tokens, const TrainFlags& f, const TokenData& data) {
  std::string text;
  if (data.from_text() && data.kind() == TokenData::Kind::tokens) {
    const std::int64_t vocab = f.tokenizer->vocab();  // the model's may be larger
    std::vector<std::int32_t> known = tokens;
    std::erase_if(known, [&](std::int32_t token) { return token >= vocab; });
    return f.tokenizer->decode(known);
  }
  for (std::int32_t token : tokens) {
    if (data.kind() == TokenData::Kind::tokens)
      text += fmt::format("{} ", token);
    else if (token < 256)
      text += static_cast<char>(token);
    else
      text += token == end_of_text ? "\n[end of text]\n" : fmt::format("[{}]", token);
  }
  return text;
}

Plan train_defaults() {
  Plan plan;
  plan.model = load_model("gpt2-tiny");
  plan.global_batch = 8;
  plan.micro_batch = 4;
  plan.seq_len = 256;
  return plan;
}

std::optional<AsynchronousOptions> asynchronous_options(const TrainFlags& f) {
  if (!is_given(*f.app, "--staleness")) return {};
  AsynchronousOptions options;
  options.servers = f.servers;
  if (f.staleness != "inf") options.staleness = parse_number<std::int64_t>("--staleness", f.staleness);
  return options;
}

std::optional<Straggler> straggler(const TrainFlags& f) {
  if (f.app->get_option("--straggle")->count() == 0) return {};
  const auto [rank, factor] =
      parse_pair<int, double>("--straggle", f.straggle, "a rank and how many times slower it is, as 1:4");
  return Straggler{rank, factor};
}

std::optional<PlantedExpert> planted_expert(const TrainFlags& f) {
  if (f.app->get_option("--plant-expert")->count() == 0) return {};
  const auto [expert, strength] = parse_pair<std::int64_t, double>(
      "--plant-expert", f.plant_expert, "an expert and how much higher its logits begin, as 0:4");
  return PlantedExpert{expert, strength};
}

std::optional<PlantedFlip> planted_flip(const TrainFlags& f) {
  if (f.app->get_option("--flip")->count() == 0) return {};
  std::vector<std::string> parts{""};
  for (const char c : f.flip)
    if (c == ':')
      parts.emplace_back();
    else
      parts.back() += c;
  const bool lasting = parts.size() == 5 && parts[4] == "lasting";
  if (parts.size() < 3 || parts.size() > 5 || (parts.size() == 5 && !lasting))
    refuse("--flip {}: must be RANK:STEP:BIT, RANK:STEP:BIT:WHERE or RANK:STEP:BIT:WHERE:lasting", f.flip);
  PlantedFlip flip{parse_number<int>("--flip", parts[0]), parse_number<std::int64_t>("--flip", parts[1]), 0,
                   FlipWhere::weights, lasting};
  const auto bit = parse_number<std::int64_t>("--flip", parts[2]);
  if (bit < 0) refuse("--flip {}: bit {} must be at least 0", f.flip, bit);
  flip.bit = static_cast<std::uint64_t>(bit);
  if (parts.size() > 3) {
    const auto where = parse_flip_where(parts[3]);
    if (!where)
      refuse("--flip {}: WHERE is one of weights, moments, gradients, activations, messages", f.flip);
    flip.where = *where;
  }
  return flip;
}

PlannedDeath planned_death(const std::string& text, bool processes) {
  const std::size_t first = text.find(':'), second = text.find(':', first + 1);
  if (first == std::string::npos || second == std::string::npos)
    refuse("--die {}: must be RANK:STEP:WHERE", text);
  const std::string where = text.substr(second + 1);
  std::vector<std::string> legal{"forward", "backward", "write", "written", "commit"};
  if (processes) legal.insert(legal.end(), {"tp-collective", "dp-collective"});
  if (!contains(legal, where)) refuse("--die {}: WHERE is one of {}", text, fmt::join(legal, ", "));
  return {parse_number<int>("--die", text.substr(0, first)),
          parse_number<std::int64_t>("--die", text.substr(first + 1, second - first - 1)), where};
}

// What each flag of train needs to have an effect, other than the plan's.
std::vector<FlagNeed> train_needs(const TrainFlags& f) {
  const TrainRequest& r = f.request;
  const bool saves = !r.checkpoint_directory.empty(), validates = r.validation_fraction != 0;
  const std::vector<Remedy> checkpoint{advice("--checkpoint", "DIR")}, synchronous,
      held_out{advice("--val-fraction", "0.05")};
  return {
      {"--from", !r.resume, "with --resume", {}},
      {"--save-every", saves || r.save_every == 0, "without --checkpoint", checkpoint},
      {"--keep", saves || r.keep == 0, "without --checkpoint", checkpoint},
      {"--async-save", saves, "without --checkpoint", checkpoint},
      {"--async-save", !r.asynchronous, "with --staleness", synchronous},
      {"--eval-every", validates || r.eval_every == 0, "with --val-fraction 0", held_out},
      {"--eval-every",
       r.eval_samples != 0 || r.eval_every == 0,
       "with --eval-samples 0",
       {advice("--eval-samples", "16")}},
      {"--eval-samples", validates || r.eval_samples == 0, "with --val-fraction 0", held_out},
      {"--servers", r.asynchronous.has_value(), "without --staleness", {advice("--staleness", "1")}},
      {"--straggler-every", !r.asynchronous || r.straggler_every == 0, "with --staleness", synchronous},
      {"--fingerprint", !r.asynchronous || r.fingerprint_every == 0, "with --staleness", synchronous},
      {"--check-replicas", !r.asynchronous || r.check_every == 0, "with --staleness", synchronous},
      {"--rerun", r.check_every != 0, "without --check-replicas", {advice("--check-replicas", "10")}},
      {"--bucket", !r.asynchronous, "with --staleness", synchronous},
  };
}

std::vector<FlagNeed> data_needs(const TrainFlags& f, const TokenData& data) {
  const TrainRequest& r = f.request;
  const std::int64_t seq_len = r.plan.seq_len;
  const bool validates = r.validation_fraction == 0 ||
                         split_tokens(data.size(), r.validation_fraction, seq_len).validation.size() > 0;
  const std::string short_part = fmt::format(
      "with {} tokens of data: a part of {} of them is no more than one "
      "sequence of {}",
      data.size(), r.validation_fraction, seq_len);
  std::vector<FlagNeed> needs = f.reading.needs(data);
  needs.push_back({"--val-fraction", validates, short_part, {}});
  needs.push_back({"--eval-every", validates || r.eval_every == 0, short_part, {}});
  needs.push_back({"--eval-samples", validates || r.eval_samples == 0, short_part, {}});
  return needs;
}

// Where there may be a tokenizer that belongs to the weights, or to the model.
std::vector<std::string> tokenizer_places(const TrainFlags& f) {
  std::vector<std::string> places;
  if (f.request.resume && !list_checkpoints(f.request.checkpoint_directory).empty())
    places = {list_checkpoints(f.request.checkpoint_directory).back(), f.request.checkpoint_directory};
  if (f.request.from) places = {f.request.from->path(), f.from};
  if (is_given(*f.app, "--model")) places.push_back(f.app->get_option("--model")->as<std::string>());
  return places;
}

// The last checkpoint that can be read, if the run resumes.
std::optional<CheckpointInfo> resumed_checkpoint(const TrainFlags& f) {
  if (!f.request.resume) return {};
  const auto checkpoints = list_checkpoints(f.request.checkpoint_directory);
  for (auto last = checkpoints.rbegin(); last != checkpoints.rend(); ++last) {
    try {
      return read_checkpoint_info(*last);
    } catch (const RequestError&) {
      continue;  // reported when the run looks for an intact one
    }
  }
  return {};
}

// `reading` says where to look for tokenizers; `of_tokenizer`: the plan's end of a document is a token of the
// tokenizer; `cuts`: a mask needs documents, if the data has them.
std::unique_ptr<TokenData> read_data(TrainFlags& f, DataReading reading, bool of_tokenizer, bool cuts) {
  TrainRequest& request = f.request;
  const ModelSpec& model = request.plan.model;
  std::optional<ProgressLine> line;
  if (!f.reading_progress && f.job.leads()) line.emplace("train", f.json);
  reading.progress = line ? line->progress() : f.reading_progress;
  auto data = std::make_unique<TokenData>(f.data, model.vocab, reading);
  f.tokenizer = reading.text.tokenizer;
  if (!reading.text.reads_bytes())
    request.tokenizer = std::make_shared<const TokenizerFiles>(read_tokenizer_files(f.tokenizer->name()));
  else if (request.from && data->kind() == TokenData::Kind::tokens)  // ids end texts as before
    if (TokenizerFiles files = read_tokenizer_files(request.from->path()); !files.empty())
      request.tokenizer = std::make_shared<const TokenizerFiles>(std::move(files));
  if (request.from && !is_given(*f.app, "--tokenizer") && data->kind() == TokenData::Kind::text) {
    const CheckpointInfo* const checkpoint = request.from->checkpoint();
    if (checkpoint != nullptr ? !reads_bytes(*checkpoint) : model.vocab != bytes_vocab)
      refuse(
          "--data: text would be read as bytes, but the weights of --from {} were trained with a tokenizer, "
          "which is not beside them; legal: --tokenizer PATH with it, --tokenizer bytes, or token files",
          request.from->path());
  }
  const bool is_cut = cuts && data->cut_documents();
  if (of_tokenizer && !data->from_text() && !is_cut) {  // it is unknown which tokenizer made these ids
    request.plan.document_end = -1;
    check_with_remedies(request.plan, [](const Plan& plan, const std::string&) { check_whole(plan); });
  }
  if (!data->is_masked()) return data;
  const Split split = split_tokens(data->size(), request.validation_fraction, request.plan.seq_len);
  const auto counts = [&](const Range& part) {
    return part.begin == 0 ? next_counted(*data, {part.begin + 1, part.end}) < part.end
                           : !Sampler(*data, part, 0).windows(request.plan.seq_len, 1).empty();
  };
  for (const Range& part : {split.train, split.validation})
    if (part.size() > 0 && !counts(part))
      refuse(
          "--data: the loss counts none of the {} tokens that are {}; legal: records with a completion or an "
          "assistant's message that is not empty, or another --val-fraction",
          part.size(), part.begin == 0 ? "trained on" : "held out");
  return data;
}

}  // namespace

Plan TrainFlags::read_plan(const std::function<std::int32_t()>& document_end) {
  if (!from.empty() && !request.resume) request.from = std::make_shared<const StartingWeights>(from);
  const std::optional<CheckpointInfo> resumed = resumed_checkpoint(*this);
  const bool has_file = is_given(*app, "--plan"), names_model = is_given(*app, "--model") || has_file;
  Plan asked =
      plan.plan(request.from.get(), resumed && !names_model ? &resumed->model : nullptr, document_end);
  if (!resumed) return asked;
  if (!is_given(*app, "--optimizer") && !has_file) {
    asked.optimizer = resumed->optimizer;
    check_with_remedies(asked, [](const Plan& p, const std::string&) { check_whole(p); });
  }
  // Before the data is read by the checkpoint's tokenizer, whose vocabulary another model may not have.
  refuse_other_model(*resumed, asked.model);
  return asked;
}

std::unique_ptr<TokenData> TrainFlags::read() {
  TrainFlags& f = *this;
  std::optional<DataReading> how;
  bool of_tokenizer = false, cuts = false;
  request.plan = read_plan([&] {
    how = f.reading.reading(tokenizer_places(f), {});
    const auto end = how->text.tokenizer->end_of_text();
    of_tokenizer = end.has_value();
    cuts = true;
    return end.value_or(-1);
  });
  request.run = f.job.options(f.run, request.plan);
  f.optimizer.finish(f.steps, request.plan);
  request.run.memory_limit = limit_of_memory();
  request.asynchronous = asynchronous_options(f);
  request.straggler = straggler(f);
  request.planted_expert = planted_expert(f);
  request.flip = planted_flip(f);
  refuse_idle(*f.app, train_needs(f));
  if (!f.machine.empty()) request.priced_step = priced_step(f);
  const auto is_given = [&](const char* name) { return echelon::is_given(*f.app, name); };
  if (!is_given("--warmup")) request.optimizer.warmup_steps = std::clamp<std::int64_t>(f.steps, 0, 10);
  if (is_given("--rerun") && request.rerun < 0) refuse("--rerun {}: must be at least 0", request.rerun);
  if (f.on_nan != "stop" && f.on_nan != "skip") refuse("--on-nan {}: legal: stop, skip", f.on_nan);
  request.run.cuda_graphs = parse_on_or_off("--cuda-graphs", f.cuda_graphs);
  request.save_beside = parse_on_or_off("--async-save", f.async_save);
  request.skip_nonfinite = f.on_nan == "skip";
  request.trace = f.timeline.asked();
  if (is_given("--die") && !request.resume)
    request.death = planned_death(f.die, f.job.processes() != nullptr);
  request.sample_tokens =
      is_given("--sample") ? f.sample : std::min(f.sample, request.plan.model.max_seq - 1);
  if (!how) how = f.reading.reading(tokenizer_places(f), {});
  auto tokens = read_data(f, std::move(*how), of_tokenizer, cuts);
  refuse_idle(*f.app, data_needs(f, *tokens));
  return tokens;
}

namespace {

// Where the weights come from, unless it is obvious, as for a model's directory, which contains its weights.
std::string origin_of_weights(const TrainFlags& f) {
  if (f.request.from) {
    const CheckpointInfo* const checkpoint = f.request.from->checkpoint();
    const bool sees = f.request.from->num_for_images() > 0;
    return fmt::format(
        "weights from {}{}\n", f.request.from->path(),
        checkpoint != nullptr
            ? fmt::format(", trained for {}", counted(checkpoint->step, "step"))
            : std::string(sees ? ", of its text model alone: what sees images is left out" : ""));
  }
  if (f.request.resume || !is_given(*f.app, "--model")) return "";
  const std::string model = f.app->get_option("--model")->as<std::string>();
  if (!has_weights(model)) return "";
  return fmt::format("weights new, from --seed {}; those in {} are not used: --from {} starts from them\n",
                     f.request.seed, model, model);
}

}  // namespace

std::int64_t TrainFlags::limit_of_memory() const {
  return is_given(*app, "--memory-limit") ? parse_bytes(memory_limit, "--memory-limit") : 0;
}

bool is_of_dry_run(const std::string& flag) {
  static const std::vector<std::string> own{
      "plan",           "dry-run",     "json",        "device",
      "check-replicas", "cuda-graphs", "memory-limit"};  // which it is asked about
  return find_field(flag) != nullptr || contains(own, flag);
}

Plan TrainFlags::read_dry() const {
  for (const char* name : {"--staleness", "--servers"})
    if (is_given(*app, name))
      refuse("{}: parameter servers and their workers are not run dry; legal: without --dry-run", name);
  std::vector<FlagNeed> needs;
  for (const CLI::Option* option : app->get_options()) {
    const std::string name = option->get_lnames().front();
    needs.push_back({"--" + name, is_of_dry_run(name), "with --dry-run", {}});
  }
  refuse_idle(*app, needs);
  if (launched_processes() > 1)
    refuse("--dry-run: imagines all ranks in one process, and {} were started; legal: one",
           launched_processes());
  return plan.plan();
}

DryRunOptions TrainFlags::dry_options(const Plan& of, const PipelineLayout& pipeline) const {
  DryRunOptions options{.keeps_copy = request.check_every > 0,
                        .graphs = parse_on_or_off("--cuda-graphs", cuda_graphs),
                        .device = run.imagined_device()};
  refuse_on_kind(of, options.device);
  if (request.check_every < 0) refuse("--check-replicas {}: must be at least 0", request.check_every);
  if (options.keeps_copy)
    refuse_running_again(of, pipeline, options.device,
                         fmt::format("--check-replicas {}", request.check_every));
  if (options.graphs) refuse_graphs(of, options.device);
  return options;
}

namespace {

// That a plan's file was made for other devices than those imagined.
std::string note_on_device(const TrainFlags& f, const Plan& plan) {
  const std::string& machine = plan.priced.machine;
  if (machine.empty() || is_given(*f.app, "--device")) return "";
  try {
    if (load_machine(machine).device() == Device::cpu) return "";
  } catch (const RequestError&) {  // a file that is elsewhere
  }
  return fmt::format(
      "note    the plan was made for {}, and its ranks are imagined on a CPU; --device cuda imagines GPUs\n",
      machine);
}

int run_dry(const TrainFlags& f) {
  const Plan plan = f.read_dry();
  const PipelineLayout pipeline(plan);
  const DryRunOptions options = f.dry_options(plan, pipeline);
  const std::int64_t limit = f.limit_of_memory();
  const DryJob job = with_progress(
      "train", f.json, [&](const Progress& progress) { return dry_job(plan, pipeline, progress, options); });
  fmt::print("{}", f.json ? dry_run_json(plan, pipeline, job, limit) + "\n"
                          : fitted(note_on_device(f, plan) + dry_run_text(plan, pipeline, job, limit),
                                   line_columns(stdout)));
  return limit > 0 && left_of(limit, plan, job) < 0 ? 1 : 0;
}

void write_report(const TrainFlags& f, const std::string& log, const TrainSummary& summary) {
  Page page = run_page(log, "--report", command_text(*f.app));
  if (!summary.measured_timeline.ranks.empty())
    page.tracks = timeline_tracks(summary.simulated_timeline, summary.measured_timeline);
  page.ranks = summary.rank_timelines;
  write_output("--report", f.report, page_html(page));
}

// What a run says of itself before its first step.
std::string opening_text(const TrainFlags& f, const TokenData& data, const StartInfo& start,
                         const Colours& colours) {
  const TrainRequest& request = f.request;
  const Plan& plan = request.plan;
  std::string lines;
  const auto say = [&]<class... Values>(fmt::format_string<Values...> form, Values&&... values) {
    lines += fmt::format(form, std::forward<Values>(values)...);
  };
  say("model   {}: {} parameters{}\n", plan.model.name, start.num_params,
      start.trained_params < start.num_params ? fmt::format(", {} of them trained", start.trained_params)
                                              : "");
  say("mesh    {}{}; {} a rank\n", plan.mesh.describe(), plan.shards_sequence() ? ", sequence parallel" : "",
      counted(request.run.threads_per_rank, "compute thread"));
  say("{}", f.job.describe(plan.mesh));
  if (start.cores.are_shared(start.ranks))
    say("cores   {} ranks share {:.3g} core{}: no communication hides behind computation, and a step takes "
        "the work of all ranks divided by the cores\n",
        start.ranks, start.cores.cores, start.cores.cores == 1 ? "" : "s");
  if (plan.zero_stage() > 0)
    say("zero    stage {}, cut over {} ranks{}\n", plan.zero, plan.shards(),
        plan.hsdp > 1 ? fmt::format(", in {} replicas", plan.hsdp) : "");
  if (plan.offload != Offload::none)
    say("offload {} in {}\n", offloaded_words(plan.offload),
        request.run.driver ? "the host's memory" : "files in " + scratch_place(plan.offload_directory));
  say("{}", origin_of_weights(f));
  say("data    {} from {}; {} held out for validation\n", counted(start.train_tokens, "token"),
      counted(start.num_files, "file"), start.validation_tokens);
  say("{}", data.notes());
  if (data.kind() == TokenData::Kind::text && plan.model.vocab > bytes_vocab)
    say("tokens  text is read as bytes, ids 0 to {}: the other {} of the vocabulary are never seen\n",
        end_of_text, plan.model.vocab - bytes_vocab);
  if (data.from_text() && data.kind() == TokenData::Kind::tokens)
    say("tokens  of text by {}, which has {} of the vocabulary's {}\n", f.tokenizer->name(),
        f.tokenizer->vocab(), plan.model.vocab);
  say("batch   {} of {} a step, {} at once on a rank\n", counted(plan.global_batch, "sequence"),
      counted(plan.seq_len, "token"), sequences_at_once(plan));
  if (request.asynchronous)
    say("servers {} beside the mesh; saved at the end alone, not by a signal; a worker {}\n",
        request.asynchronous->servers,
        request.asynchronous->staleness ? fmt::format("may run at most {} ahead of the slowest",
                                                      counted(*request.asynchronous->staleness, "batch"))
                                        : "never waits for another");
  if (!flushes(plan))
    say("stream  {} steps each stage by itself, without clipping; gradients are late by up to {} steps "
        "(by pipeline rank)\n",
        plan.schedule, fmt::join(start.staleness, " "));
  if (plan.model.experts != Experts::none &&
      (request.asynchronous || !flushes(plan) || !plan.optimizer_barrier))
    say("experts loads are not shown: no rank knows those of a whole step when it ends\n");
  say("memory  {} a rank predicted (", format_bytes(static_cast<double>(start.predicted_memory.total())));
  const char* separator = "";
  for (MemoryCategory c : all_memory_categories)
    if (start.predicted_memory[c] > 0) {
      say("{}{} {}", separator, memory_category_name(c),
          format_bytes(static_cast<double>(start.predicted_memory[c])));
      separator = ", ";
    }
  say(")\ntime    {} a step predicted, {}\n", format_seconds(start.predicted_step_seconds),
      request.priced_step ? "by " + f.machine : "from its parts, timed here");
  say("peak    {:.1f} GFLOP/s in matrix products (100% MFU)\n", start.peak_flops / 1e9);
  for (const std::string& note : start.notes) say("{}    {}\n", colours(Tint::caution, "note"), note);
  if (!start.resumed_from.empty()) say("resume  after step {} of {}\n", start.first_step, start.resumed_from);
  return lines;
}

// What a run says of itself after its last step: predictions beside measurements.
void show_summary(std::FILE* out, const TrainFlags& f, const TrainSummary& summary, const Colours& colours,
                  bool shares_cores) {
  const TrainRequest& request = f.request;
  const Plan& plan = request.plan;
  const auto& asynchronous = summary.asynchronous;
  show(out, "\n{}{}{}{}{}",
       memory_table("memory, rank 0", "predicted", summary.predicted_memory, "measured",
                    summary.measured_memory),
       offload_table("predicted", summary.predicted_host, "measured", summary.measured_host),
       assumption_note(summary.memory_assumptions),
       asynchronous ? memory_table("memory, server 0", "predicted", asynchronous->predicted_memory,
                                   "measured", asynchronous->measured_memory)
                    : "",
       traffic_table(summary));
  show(out, "{}", expert_table(summary.experts));
  for (Axis axis : traffic_axes)
    if (const VerbTraffic& sent = summary.measured_messages.at(axis, Verb::send); sent.calls > 0)
      show(out, "  {:<18}{:>28}{:>8} message{} of {} collectives\n", axis_name(axis),
           format_bytes(static_cast<double>(sent.bytes)), sent.calls, sent.calls == 1 ? "" : "s",
           collectives_name(request.run.collectives));
  show(out, "  {:<18}{:>14}{:>14}\n", "step time", format_seconds(summary.predicted_step_seconds),
       format_seconds(summary.step_seconds));
  if (plan.mesh.size(Axis::pp) > 1) {
    show(out, "  {:<18}{:>13.1f}%{:>13.1f}%\n", "bubble", 100 * summary.predicted_bubble,
         100 * summary.measured_bubble);
    const double simulated = summary.simulated_timeline.makespan(),
                 measured = summary.measured_timeline.makespan();
    show(out,
         "pipeline of the last step{}: {} measured, {} simulated with the times its instructions took{}\n",
         flushes(plan) ? "" : "s", format_seconds(measured), format_seconds(simulated),
         shares_cores ? ", in which they waited for cores" : "");
  }
  if (const auto missed = missed_predictions(summary); !missed.empty())
    show(out, "{}\n  {}\n", colours(Tint::caution, "predictions off by more than 10%:"),
         fmt::join(missed, "\n  "));
  if (summary.gathers)
    show(out, "  {} of parameters, {} under way before the layer ahead of theirs; uses waited {}\n",
         counted(summary.gathers->gathers, "gather"), summary.gathers->ahead,
         format_seconds(summary.gathers->wait_seconds));
  if (!summary.measured_staleness.empty())
    show(out, "gradients late by {} optimizer steps, by pipeline rank; predicted {}\n",
         fmt::join(summary.measured_staleness, " "), fmt::join(summary.predicted_staleness, " "));
  if (summary.asynchronous) show(out, "{}", staleness_table(*summary.asynchronous));
  if (summary.skipped > 0)
    show(out, "{}: what they computed was not finite (--on-nan skip)\n",
         colours(Tint::caution,
                 fmt::format("{} of {} skipped", summary.skipped, counted(summary.steps, "step"))));
  if (summary.checked_steps > 0)
    show(out, "{} run a second time, in {}: {}\n", counted(summary.checked_steps, "step"),
         format_seconds(summary.check_seconds),
         summary.corruptions == 0 ? "the same bits"
                                  : counted(summary.corruptions, "corruption") + " found, and repaired");
  if (summary.graphs)
    show(out, "CUDA graphs: passes captured {}, replayed {}\n", summary.graphs->captured,
         summary.graphs->replayed);
  if (!plan.optimizer_barrier)
    show(out, "optimizer without a barrier: {} of {} guessed wrongly and taken back\n", summary.taken_back,
         counted(summary.steps, "step"));
  std::string last = fmt::format("{:.0f} tokens/s, MFU {:.1f}%, final loss {}", summary.tokens_per_second,
                                 100 * summary.mfu, loss_text(summary.final_loss));
  if (summary.validation_loss) last += ", validation loss " + loss_text(*summary.validation_loss);
  show(out, "{}\n", colours(Tint::strong, last));
}

int run_train(TrainFlags& f, StopSignals& signals) {
  std::unique_ptr<TokenData> read;
  ReportedLog reported;
  refuse_together(f.job.processes(), [&] {
    read = f.read();
    if (!f.report.empty() && f.job.leads()) reported.choose(f.request.log_paths);
  });
  const TokenData& data = *read;
  f.request.stop_requested = [&] { return signals.asked(); };
  const TrainRequest& request = f.request;

  // People read standard output; with --json it has only the summary, and people read standard error.
  std::FILE* out = f.json ? stderr : stdout;
  // Under mpirun standard output looks like a terminal wherever it goes.
  const bool terminal = f.job.processes() == nullptr && is_terminal(out);
  const Colours colours = f.colour.of(terminal ? out : nullptr);
  const char* const fresh = terminal ? fresh_line : "";  // replaces a progress line
  TrainObserver observer;
  bool shares_cores = false;
  std::optional<ProgressLine> starting(std::in_place, "train", true);
  report(starting->progress(), -1, "starting");
  observer.on_progress = [&](double done, const std::string& what) {
    report(starting->progress(), done, "checking the checkpoint, " + what);
  };
  observer.on_start = [&](const StartInfo& start) {
    starting.reset();
    shares_cores = start.cores.are_shared(start.ranks);
    show(out, "{}", fitted(opening_text(f, data, start, colours), line_columns(terminal ? out : nullptr)));
    std::fflush(out);
  };
  double seconds_in_steps = 0;
  int steps_done = 0;
  Clock::time_point last_line = Clock::now();
  observer.on_step = [&](const StepRecord& r) {
    seconds_in_steps += r.step_seconds;
    ++steps_done;
    const double left = static_cast<double>(f.steps - r.step) * seconds_in_steps / steps_done;
    const bool keeps = r.step % 10 == 0 || r.step == f.steps || f.steps <= 40 ||
                       (!terminal && seconds_since(last_line) > 30);
    if (!r.skipped.empty())
      show(out, "{}{}: {}\n", fresh, colours(Tint::caution, fmt::format("step {} skipped", r.step)),
           r.skipped);
    if (!terminal && !keeps) return;
    // On a terminal every step is shown; unlogged steps share one line, which is overwritten. Its last column
    // stays free, since some terminals would wrap.
    const int columns = terminal ? terminal_columns(out, 80) - 1 : 79;
    show(out, "{}{}{}", fresh, step_line(r, f.steps, left, columns), keeps ? "\n" : "");
    std::fflush(out);
    last_line = Clock::now();
  };
  observer.on_evaluation = [&](std::int64_t step, double loss) {
    show(out, "{}step {}  validation loss {}\n", fresh, step, loss_text(loss));
  };
  observer.on_fingerprint = [&](std::int64_t step, const std::string& fingerprint) {
    show(out, "{}step {}  fingerprint {}\n", fresh, step, fingerprint);
  };
  observer.on_corruption = [&](const Corruption& c) {
    show(out, "{}{} {}; found after step {}{}\n", fresh, colours(Tint::bad, "corrupt"), c.what, c.found_after,
         c.repaired ? ", and repaired" : "");
    std::fflush(out);
  };
  observer.on_spread = [&](const WorkSpread& s) {
    const auto [least, most] = std::minmax_element(s.seconds.begin(), s.seconds.end());
    show(
        out,
        "{}ranks   steps {} to {}: {} to {} of work each; rank {} most, {:.2f}x the median of the others{}\n",
        fresh, s.first_step, s.last_step, format_seconds(*least), format_seconds(*most), s.slowest(),
        s.slowdown(), shares_cores ? " (waits for cores included)" : "");
  };
  observer.on_checkpoint = [&](const std::string& path) { show(out, "{}saved   {}\n", fresh, path); };
  observer.on_sample = [&](const std::vector<std::int32_t>& prompt, const std::vector<std::int32_t>& text) {
    show(out, "\nsample, after \"{}\":\n{}\n", as_text(prompt, f, data), as_text(text, f, data));
  };
  // An asynchronous run's workers have no common step to stop after. If one process fails, mpirun signals the
  // others, which is not a request to stop.
  if (!request.asynchronous)
    signals.listen(f.job.processes() == nullptr
                       ? "echelon: stopping after this step; a second request ends the run at once"
                       : "");
  if (!request.asynchronous && f.job.leads()) {
    signals.listen_to_reader(stdout);
    if (f.json) signals.listen_to_reader(stderr);
  }
  const TrainSummary summary = train(request, data, observer);
  starting.reset();
  show(out, "{}", fresh);
  if (!f.job.leads()) return 0;
  if (summary.complete) {
    show(out, "complete: {} has all {} done\n", summary.checkpoint, counted(summary.last_step, "step"));
    if (f.json) fmt::print("{}\n", to_json(summary));
    return 0;
  }
  if (summary.stopped)
    show(out, "stopped after step {} as asked{}\n", summary.last_step,
         summary.checkpoint.empty()
             ? "; nothing is saved without --checkpoint"
             : fmt::format("; the same command with --resume{} continues from {}",
                           f.from.empty() ? "" : " in place of --from", summary.checkpoint));
  show_summary(out, f, summary, colours, shares_cores);
  if (f.json) fmt::print("{}\n", to_json(summary));
  std::fflush(stdout);  // printed, even if writing files fails
  f.timeline.write(summary.simulated_timeline, summary.measured_timeline, summary.rank_timelines);
  if (!f.report.empty()) write_report(f, reported.path(), summary);
  // As run_program() does where standard output is lost; but here nobody could read a message.
  return f.json && std::ferror(stderr) != 0 ? 3 : 0;
}

}  // namespace

void add_train_flags(CLI::App& app, const std::shared_ptr<TrainFlags>& flags) {
  flags->app = &app;
  heading(app, common_flags);
  app.add_option("--data", flags->data, "Text, .jsonl or directories of them, or token files (required)")
      ->type_name("PATH");
  add_number(app, "--steps", flags->steps, "Train up to this step");
  app.add_option("--checkpoint", flags->request.checkpoint_directory, "Directory of the checkpoints")
      ->type_name("DIR");
  app.add_flag("--resume", flags->request.resume, "Continue from the last checkpoint");
  app.add_option(
         "--from", flags->from,
         "Start from these weights: a model of Hugging Face's layout, or a checkpoint (default: new ones)")
      ->type_name("DIR");
  add_number(app, "--sample", flags->sample, "Tokens of text generated at the end; 0: none");
  app.add_flag("--json", flags->json, "Summary as one JSON object on standard output");
  app.add_flag("--dry-run", flags->dry_run,
               "Print what every rank would hold and send in a step, then exit: needs no data and no memory");
  flags->plan.add_to(app, train_defaults());
  flags->plan.add_asked_dp();
  flags->optimizer.add_to(app, flags->request.optimizer);
  heading(app, "Data and evaluation");
  flags->reading.add_to(app);
  add_number(app, "--seed", flags->request.seed, "Seed of the initial weights and the data order");
  add_number(app, "--val-fraction", flags->request.validation_fraction,
             "Fraction of the data held out for validation, at its end");
  add_number(app, "--eval-every", flags->request.eval_every, "Steps between validations; 0: at the end only");
  add_number(app, "--eval-samples", flags->request.eval_samples, "Sequences per validation; 0: none");
  heading(app, "Checkpoints");
  add_number(app, "--save-every", flags->request.save_every, "Steps between checkpoints; 0: at the end only");
  app.add_option("--async-save", flags->async_save, "Write checkpoints while the training goes on")
      ->type_name("on|off")
      ->capture_default_str();
  add_number(app, "--keep", flags->request.keep, "How many checkpoints to keep, the last ones; 0: all");
  flags->run.add_to(app);
  app.add_option("--cuda-graphs", flags->cuda_graphs,
                 "Replay the passes of one rank on a device as CUDA graphs (docs/devices.md)")
      ->type_name("on|off")
      ->capture_default_str();
  flags->job.add_to(app);
  app.add_option(
         "--memory-limit", flags->memory_limit,
         "Most that a rank may hold, such as 800MiB: refused where more is predicted, ended where more "
         "is asked for")
      ->type_name("BYTES");
  app.add_option(
         "--machine", flags->machine,
         "File from `echelon calibrate` to predict the step time from (default: the step's parts, timed "
         "before the run)")
      ->type_name("FILE");
  app.add_option("--on-nan", flags->on_nan,
                 "What to do on a loss or gradient that is not finite: end the run, or skip the step")
      ->type_name("stop|skip")
      ->capture_default_str();
  flags->request.straggler_every = 100;
  add_number(app, "--straggler-every", flags->request.straggler_every,
             "Steps between reports of how long each rank worked; 0: none");
  heading(app, "Silent corruption");
  add_number(app, "--check-replicas", flags->request.check_every,
             "Steps between checks that ranks have the bits they should have; 0: none");
  app.add_option(
         "--rerun", flags->request.rerun,
         "Of these steps, how many at their end are run a second time, to be compared with themselves "
         "(default: all)")
      ->type_name("K");
  heading(app, "Asynchronous training");
  app.add_option("--staleness", flags->staleness,
                 "Train around parameter servers: batches a worker may run ahead; 0: synchronous")
      ->type_name("S|inf");
  add_number(app, "--servers", flags->servers, "Parameter servers, beside the --dp workers");
  heading(app, "Reports");
  flags->timeline.add_to(app);
  add_number(app, "--fingerprint", flags->request.fingerprint_every,
             "Steps between fingerprints of the weights, the same on every mesh; 0: none");
  app.add_option("--report", flags->report,
                 "A page on the run: losses, speed, memory, experts, ranks, checkpoints, predicted beside "
                 "measured")
      ->type_name("FILE.html");
  app.add_option("--log", flags->request.log_paths,
                 "Logs of every step: JSON lines; CSV where the name ends in .csv; for TensorBoard where it "
                 "is a directory or ends in /")
      ->type_name("FILE|DIR/");
  heading(app, "Terminal");
  flags->colour.add_to(app);
  heading(app, "Fault injection");
  app.add_option("--straggle", flags->straggle, "Make rank R slow: its passes take F times as long")
      ->type_name("R:F");
  app.add_option("--plant-expert", flags->plant_expert,
                 "Make expert E popular: its logits start higher by S for every token")
      ->type_name("E:S");
  app.add_option(
         "--flip", flags->flip,
         "Change one bit in rank R at step S: of its weights, moments, gradients, activations or messages")
      ->type_name("R:S:BIT[:WHERE]");
  app.add_option("--die", flags->die)->group("");  // for tests: RANK:STEP:WHERE
}

void add_train(CLI::App& program, int& status) {
  auto flags = std::make_shared<TrainFlags>();
  CLI::App& app = *program.add_subcommand("train", "Train a model");
  add_train_flags(app, flags);
  app.callback([flags, &status] {
    if (flags->dry_run) {
      status = run_dry(*flags);
      return;
    }
    flags->timeline.check();
    flags->colour.check();
    if (!flags->report.empty()) check_output("--report", flags->report);
    check_kind("--report", flags->report, {"a page", ".html"});
    StopSignals signals;  // before MPI's threads
    status = flags->job.run(flags->run, [&] { return run_train(*flags, signals); });
  });
}

}  // namespace echelon
