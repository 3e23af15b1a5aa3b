#include "train/refuse_request.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <map>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "base/units.h"
#include "checkpoint/router_biases.h"
#include "model/offloaded_moments.h"
#include "spec/fp8.h"
#include "spec/plan_fields.h"
#include "spec/tf32.h"
#include "tensor/reduce_element.h"
#include "train/dry_job.h"

namespace echelon {
namespace {

namespace fs = std::filesystem;

void refuse_straggler(const TrainRequest& request) {
  if (!request.straggler) return;
  const int ranks = request.plan.mesh.num_ranks();
  const auto& [rank, factor] = *request.straggler;
  if (rank < 0 || rank >= ranks)
    refuse("--straggle {}:{}: rank {} is none of 0 to {}", rank, factor, rank, ranks - 1);
  if (!(factor >= 1 && factor <= 1000))
    refuse("--straggle {}:{}: the factor must be from 1 to 1000", rank, factor);
}

void refuse_planted_expert(const TrainRequest& request) {
  if (!request.planted_expert) return;
  const ModelSpec& model = request.plan.model;
  const auto& [expert, strength] = *request.planted_expert;
  if (model.experts == Experts::none)
    refuse("--plant-expert {}:{}: {} has no experts; legal: a model that has some, or no --plant-expert",
           expert, strength, model.name);
  if (expert < 0 || expert >= model.num_experts)
    refuse("--plant-expert {}:{}: expert {} is none of 0 to {}", expert, strength, expert,
           model.num_experts - 1);
  if (!(strength > 0 && strength <= 1000))
    refuse("--plant-expert {}:{}: the strength must be above 0 and at most 1000", expert, strength);
  if (request.asynchronous)
    refuse("--plant-expert {}:{}: parameter servers make the initial weights; legal: without --staleness",
           expert, strength);
}

void refuse_skipping(const TrainRequest& request, const PipelineLayout& pipeline) {
  if (!request.skip_nonfinite) return;
  if (!pipeline.programs(0).flushes() || !request.plan.optimizer_barrier || request.asynchronous)
    refuse(
        "--on-nan skip: ranks have stepped on before all of them know that a gradient is not finite; legal: "
        "stop");
  if (has_residuals(request.plan.compression.kind))
    refuse("--on-nan skip: --compress {} would carry what is not finite on; legal: stop",
           compression_text(request.plan.compression));
}

void refuse_processes(const TrainRequest& request) {
  if (request.run.processes == nullptr) return;
  const int ranks = request.plan.mesh.num_ranks(), started = request.run.processes->num_ranks();
  if (request.asynchronous)
    refuse("--comm mpi: parameter servers run beside the mesh as threads; with --staleness legal: threads");
  if (ranks != started)
    refuse("--comm mpi: the mesh {} needs a process for each rank, and {} {} started",
           request.plan.mesh.describe(), started, started == 1 ? "was" : "were");
}

void refuse_asynchronous(const TrainRequest& request) {
  if (!request.asynchronous) return;
  refuse_asynchronous(request.plan, *request.asynchronous);
  for (const auto& [flag, every] :
       {std::pair{"--eval-every", request.eval_every}, {"--save-every", request.save_every}})
    if (every != 0)
      refuse(
          "{} {}: with --staleness there is no moment at which all workers have the same values but the end; "
          "legal: 0",
          flag, every);
}

void refuse_checking(const TrainRequest& request, const PipelineLayout& pipeline) {
  const std::string asked = request.check_every > 0 ? fmt::format("--check-replicas {}", request.check_every)
                                                    : std::string("--flip");
  if (request.check_every == 0 && !request.flip) return;
  if (request.rerun > request.check_every)
    refuse("--rerun {}: of {} steps; legal: 0 to {}", request.rerun, asked, request.check_every);
  if (request.asynchronous)
    refuse("{}: workers around parameter servers take other batches each time; legal: without --staleness",
           asked);
  if (request.run.collectives != Collectives::direct)
    refuse("{}: sums that travel in parts have no sender; with --collectives {} legal: --collectives direct",
           asked, collectives_name(request.run.collectives));
  refuse_running_again(request.plan, pipeline, request.run.device(), asked);
}

void refuse_flip(const TrainRequest& request) {
  if (!request.flip) return;
  const PlantedFlip& flip = *request.flip;
  const int ranks = request.plan.mesh.num_ranks();
  const std::string asked = text_of(flip);
  if (flip.rank < 0 || flip.rank >= ranks)
    refuse("{}: rank {} is none of 0 to {}", asked, flip.rank, ranks - 1);
  if (flip.step < 1 || flip.step > request.optimizer.total_steps)
    refuse("{}: step {} is none of 1 to {}", asked, flip.step, request.optimizer.total_steps);
  if (flip.where == FlipWhere::activations && request.plan.offloads_activations())
    refuse(
        "{}: what layers keep is not in the rank's memory behind the forward pass; legal: --offload none, or "
        "weights, moments, gradients{}",
        asked, ranks > 1 ? ", messages" : "");
  if (flip.where == FlipWhere::messages && ranks == 1)
    refuse("{}: one rank sends no messages; legal: {}, or more ranks", asked,
           "weights, moments, gradients, activations");
}

// What would stop the run when it saves: found before it starts.
void refuse_obstacles(const TrainRequest& request) {
  const std::string& directory = request.checkpoint_directory;
  const std::int64_t last = request.optimizer.total_steps;
  for (const std::string& path : named_as_checkpoints(directory))
    if (checkpoint_step(path).value() <= last)
      refuse("--checkpoint {}: {} is in the way, and is not a whole checkpoint; remove it", directory,
             fs::path(path).filename().string());
}

}  // namespace

// Sums of several devices are kernels that read all of them.
static void refuse_devices_apart(const Plan& plan, const RunOptions& run) {
  if (run.processes != nullptr) return;  // each uses its own alone
  const std::vector<int> devices = run.own_devices(plan.mesh.num_ranks());
  for (const int device : devices)
    for (const int peer : devices)
      if (!run.driver->can_reach(device, peer))
        refuse(
            "--device cuda: device {} cannot reach the memory of device {}, where ranks are too; legal: "
            "devices that reach each other, named by CUDA_VISIBLE_DEVICES, or --collectives ring",
            device, peer);
}

// A sum of all ranks of a group is one kernel, whose arguments are where each one's part lies.
static void refuse_wide_sums(const Plan& plan, const RunOptions& run) {
  if (run.processes != nullptr) return;  // which sum on the host
  constexpr int most = ReductionOrder::most_sources;
  const auto refuse_wide = [&](const std::string& axes, int size) {
    if (size > most)
      refuse(
          "{}: with --device cuda and --collectives direct a sum is over at most {} ranks, and here over {}; "
          "legal: up to {}, --collectives ring, or a process for each rank",
          axes, most, size, most);
  };
  const Mesh& mesh = plan.mesh;
  refuse_wide(fmt::format("--tp {}", mesh.size(Axis::tp)), mesh.size(Axis::tp));
  if (plan.cuts_vocabulary())
    refuse_wide(fmt::format("--pp {} with --vocabulary-parallel", mesh.pp()), mesh.pp());
  const int dp = mesh.size(Axis::dp), cp = mesh.size(Axis::cp);
  refuse_wide(cp > 1 ? fmt::format("--dp {} x --cp {}", dp, cp) : fmt::format("--dp {}", dp),
              mesh.dp_cp_size());
}

// NCCL has one rank on a device, and groups sums as it likes.
static void refuse_nccl(const Plan& plan, const RunOptions& run) {
  const int ranks = plan.mesh.num_ranks();
  if (!run.driver)
    refuse(
        "--collectives nccl: moves what is on devices; legal with --device cpu: direct, ring, "
        "halving-doubling, auto");
  if (const std::string why = run.driver->no_collectives(); !why.empty())
    refuse("--collectives nccl: {}; legal: direct", why);
  if (run.most_ranks_on_a_device(ranks) > 1)
    refuse(
        "--collectives nccl: {} ranks share {}, and NCCL has one rank on each; legal: direct, or as many "
        "devices as ranks",
        ranks, counted(run.devices_in_use(ranks), "device"));
}

static void refuse_without_fp8(const Plan& plan, const RunOptions& run) {
  constexpr int needs_major = 8, needs_minor = 9;
  for (const int device : run.own_devices(plan.mesh.num_ranks()))
    if (const DeviceProperties p = run.driver->properties(device);
        std::pair(p.major, p.minor) < std::pair(needs_major, needs_minor))
      refuse(
          "--precision {}: device {} ({}) has compute capability {}.{}, and products of fp8 come with {}.{}; "
          "legal: bf16",
          fp8_name, device, p.name, p.major, p.minor, needs_major, needs_minor);
}

void refuse_on_kind(const Plan& plan, Device device) {
  if (device == Device::cpu && multiplies_in_tf32(plan.precision))
    refuse(
        "--precision {}: is what a device multiplies in; legal with --device cpu: f32, bf16, bf16-lean, fp8, "
        "f64",
        tf32_name);
  if (device == Device::cuda && !plan.offload_directory.empty())
    refuse(
        "--offload-dir {}: what a device offloads is in the host's memory, not in a file; legal with "
        "--device cuda: without it",
        plan.offload_directory);
}

void refuse_on_device(const Plan& plan, const RunOptions& run) {
  if (run.threads_per_rank < 1) refuse("--threads {}: must be at least 1", run.threads_per_rank);
  if (plan.numerics == Numerics::invariant && run.collectives != Collectives::direct)
    refuse(
        "--collectives {}: groups sums in an order of its own, and --numerics invariant in one that no mesh "
        "changes; legal: direct",
        collectives_name(run.collectives));
  if (run.collectives == Collectives::nccl) refuse_nccl(plan, run);
  refuse_on_kind(plan, run.device());
  if (!run.driver) return;
  for (const int device : run.own_devices(plan.mesh.num_ranks()))
    if (const std::string why = no_kernels(*run.driver, device); !why.empty())
      refuse("--device cuda: {}; legal: cpu, or devices that it has, named by CUDA_VISIBLE_DEVICES", why);
  if (multiplies_in_fp8(plan.precision)) refuse_without_fp8(plan, run);
  if (run.collectives == Collectives::direct) {
    refuse_wide_sums(plan, run);
    refuse_devices_apart(plan, run);
  }
}

void refuse_running_again(const Plan& plan, const PipelineLayout& pipeline, Device device,
                          const std::string& asked) {
  if (!pipeline.programs(0).flushes())
    refuse(
        "{}: {} begins a step before the one before has ended, and none of them can be run again; legal: a "
        "schedule that flushes, as 1f1b or zb-h1",
        asked, plan.schedule);
  if (!plan.optimizer_barrier)
    refuse("{}: --optimizer-barrier off begins a step before the one before has ended; legal: on", asked);
  if (device != Device::cpu)
    refuse("{}: fingerprints are taken in the host's memory; legal: --device cpu", asked);
  if (plan.offloads_optimizer())
    refuse(
        "{}: the copy that steps are run again from would be in the memory that --offload {} saves; legal: "
        "none, activations",
        asked, name_of(plan.offload));
}

// A graph is of passes that the host reads nothing of, and nobody else is in.
void refuse_graphs(const Plan& plan, Device device) {
  const auto refused = [](const std::string& why, const std::string& legal) {
    refuse("--cuda-graphs on: {}; legal: {}, or --cuda-graphs off", why, legal);
  };
  if (device != Device::cuda)
    refused("a graph is launched on a device, and --device cpu has none", "--device cuda");
  if (const int ranks = plan.mesh.num_ranks(); ranks > 1)
    refused(fmt::format("the passes of {} ranks hold messages and sums of each other", ranks), "one rank");
  if (plan.model.experts != Experts::none)
    refused(fmt::format("the host reads how many tokens each expert of {} got", plan.model.name),
            "a dense model");
  if (plan.numerics == Numerics::invariant)
    refused("under --numerics invariant each microbatch's sums have a place of their own",
            "--numerics ordinary");
  if (plan.offloads_activations())
    refused("with --offload activations the passes wait for copies on other streams",
            "--offload none or optimizer");
}

DryRunOptions dry_run_options(const TrainRequest& request) {
  return {.keeps_copy = request.check_every > 0,  // to run steps again from
          .is_worker = request.asynchronous.has_value(),
          .graphs = request.run.cuda_graphs,
          .device = request.run.device()};
}

std::int64_t scratch_bytes(const Plan& plan, const RunOptions& run) {
  if (!run.driver) return kernel_scratch_bytes(plan.precision, run.threads_per_rank);
  return run.driver->workspace_bytes(plan.numerics) +
         (plan.offloads_optimizer() ? OffloadedMoments::window_bytes(plan.precision.moments) : 0);
}

void refuse_impossible(const TrainRequest& request, const PipelineLayout& pipeline) {
  const Plan& plan = request.plan;
  if (request.optimizer.total_steps < 1)
    refuse("--steps {}: must be at least 1", request.optimizer.total_steps);
  validate(request.optimizer);
  refuse_clipping(request.optimizer, pipeline);
  if (request.resume && request.checkpoint_directory.empty())
    refuse("--resume: needs --checkpoint DIR, the directory to continue from");
  if (request.resume && request.from)
    refuse(
        "--from {}: a run that goes on (--resume) has the weights of its checkpoint; legal: one of the two",
        request.from->path());
  if (request.asynchronous && request.from && request.from->have_router_biases())
    refuse(
        "--from {}: its routers choose by biases, which parameter servers do not hold; legal: without "
        "--staleness",
        request.from->path());
  if (request.resume) refuse_absent(request.checkpoint_directory, "--checkpoint");
  if (is_checkpoint(request.checkpoint_directory))
    refuse("--checkpoint {}: is one checkpoint itself; name the directory above it",
           request.checkpoint_directory);
  refuse_asynchronous(request);
  refuse_on_device(plan, request.run);
  if (request.run.driver && request.asynchronous)
    refuse("--device cuda: parameter servers are the host's (--staleness); legal: --device cpu");
  if (request.run.cuda_graphs) refuse_graphs(plan, request.run.device());
  refuse_straggler(request);
  refuse_planted_expert(request);
  refuse_processes(request);
  refuse_skipping(request, pipeline);
  refuse_checking(request, pipeline);
  refuse_flip(request);
  if (request.optimizer.warmup_steps > request.optimizer.total_steps)
    refuse("--warmup {}: more than the {} --steps", request.optimizer.warmup_steps,
           request.optimizer.total_steps);
  for (const auto& [flag, value] : {std::pair{"--eval-every", request.eval_every},
                                    {"--eval-samples", request.eval_samples},
                                    {"--save-every", request.save_every},
                                    {"--keep", request.keep},
                                    {"--straggler-every", request.straggler_every},
                                    {"--fingerprint", request.fingerprint_every},
                                    {"--check-replicas", request.check_every},
                                    {"--sample", request.sample_tokens}})
    if (value < 0) refuse("{} {}: must be at least 0", flag, value);
  if (request.sample_tokens > 0 && request.sample_tokens >= plan.model.max_seq)
    refuse("--sample {}: {} has positions for {}, and one is the prompt's", request.sample_tokens,
           plan.model.name, plan.model.max_seq);
}

Memory with_scratch(Memory memory, const TrainRequest& request) {
  memory[MemoryCategory::other] += scratch_bytes(request.plan, request.run);
  return memory;
}

// What each rank is going to hold: shards and batches differ by one.
static void refuse_beyond_limit(const TrainRequest& request, const PipelineLayout& pipeline) {
  const std::int64_t limit = request.run.memory_limit;
  if (limit <= 0) return;
  const auto bytes = [](std::int64_t count) { return format_bytes(static_cast<double>(count)); };
  DryRunOptions options = dry_run_options(request);
  options.text = request.sampled_text();
  const DryJob job = dry_job(request.plan, pipeline, {}, options);
  for (const RankClass& ranks : job.classes) {
    const Memory memory = with_scratch(ranks.run.peak, request);
    if (memory.total() > limit)
      refuse(
          "--memory-limit {}: rank {} needs {}, of which {} for activations; {}--recompute, or a shorter "
          "--seq-len need less",
          bytes(limit), ranks.first, bytes(memory.total()), bytes(memory[MemoryCategory::activations]),
          request.asynchronous ? "" : "more ranks of --cp, --tp, --pp or --zero, ");
    if (const Memory of_text = with_scratch(ranks.run.of_text, request); of_text.total() > limit)
      refuse(
          "--memory-limit {}: rank {} needs {} to make the text of --sample {}; a smaller one, or 0, needs "
          "less",
          bytes(limit), ranks.first, bytes(of_text.total()), request.sample_tokens);
  }
  for (int server = 0; request.asynchronous && server < request.asynchronous->servers; ++server)
    if (const Memory memory = with_scratch(
            predict_server_memory(request.plan, pipeline, *request.asynchronous, server), request);
        memory.total() > limit)
      refuse("--memory-limit {}: server {} needs {}, of which {} for the optimizer; more --servers need less",
             bytes(limit), server, bytes(memory.total()), bytes(memory[MemoryCategory::optimizer]));
}

void refuse_what_machine_lacks(const TrainRequest& request, const PipelineLayout& pipeline) {
  const Plan& plan = request.plan;
  if (plan.offload != Offload::none && !request.run.driver) check_scratch_directory(plan.offload_directory);
  double bytes =
      request.run.ranks_here(plan.mesh.num_ranks()) * predicted_bytes(plan, dry_run_options(request));
  if (const auto& asynchronous = request.asynchronous)
    for (int server = 0; server < asynchronous->servers; ++server)
      bytes += static_cast<double>(predict_server_memory(plan, pipeline, *asynchronous, server).total());
  refuse_beyond_memory(plan, bytes, request.run);
  refuse_beyond_limit(request, pipeline);
}

// What it learned from is what it goes on with. Older checkpoints do not say.
static void refuse_other_data(const CheckpointInfo& resumed, const TokenData& data) {
  if (resumed.data.empty() || resumed.data == data.fingerprint()) return;
  refuse(
      "--data: is not what {} was trained on: its fingerprint is {}, and the checkpoint's {}; legal: the "
      "same files in the same order, or without --resume",
      resumed.path, data.fingerprint(), resumed.data);
}

void refuse_unknown_tokens(const TokenData& data, const ModelSpec& model) {
  if (data.vocab() > model.vocab)
    refuse("--data: was read for a vocabulary of {}, and that of {} is {}; legal: data read for this model",
           data.vocab(), model.name, model.vocab);
}

void refuse_different_data(ProcessWorld* processes, const TokenData& data) {
  if (processes == nullptr) return;
  const std::vector<std::string> all = processes->gather(data.fingerprint());
  std::map<std::string, std::vector<std::string>> readers;  // by what they read
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    readers[all[rank]].push_back(fmt::format("{} ({})", rank, processes->nodes()[rank]));
  if (readers.size() == 1) return;
  std::string others;
  for (const auto& [fingerprint, ranks] : readers)
    if (fingerprint != all.front())
      others += fmt::format("{}{} {}", others.empty() ? "" : ", ", ranks.size() == 1 ? "rank" : "ranks",
                            fmt::join(ranks, ", "));
  refuse(
      "--data: other files, or others of these names, are what {} read than rank 0 ({}); legal: the same on "
      "every host",
      others, processes->nodes().front());
}

static std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// A line for each.
static std::string settings_text(const Plan& plan, const OptimizerOptions& o, std::uint64_t seed,
                                 const std::vector<std::string>& more) {
  // In the order in which they are named: the length of warm-up may be that of the run.
  std::string text =
      fmt::format("--steps {}\n--lr {}\n--min-lr {}\n--warmup {}\n--weight-decay {}\n--clip {}\n--seed {}\n",
                  o.total_steps, o.lr, o.min_lr, o.warmup_steps, o.weight_decay, o.clip, seed);
  for (const PlanField& field : plan_fields())
    if (field.name() != "model" && field.name() != "offload-dir")  // which every host has its own name for
      text += fmt::format("{} {}\n", field.flag(), text_of(field, plan));
  for (const std::string& line : more) text += line + "\n";
  ModelSpec model = plan.model;
  model.name.clear();
  for (const std::string& line : lines_of(to_toml(model))) text += "a model with " + line + "\n";
  return text;
}

void refuse_different_settings(ProcessWorld* processes, const Plan& plan, const OptimizerOptions& optimizer,
                               std::uint64_t seed, const std::vector<std::string>& more) {
  if (processes == nullptr) return;
  const std::vector<std::string> all = processes->gather(settings_text(plan, optimizer, seed, more));
  const std::vector<std::string> first = lines_of(all.front());
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all.front()) continue;
    const std::vector<std::string> here = lines_of(all[rank]);
    const auto only_in = [](const std::vector<std::string>& a, const std::vector<std::string>& b) {
      const auto found = std::find_if(a.begin(), a.end(), [&](const std::string& line) {
        return std::find(b.begin(), b.end(), line) == b.end();
      });
      return found == a.end() ? "nothing of the kind" : *found;
    };
    refuse("{}: is what rank {} ({}) was given, and rank 0 ({}) {}; legal: the same on every rank",
           only_in(here, first), rank, processes->nodes()[rank], processes->nodes().front(),
           only_in(first, here));
  }
}

