#include "apps/flags.h"

#include <fstream>
#include <sstream>

#include "base/error.h"

namespace echelon {

void PlanFlags::add_to(CLI::App& app) {
  app_ = &app;
  app.add_option("--plan", plan_file_, "TOML file with model, mesh and batch; flags on the line win");
  app.add_option("--model", model_, "Preset, Hugging Face directory, or TOML file");
  app.add_option("--dp", dp_, "Data-parallel ranks");
  app.add_option("--tp", tp_, "Tensor-parallel ranks");
  app.add_option("--sp", sp_, "Sequence parallelism: on or off (default: on where tp > 1)");
  app.add_option("--global-batch", global_batch_, "Sequences of one step, over all ranks");
  app.add_option("--micro-batch", micro_batch_, "Sequences computed at once by one rank");
  app.add_option("--seq-len", seq_len_, "Tokens of a sequence");
  app.add_option("--dtype", dtype_, "f32, or f64 (slow reference kernels)");
  // Axes and features that are named by the command line but not built yet: refused by name, not as unknown
  // flags.
  const auto later = app.add_option_group("not built yet");
  later->add_option("--pp", pp_, "Pipeline-parallel ranks");
  later->add_option("--cp", cp_, "Context-parallel ranks");
  later->add_option("--ep", ep_, "Expert-parallel ranks");
  later->add_option("--zero", zero_, "Shard the data-parallel state");
  later->add_option("--hsdp", hsdp_, "Replicas of the shard groups");
  later->add_option("--schedule", schedule_, "Pipeline schedule");
  later->add_option("--chunks", chunks_, "Model chunks of a pipeline rank");
  later->add_option("--layers-per-stage", layers_per_stage_, "Uneven split of the layers");
  later->add_option("--cp-kind", cp_kind_, "Kind of context parallelism");
  later->add_option("--cp-balance", cp_balance_, "Balance of context parallelism");
  later->add_option("--recompute", recompute_, "Recompute activations");
  later->add_option("--compress", compress_, "Compress gradients");
  later->add_option("--comm", comm_, "What moves the bytes: threads");
  later->add_option("--device", device_, "Where ranks compute: cpu");
}

static std::string read_file(const std::string& flag, const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  if (!in) refuse("{} {}: cannot be read", flag, path);
  return text.str();
}

static void not_built(bool asked, const char* flag, const std::string& value, const char* legal) {
  if (asked) refuse("{} {}: not built yet; legal: {}", flag, value, legal);
}

Plan PlanFlags::plan(const Plan& defaults) const {
  const auto is_given = [&](const char* name) { return app_->get_option(name)->count() > 0; };
  Plan plan = defaults;
  if (is_given("--plan")) plan = plan_from_toml(read_file("--plan", plan_file_), plan_file_);
  if (is_given("--model")) {
    plan.model = load_model(model_);
    plan.seq_len = std::min(plan.seq_len, plan.model.max_seq);
  }
  if (is_given("--dp")) plan.mesh.set(Axis::dp, dp_);
  if (is_given("--tp")) plan.mesh.set(Axis::tp, tp_);
  if (is_given("--pp")) plan.mesh.set(Axis::pp, pp_);
  if (is_given("--cp")) plan.mesh.set(Axis::cp, cp_);
  if (is_given("--ep")) plan.mesh.ep = ep_;
  if (is_given("--sp")) {
    if (sp_ != "on" && sp_ != "off") refuse("--sp {}: legal: on, off", sp_);
    plan.sequence_parallel = sp_ == "on";
  } else if (!is_given("--plan")) {
    plan.sequence_parallel = plan.mesh.size(Axis::tp) > 1;
  }
  if (is_given("--global-batch")) plan.global_batch = global_batch_;
  if (is_given("--micro-batch")) plan.micro_batch = micro_batch_;
  if (is_given("--seq-len")) plan.seq_len = seq_len_;
  if (is_given("--dtype")) plan.dtype = parse_dtype(dtype_, "--dtype");
  not_built(zero_ != 0, "--zero", std::to_string(zero_), "0");
  not_built(hsdp_ > 1, "--hsdp", std::to_string(hsdp_), "1");
  not_built(chunks_ > 1, "--chunks", std::to_string(chunks_), "1");
  not_built(is_given("--schedule"), "--schedule", schedule_, "no such flag (it belongs to --pp above 1)");
  not_built(is_given("--layers-per-stage"), "--layers-per-stage", layers_per_stage_,
            "no such flag (it belongs to --pp above 1)");
  not_built(is_given("--cp-kind"), "--cp-kind", cp_kind_, "no such flag (it belongs to --cp above 1)");
  not_built(is_given("--cp-balance"), "--cp-balance", cp_balance_,
            "no such flag (it belongs to --cp above 1)");
  not_built(recompute_ != "none", "--recompute", recompute_, "none");
  not_built(compress_ != "none", "--compress", compress_, "none");
  not_built(comm_ != "threads", "--comm", comm_, "threads");
  not_built(device_ != "cpu", "--device", device_, "cpu");
  validate(plan);
  return plan;
}

void OptimizerFlags::add_to(CLI::App& app, OptimizerOptions& options) {
  app.add_option("--lr", options.lr, "Learning rate after warm-up")->capture_default_str();
  app.add_option("--min-lr", options.min_lr,
                 "Learning rate at the end of the cosine (default: a tenth of --lr)");
  app.add_option("--warmup", options.warmup_steps, "Steps of linear warm-up")->capture_default_str();
  app.add_option("--weight-decay", options.weight_decay, "Decoupled; not on norms and biases")
      ->capture_default_str();
  app.add_option("--clip", options.clip, "Largest global gradient norm; 0: none")->capture_default_str();
}

void RunFlags::add_to(CLI::App& app) {
  app.add_option("--threads", threads_, "Compute threads of one rank (default: the cores shared out)");
  app.add_option("--timeout", timeout_seconds_, "Seconds that a rank waits for another before the job ends")
      ->capture_default_str();
}

RunOptions RunFlags::options(const Plan& plan) const {
  RunOptions run;
  if (threads_ < 0 || threads_ > 1024) refuse("--threads {}: must be from 1 to 1024", threads_);
  run.threads_per_rank = threads_ > 0 ? threads_ : std::max(1, available_cores() / plan.mesh.num_ranks());
  if (!(timeout_seconds_ > 0) || timeout_seconds_ > 1e6)
    refuse("--timeout {}: must be above 0, in seconds", timeout_seconds_);
  run.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_seconds_ * 1000));
  return run;
}

}  // namespace echelon
