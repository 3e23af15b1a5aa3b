#include "apps/flags.h"

#include <fmt/format.h>

#include <algorithm>

#include "apps/help.h"
#include "apps/plan_field_flags.h"
#include "base/error.h"
#include "base/open_file.h"
#include "schedule/pipeline_layout.h"

namespace echelon {

void PlanFlags::add_to(CLI::App& app, const Plan& defaults) {
  app_ = &app;
  defaults_ = defaults;
  for (const PlanField& field : plan_fields()) {
    if (!field.is_flag_of_train()) continue;
    heading(app, field.heading == nullptr ? common_flags : field.heading);
    add_field(app, field, values_, text_of(field, defaults));
    if (field.name() != "model") continue;
    app.add_option("--plan", plan_file_,
                   "TOML file with model, mesh and batch; flags on the command line override it")
        ->type_name("FILE");
  }
}

void PlanFlags::add_asked_dp() { add_number(*app_, asked_dp_flag, asked_dp_, "")->group(""); }

bool PlanFlags::gives_mesh() const {
  for (const char* name : {"--dp", "--tp", "--pp", "--cp", "--ep", "--plan"})
    if (is_given(*app_, name)) return true;
  return false;
}

Plan PlanFlags::plan(const StartingWeights* weights, const ModelSpec* resumed,
                     const std::function<std::int32_t()>& document_end,
                     const std::function<void(Plan&)>& choose_mesh) const {
  Plan plan = defaults_;
  if (weights != nullptr) plan.model = weights->model();
  plan.model.tuning.freeze.clear();  // the training that froze them is over
  if (resumed != nullptr) plan.model = *resumed;
  plan.sequence_parallel = true;  // has an effect if tp > 1
  const bool has_file = is_given(*app_, "--plan");
  if (has_file) plan = plan_from_toml(read_text(plan_file_, "--plan"), "--plan " + plan_file_);
  for (const PlanField& field : plan_fields()) {
    if (!field.is_flag_of_train() || !is_given(*app_, field.flag())) continue;
    read_field(field, plan, values_.at(field.name()), field.flag());
    if (field.name() == "model" && !has_file) plan.seq_len = std::min(plan.seq_len, plan.model.max_seq);
  }
  // Invariant numerics imply legal defaults.
  if (!has_file && plan.numerics == Numerics::invariant) {
    if (!is_given(*app_, "--sp")) plan.sequence_parallel = false;
    if (!is_given(*app_, "--cp-kind") && plan.mesh.size(Axis::cp) > 1)
      plan.context_kind = ContextKind::ulysses;
  }
  if (weights != nullptr) weights->refuse_other_model(plan.model);
  if (weights != nullptr || resumed != nullptr) {
    if (!has_file && !is_given(*app_, "--seq-len")) plan.seq_len = std::min(plan.seq_len, plan.model.max_seq);
  }
  if (plan.mask == AttentionMask::document && plan.document_end < 0 && document_end) {
    const std::int32_t end = document_end();
    if (end < plan.model.vocab) plan.document_end = end;  // otherwise reading the data refuses it
  }
  if (choose_mesh && !gives_mesh()) choose_mesh(plan);
  check_with_remedies(plan, [this](const Plan& asked, const std::string& also_given) {
    validate(asked.mesh);
    // What acts between the data-parallel ranks that were asked for is given rightly, however few are left.
    Plan before = asked;
    if (asked_dp_ > 0) before.mesh.set(Axis::dp, asked_dp_);
    refuse_idle(*app_, plan_needs(before), also_given);
    check_whole(asked);
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
  add_device(app, device_);
  add_number(app, "--threads", threads_, "Compute threads per rank (default: the cores shared out)");
}

void RunFlags::add_to(CLI::App& app) {
  heading(app, "Running");
  add_threads_to(app);
  app.add_option("--collectives", collectives_,
                 "Directly on shared memory, by an algorithm over messages, or NCCL's (docs/collectives.md)")
      ->type_name("direct|ring|halving-doubling|auto|nccl")
      ->capture_default_str();
  add_number(app, "--timeout", timeout_seconds_, "Seconds a rank waits for another before the job fails");
}

std::shared_ptr<DeviceDriver> RunFlags::driver() const {
  if (!driver_) driver_ = driver_of(device_);
  return *driver_;
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
  constexpr int most_ranks = 1024, most_threads = 4096;  // in one process
  RunOptions run;
  const auto [ranks, cores] = ranks_here(plan, processes);
  if (ranks > most_ranks)
    refuse(
        "--dp {} x --tp {} x --pp {} x --cp {}: {} ranks are as many threads of one process; legal: up to {}",
        plan.mesh.size(Axis::dp), plan.mesh.size(Axis::tp), plan.mesh.size(Axis::pp),
        plan.mesh.size(Axis::cp), ranks, most_ranks);
  if (threads_ && (*threads_ < 1 || *threads_ > most_threads / ranks))
    refuse("--threads {}: must be from 1 to {}", *threads_, most_threads / ranks);
  run.driver = driver();
  if (run.driver && threads_) refuse("--threads {}: has no effect on a device; leave it out", *threads_);
  run.collectives = parse_collectives(collectives_, "--collectives");
  run.threads_per_rank = threads_.value_or(std::max(1, cores / ranks));
  run.timeout = timeout();
  return run;
}

}  // namespace echelon
