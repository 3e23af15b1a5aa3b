#include "apps/flags.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "apps/flag_needs.h"
#include "apps/help.h"
#include "base/error.h"
#include "base/open_file.h"
#include "base/units.h"
#include "schedule/pipeline_layout.h"
#include "schedule/schedules.h"

namespace echelon {

void PlanFlags::add_to(CLI::App& app, const Plan& defaults) {
  app_ = &app;
  defaults_ = defaults;
  dp_ = defaults.mesh.size(Axis::dp);
  tp_ = defaults.mesh.size(Axis::tp);
  global_batch_ = defaults.global_batch;
  micro_batch_ = defaults.micro_batch;
  seq_len_ = defaults.seq_len;
  heading(app, common_flags);
  app.add_option("--model", model_, "Preset, Hugging Face directory, or TOML file")
      ->type_name("NAME|DIR|FILE")
      ->default_str(defaults.model.name);
  app.add_option("--plan", plan_file_,
                 "TOML file with model, mesh and batch; flags on the command line override it")
      ->type_name("FILE");
  add_number(app, "--dp", dp_, "Data-parallel ranks");
  add_number(app, "--tp", tp_, "Tensor-parallel ranks");
  add_number(app, "--pp", pp_, "Pipeline-parallel ranks");
  add_number(app, "--global-batch", global_batch_, "Sequences per step, over all ranks");
  add_number(app, "--micro-batch", micro_batch_, "Sequences that a rank computes at once");
  add_number(app, "--seq-len", seq_len_, "Tokens in a sequence");
  heading(app, "Pipeline");
  app.add_option("--schedule", schedule_,
                 "Published schedule (" + fmt::format("{}", fmt::join(schedule_names(), ", ")) +
                     ") or a file with your own")
      ->type_name("NAME|FILE")
      ->default_str(defaults.schedule);
  add_number(app, "--chunks", chunks_, "Model chunks per pipeline rank, for interleaved");
  app.add_option("--layers-per-stage", layers_per_stage_,
                 "Layers of each stage, or auto: balanced by cost (default: as even as can be)")
      ->type_name("N,N,...|auto");
  app.add_option("--optimizer-barrier", optimizer_barrier_,
                 "off: the optimizer steps before all pipeline ranks are known to agree, and takes back what "
                 "was wrong")
      ->type_name("on|off")
      ->default_str("on");
  heading(app, "Sharded data parallelism");
  add_number(app, "--zero", zero_,
             "What the data-parallel ranks share out: 1 optimizer state, 2 gradients too, 3 parameters too");
  add_number(app, "--hsdp", hsdp_, "Replicas of the groups that --zero shards over");
  add_number(app, "--zero-prefetch", zero_prefetch_, "Layers that --zero 3 gathers ahead of their use");
  app.add_option("--bucket", bucket_, "Smallest amount of gradients reduced together, where --zero is 0")
      ->type_name("BYTES")
      ->default_str("25MiB");
  app.add_option("--compress", compress_,
                 "Gradients on their way between data-parallel ranks (docs/compression.md): fewer bits, the "
                 "fraction R of largest elements, or factors of rank R after W plain steps")
      ->type_name("none|bf16|fp16|int8|topk:R|powersgd:R[:W]")
      ->default_str("none");
  app.add_option("--offload", offload_, "What to keep in a file mapped into memory")
      ->type_name("none|optimizer")
      ->default_str("none");
  app.add_option("--offload-dir", offload_dir_,
                 "Directory of that file (default: the system's temporary directory)")
      ->type_name("DIR");
  heading(app, "Sequence and context parallelism");
  app.add_option("--sp", sp_, "Sequence parallelism (default: on where tp > 1)")->type_name("on|off");
  add_number(app, "--cp", cp_, "Context-parallel ranks: each holds a part of every sequence");
  app.add_option("--cp-kind", cp_kind_, "How attention reaches the keys of the other parts (docs/context.md)")
      ->type_name("ring|ulysses|allgather|hybrid")
      ->default_str(context_kind_name(defaults.context_kind));
  app.add_option("--cp-balance", cp_balance_, "Which positions a rank of the ring holds")
      ->type_name("zigzag|stripe|none")
      ->default_str(context_balance_name(defaults.context_balance));
  add_number(app, "--cp-ulysses", cp_ulysses_,
             "Ranks in a group that exchanges heads, with --cp-kind hybrid");
  app.add_option("--mask", mask_, "What a token attends to: all before it, or those of its own document")
      ->type_name("causal|document")
      ->default_str(attention_mask_name(defaults.mask));
  add_number(app, "--document-end", document_end_,
             "Token that ends a document (default: the last one of the bytes' and GPT-2's vocabularies)");
  heading(app, "Mixture of experts");
  add_number(app, "--ep", ep_, "Ranks that routed experts are spread over, laid over dp x cp");
  add_number(app, "--aux-loss", aux_loss_, "Coefficient of the experts' balance loss (docs/experts.md)");
  add_number(app, "--device-loss", device_loss_, "Coefficient of the balance loss over groups of experts");
  add_number(app, "--communication-loss", communication_loss_,
             "Coefficient of the balance loss of what is sent to the groups");
  add_number(app, "--z-loss", z_loss_, "Coefficient of the loss of large router logits");
  add_number(app, "--bias-rate", bias_rate_,
             "Loss-free balancing: how far a step moves the bias of each expert against its load");
  app.add_option("--balance-scope", balance_scope_, "Tokens over which balance losses and capacities count")
      ->type_name("sequence|microbatch|batch")
      ->default_str(balance_scope_name(defaults.balancing.scope));
  add_number(app, "--capacity", capacity_,
             "Most tokens an expert takes, as a multiple of the even load; 0: nothing is dropped");
  app.add_option("--drop", drop_, "Which tokens an expert keeps at its capacity: the likeliest, or the first")
      ->type_name("probability|position")
      ->default_str(drop_policy_name(defaults.balancing.drop));
  heading(app, "Precision and memory");
  app.add_option("--dtype", dtype_, "f64 runs on the slow reference kernels")
      ->type_name("f32|f64")
      ->default_str(dtype_name(defaults.dtype));
  app.add_option("--recompute", recompute_, "What the backward pass computes again instead of keeping it")
      ->type_name("none|selective|full")
      ->default_str("none");
  const auto hidden = [](CLI::Option* option) { option->group(""); };
  later_ = {{"--device", "cpu", ""}};
  std::string names;
  for (Later& flag : later_) {
    hidden(app.add_option(flag.name, flag.value));
    names += fmt::format("{}{}", names.empty() ? "" : " ", flag.name);
  }
  app.footer("Not built yet: " + names);
}

static std::vector<std::int64_t> parse_list(const std::string& flag, const std::string& text) {
  std::vector<std::int64_t> numbers;
  std::istringstream in(text + ",");
  for (std::string number; std::getline(in, number, ',');)
    numbers.push_back(parse_number<std::int64_t>(flag, number));
  return numbers;
}

static void set_layers_per_stage(Plan& plan, const std::string& text) {
  plan.balance_layers = text == "auto";
  plan.layers_per_stage.clear();
  if (!plan.balance_layers) plan.layers_per_stage = parse_list("--layers-per-stage", text);
}

static std::vector<Remedy> sizes(Axis axis) {
  std::vector<Remedy> all;
  for (int size : {2, 3, 4, 6, 8}) all.push_back(remedy(axis, size));
  return all;
}

// What each flag of a plan needs beside it.
static std::vector<FlagNeed> plan_needs(const Plan& p) {
  const int pp = p.mesh.size(Axis::pp), tp = p.mesh.size(Axis::tp), cp = p.mesh.size(Axis::cp);
  const int state_ranks = p.mesh.dp_cp_size();
  const std::string schedule = fmt::format("with --schedule {}", p.schedule),
                    zero = fmt::format("with --zero {}", p.zero), alone = "with --dp 1 and --cp 1";
  const bool cuts = p.zero >= 1 && p.zero <= 3;
  const bool is_hybrid = p.context_kind == ContextKind::hybrid;
  const Remedy zero_0 = remedy("--zero", &Plan::zero, 0), zero_3 = remedy("--zero", &Plan::zero, 3),
               ring{"--cp-kind", "ring", [](Plan&o) { o.context_kind = ContextKind::ring; }},
               hybrid{"--cp-kind", "hybrid", [](Plan&o) { o.context_kind = ContextKind::hybrid; }},
               interleaved{"--schedule", "interleaved",
                           [](Plan&o) { o.schedule = "interleaved", o.schedule_text = ""; }},
               document{"--mask", "document", [](Plan&o) { o.mask = AttentionMask::document; }},
               offload{"--offload", "optimizer", [](Plan&o) { o.offload = Offload::optimizer; }},
               capacity{"--capacity", "1.25", [](Plan&o) { o.balancing.capacity = 1.25; }},
               aux_loss{"--aux-loss", "0.01", [](Plan&o) { o.balancing.expert_loss = 0.01; }};
  const bool has_experts = p.model.experts != Experts::none;
  const std::string expertless = fmt::format("with {}, which has no experts", p.model.name);
  const bool is_interleaved = p.schedule_text.empty() && p.schedule.starts_with("interleaved");
  return {
      {"--schedule", pp != 1, "with --pp 1", sizes(Axis::pp)},
      {"--layers-per-stage", pp != 1, "with --pp 1", sizes(Axis::pp)},
      {"--chunks", pp != 1 || p.chunks == 0, "with --pp 1", sizes(Axis::pp)},
      {"--chunks", is_interleaved || p.chunks == 0, schedule, {interleaved}},
      {"--optimizer-barrier", pp != 1 || p.optimizer_barrier, "with --pp 1", sizes(Axis::pp)},
      {"--sp", tp != 1 || !p.sequence_parallel, "with --tp 1", sizes(Axis::tp)},
      {"--cp-kind", cp != 1, "with --cp 1", sizes(Axis::cp)},
      {"--cp-balance", cp != 1, "with --cp 1", sizes(Axis::cp)},
      {"--cp-balance", p.context_kind != ContextKind::ulysses, "with --cp-kind ulysses", {ring}},
      {"--cp-balance",
       !is_hybrid || p.ulysses != cp,
       fmt::format("with --cp-ulysses {} of --cp {}", p.ulysses, cp),
       {remedy("--cp-ulysses", &Plan::ulysses, 1)}},
      {"--cp-ulysses", cp != 1, "with --cp 1", sizes(Axis::cp)},
      {"--cp-ulysses",
       is_hybrid,
       fmt::format("with --cp-kind {}", context_kind_name(p.context_kind)),
       {hybrid}},
      {"--document-end", p.mask == AttentionMask::document, "with --mask causal", {document}},
      {"--drop", has_experts, expertless, {}},
      {"--balance-scope", has_experts, expertless, {}},
      {"--drop", p.balancing.capacity != 0, "with --capacity 0", {capacity}},
      {"--balance-scope",
       p.balancing.has_counts() || p.balancing.capacity != 0,
       "without --aux-loss, --device-loss, --communication-loss or --capacity",
       {aux_loss}},
      {"--zero", !cuts || state_ranks != 1, alone, sizes(Axis::dp)},
      {"--zero",
       !cuts || p.hsdp != state_ranks,
       fmt::format("with --hsdp {} of {} ranks", p.hsdp, state_ranks),
       {remedy("--hsdp", &Plan::hsdp, 1)}},
      {"--zero-prefetch", p.zero == 3, zero, {zero_3}},
      {"--zero-prefetch", state_ranks != 1, alone, sizes(Axis::dp)},
      {"--zero-prefetch",
       p.hsdp != state_ranks,
       fmt::format("with --hsdp {} of {} ranks", p.hsdp, state_ranks),
       {remedy("--hsdp", &Plan::hsdp, 1)}},
      {"--bucket", p.zero == 0, zero, {zero_0}},
      {"--bucket", state_ranks != 1, alone, sizes(Axis::dp)},
      {"--compress", p.compression.kind == CompressionKind::none || state_ranks != 1, alone, sizes(Axis::dp)},
      {"--offload-dir", p.offload != Offload::none, "with --offload none", {offload}},
      {"--collectives", p.mesh.num_ranks() != 1, "with one rank", sizes(Axis::dp)},
  };
}

bool PlanFlags::gives_mesh() const {
  for (const char* name : {"--dp", "--tp", "--pp", "--cp", "--ep", "--plan"})
    if (app_->get_option(name)->count() > 0) return true;
  return false;
}

Plan PlanFlags::plan() const {
  const auto is_given = [&](const char* name) { return app_->get_option(name)->count() > 0; };
  Plan plan = defaults_;
  plan.sequence_parallel = true;  // where tp > 1
  const bool has_file = is_given("--plan");
  if (has_file) plan = plan_from_toml(read_text(plan_file_, "--plan"), "--plan " + plan_file_);
  if (is_given("--model")) {
    plan.model = load_model(model_);
    if (!has_file) plan.seq_len = std::min(plan.seq_len, plan.model.max_seq);
  }
  if (is_given("--dp")) plan.mesh.set(Axis::dp, dp_);
  if (is_given("--tp")) plan.mesh.set(Axis::tp, tp_);
  if (is_given("--pp")) plan.mesh.set(Axis::pp, pp_);
  if (is_given("--zero")) plan.zero = zero_;
  if (is_given("--hsdp")) plan.hsdp = hsdp_;
  if (is_given("--zero-prefetch")) plan.zero_prefetch = zero_prefetch_;
  if (is_given("--bucket")) plan.bucket_bytes = parse_bytes(bucket_, "--bucket");
  if (is_given("--compress")) plan.compression = parse_compression(compress_, "--compress");
  if (is_given("--offload")) plan.offload = parse_offload(offload_, "--offload");
  if (is_given("--offload-dir")) plan.offload_directory = offload_dir_;
  if (is_given("--aux-loss")) plan.balancing.expert_loss = aux_loss_;
  if (is_given("--device-loss")) plan.balancing.device_loss = device_loss_;
  if (is_given("--communication-loss")) plan.balancing.communication_loss = communication_loss_;
  if (is_given("--z-loss")) plan.balancing.z_loss = z_loss_;
  if (is_given("--bias-rate")) plan.balancing.bias_rate = bias_rate_;
  if (is_given("--balance-scope"))
    plan.balancing.scope = parse_balance_scope(balance_scope_, "--balance-scope");
  if (is_given("--capacity")) plan.balancing.capacity = capacity_;
  if (is_given("--drop")) plan.balancing.drop = parse_drop_policy(drop_, "--drop");
  if (is_given("--recompute")) plan.recompute = parse_recompute(recompute_, "--recompute");
  if (is_given("--schedule")) {
    plan.schedule = schedule_;
    const auto& names = schedule_names();
    const bool named = std::find(names.begin(), names.end(), schedule_) != names.end();
    std::error_code none;
    plan.schedule_text =
        !named && std::filesystem::exists(schedule_, none) ? read_text(schedule_, "--schedule") : "";
  }
  if (is_given("--chunks")) plan.chunks = chunks_;
  if (is_given("--layers-per-stage")) set_layers_per_stage(plan, layers_per_stage_);
  if (is_given("--optimizer-barrier")) {
    if (optimizer_barrier_ != "on" && optimizer_barrier_ != "off")
      refuse("--optimizer-barrier {}: legal: on, off", optimizer_barrier_);
    plan.optimizer_barrier = optimizer_barrier_ == "on";
  }
  if (is_given("--cp")) plan.mesh.set(Axis::cp, cp_);
  if (is_given("--cp-kind")) plan.context_kind = parse_context_kind(cp_kind_, "--cp-kind");
  if (is_given("--cp-balance")) plan.context_balance = parse_context_balance(cp_balance_, "--cp-balance");
  if (is_given("--cp-ulysses")) plan.ulysses = cp_ulysses_;
  if (is_given("--mask")) plan.mask = parse_attention_mask(mask_, "--mask");
  if (is_given("--document-end")) plan.document_end = document_end_;
  if (ep_) plan.mesh.ep = *ep_;
  if (is_given("--sp")) {
    if (sp_ != "on" && sp_ != "off") refuse("--sp {}: legal: on, off", sp_);
    plan.sequence_parallel = sp_ == "on";
  }
  if (is_given("--global-batch")) plan.global_batch = global_batch_;
  if (is_given("--micro-batch")) plan.micro_batch = micro_batch_;
  if (is_given("--seq-len")) plan.seq_len = seq_len_;
  if (is_given("--dtype")) plan.dtype = parse_dtype(dtype_, "--dtype");
  for (const Later& flag : later_) {
    if (!is_given(flag.name) || (flag.legal != nullptr && flag.value == flag.legal)) continue;
    if (flag.legal == nullptr) refuse("{} {}: not built yet; leave it out", flag.name, flag.value);
    refuse("{} {}: not built yet; legal: {}", flag.name, flag.value, flag.legal);
  }
  check_with_remedies(plan, [this](const Plan& asked, const std::string& also_given) {
    validate(asked.mesh);
    refuse_idle(*app_, plan_needs(asked), also_given);
    validate(asked);
    const PipelineLayout checked(asked);
  });
  return plan;
}

void OptimizerFlags::add_to(CLI::App& app, OptimizerOptions& options) {
  options_ = &options;
  heading(app, common_flags);
  add_number(app, "--lr", options.lr, "Learning rate after warm-up");
  heading(app, "Optimizer");
  add_number(app, "--min-lr", min_lr_, "Learning rate at the end of the cosine (default: a tenth of --lr)");
  add_number(app, "--warmup", options.warmup_steps, "Steps of linear warm-up");
  add_number(app, "--weight-decay", options.weight_decay,
             "Decoupled weight decay; norms and biases have none");
  add_number(
      app, "--clip", clip_,
      fmt::format("Largest global gradient norm; 0: none (default: {}; 0 where the schedule does not flush)",
                  options.clip));
}

void OptimizerFlags::finish(std::int64_t steps, const Plan& plan) {
  options_->clip = clip_.value_or(flushes(plan) ? options_->clip : 0);
  options_->total_steps = steps;
  options_->min_lr = min_lr_.value_or(options_->lr / 10);
}

void RunFlags::add_threads_to(CLI::App& app) {
  add_number(app, "--threads", threads_, "Compute threads per rank (default: the cores shared out)");
}

void RunFlags::add_to(CLI::App& app) {
  heading(app, "Running");
  add_threads_to(app);
  app.add_option("--collectives", collectives_,
                 "Directly on shared memory, or by an algorithm over messages (docs/collectives.md)")
      ->type_name("direct|ring|halving-doubling|auto")
      ->capture_default_str();
  add_number(app, "--timeout", timeout_seconds_, "Seconds a rank waits for another before the job fails");
}

std::chrono::milliseconds RunFlags::timeout() const {
  if (!(timeout_seconds_ >= 0.001) || timeout_seconds_ > 1e6)
    refuse("--timeout {}: must be from 0.001 to 1000000 seconds", timeout_seconds_);
  return std::chrono::milliseconds(static_cast<std::int64_t>(timeout_seconds_ * 1000));
}

RanksHere ranks_here(const Plan& plan, const ProcessWorld* processes) {
  if (processes != nullptr) return {processes->ranks_on_this_node(), machine_cores()};
  return {plan.mesh.num_ranks(), available_cores()};
}

RunOptions RunFlags::options(const Plan& plan, const ProcessWorld* processes) const {
  constexpr int most_ranks = 1024, most_threads = 4096;  // of one process
  RunOptions run;
  const auto [ranks, cores] = ranks_here(plan, processes);
  if (ranks > most_ranks)
    refuse(
        "--dp {} x --tp {} x --pp {} x --cp {}: {} ranks are as many threads of one process; legal: up to {}",
        plan.mesh.size(Axis::dp), plan.mesh.size(Axis::tp), plan.mesh.size(Axis::pp),
        plan.mesh.size(Axis::cp), ranks, most_ranks);
  if (threads_ && (*threads_ < 1 || *threads_ > most_threads / ranks))
    refuse("--threads {}: must be from 1 to {}", *threads_, most_threads / ranks);
  run.collectives = parse_collectives(collectives_, "--collectives");
  run.threads_per_rank = threads_.value_or(std::max(1, cores / ranks));
  run.timeout = timeout();
  return run;
}

}  // namespace echelon