void refuse_different_kernels(const RunOptions& options, const Plan& plan) {
  ProcessWorld* const processes = options.processes;
  if (processes == nullptr || plan.numerics != Numerics::invariant || options.device() != Device::cpu) return;
  const std::vector<std::string> all = processes->gather(kernels_by(plan.precision));
  for (std::size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all.front())
      refuse(
          "--numerics invariant: rank {} ({}) computes by {}, rank 0 ({}) by {}, whose sums have other bits; "
          "legal: hosts with the same instruction sets (ECHELON_AMX=off leaves AMX unused), or --numerics "
          "ordinary",
          rank, processes->nodes()[rank], all[rank], processes->nodes().front(), all.front());
}

void refuse_other_model(const CheckpointInfo& resumed, const ModelSpec& model) {
  const ModelSpec& before = resumed.model;
  if (!(before.tuning.lora == model.tuning.lora))  // --from goes on with the adapters that it finds
    refuse("--lora {}: {} was trained with --lora {}; legal: {}", lora_text(model.tuning.lora), resumed.path,
           lora_text(before.tuning.lora),
           before.tuning.lora.rank > 0 ? "that, or leave it out" : "that, or --from instead of --resume");
  if (before.tuning.freeze != model.tuning.freeze)
    refuse(
        "--freeze {}: {} was trained with --freeze {}, and has no optimizer state of what that froze; legal: "
        "that, or --from instead of --resume",
        freeze_text(model.tuning), resumed.path, freeze_text(before.tuning));
  if (const auto others = differences(before, model); !others.empty()) {
    const bool more = others.front().field == "name" && others.size() > 1;  // which say more than that
    const auto& [field, there, here] = others[more ? 1 : 0];
    refuse(
        "--resume {}: it holds the model {}, not {}: {} = {}, not {}; legal: without --model, which takes it",
        resumed.path, before.name, model.name, field, there.empty() ? "nothing" : there,
        here.empty() ? "nothing" : here);
  }
}

CheckpointInfo find_resumed(const TrainRequest& request, const std::string& path, const TokenData& tokens) {
  const TokenData::Kind data = tokens.kind();
  CheckpointInfo info;
  if (request.resume) {
    info = read_checkpoint_info(path);
    refuse_other_model(info, request.plan.model);
    if (info.dtype != request.plan.precision.master) {
      std::vector<std::string> legal = recipe_names();
      std::erase_if(legal, [&](const std::string& name) { return recipe(name).master != info.dtype; });
      refuse(
          "--precision {}: its weights are in {}, and those of --resume {} in {}; legal: {}, or --from "
          "instead of --resume",
          request.plan.precision.name, dtype_name(request.plan.precision.master), info.path,
          dtype_name(info.dtype), fmt::join(legal, ", "));
    }
    if (info.optimizer != request.plan.optimizer)
      refuse("--optimizer {}: {} holds the moments of another one; legal: {}, or --from instead of --resume",
             name_of(request.plan.optimizer), info.path, name_of(info.optimizer));
    if (info.seed != request.seed)
      refuse(
          "--resume {}: it was trained with --seed {}, not {}: the order of the data would change; legal: "
          "--seed {}",
          info.path, info.seed, request.seed, info.seed);
    if (info.residual_ranks > 0 &&
        (!has_residuals(request.plan.compression.kind) || request.plan.mesh.dp_cp_size() == 1))
      refuse(
          "--resume {}: it holds what --compress {} has not sent yet of the gradients, and without "
          "compression between data-parallel ranks that would be lost; legal: --compress {} and --dp of at "
          "least 2",
          info.path, compression_text(info.compression), compression_text(info.compression));
    if (CheckpointReader reader(info.path); request.asynchronous && !read_router_biases(reader).empty())
      refuse(
          "--resume {}: its routers choose by biases, which parameter servers do not hold; legal: without "
          "--staleness",
          info.path);
    if (data == TokenData::Kind::text && !reads_bytes(info))
      refuse(
          "--data: text would be read as bytes, but {} was trained with another tokenizer; legal: "
          "--tokenizer with that one, or its token files",
          info.path);
    if (data == TokenData::Kind::tokens && info.trained_on == TokenData::Kind::text &&
        info.model.vocab != bytes_vocab)
      refuse("--data: {} has learned bytes, which the ids of token files are not; legal: text", info.path);
    refuse_other_data(info, tokens);
    if (info.step > request.optimizer.total_steps)
      refuse("--steps {}: {} has done {} already; give a larger number", request.optimizer.total_steps,
             info.path, counted(info.step, "step"));
  } else if (!request.checkpoint_directory.empty()) {
    const auto existing = list_checkpoints(request.checkpoint_directory);
    if (!existing.empty())
      refuse("--checkpoint {}: holds {} already; add --resume to continue from it, or name another directory",
             request.checkpoint_directory, fs::path(existing.back()).filename().string());
  }
  if (!request.checkpoint_directory.empty() && !request.resume) refuse_obstacles(request);
  return info;
}

}  // namespace echelon
