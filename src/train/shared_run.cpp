#include "train/shared_run.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "spec/plan_fields.h"
#include "train/dry_run.h"

namespace echelon {

void publish(const SharedRun& run, StepRecord record, TrainSummary& summary) {
  const Plan& plan = run.request.plan;
  record.mfu =
      run.utilization->of(record.tokens_per_second * model_flops_per_token(plan.model, plan.seq_len));
  summary.steps += 1;
  summary.last_step = record.step;
  summary.final_loss = record.loss;
  summary.experts = record.experts;
  run.outputs->write_log(record);
  if (run.observer.on_step) run.observer.on_step(record);
}

void publish_checkpoint(const SharedRun& run, std::int64_t step, const std::string& path,
                        TrainSummary& summary) {
  summary.checkpoint = path;
  run.outputs->write_log(SavedCheckpoint{step, path});
  if (run.observer.on_checkpoint) run.observer.on_checkpoint(path);
}

void publish_fingerprint_of(const SharedRun& run, std::int64_t step, const std::string& fingerprint,
                            TrainSummary& summary) {
  summary.fingerprint = fingerprint;
  run.outputs->write_log(Fingerprint{step, fingerprint});
  if (run.observer.on_fingerprint) run.observer.on_fingerprint(step, fingerprint);
}

void publish_corruption(const SharedRun& run, const Corruption& corruption, TrainSummary& summary) {
  summary.corruptions += 1;
  run.outputs->write_log(corruption);
  if (run.observer.on_corruption) run.observer.on_corruption(corruption);
}

void publish_again(const SharedRun& run, const StepRecord& record, TrainSummary& summary) {
  summary.final_loss = record.loss;
  summary.experts = record.experts;
  run.outputs->write_log(record);
  if (run.observer.on_step) run.observer.on_step(record);
}

static ExpertLoad load_of(const RoutingCounts& counts) {
  const auto sum = [](const std::vector<double>& n) { return std::accumulate(n.begin(), n.end(), 0.0); };
  const double routed = sum(counts.routed),
               most = *std::max_element(counts.routed.begin(), counts.routed.end());
  return {counts.layer,
          most * static_cast<double>(counts.routed.size()) / routed,
          sum(counts.dropped) / routed,
          counts.loss_sum,
          counts.routed,
          counts.dropped};
}

StepRecord record_of(const StepResult& result, std::int64_t tokens, double seconds) {
  StepRecord record;
  record.step = result.step + 1;
  record.loss = result.loss;
  record.mtp_loss = result.mtp_loss;
  record.skipped = result.skipped;
  record.grad_norm = result.gradient_norm;
  record.lr = result.learning_rate;
  record.tokens = tokens;
  record.step_seconds = seconds;
  record.tokens_per_second = static_cast<double>(tokens) / seconds;
  for (const RoutingCounts& layer : result.routing) record.experts.push_back(load_of(layer));
  return record;
}

std::int64_t steps_until_empty(const SharedRun& run, std::int64_t step, std::int64_t last_step) {
  std::int64_t until = last_step;
  const auto stop_at = [&](std::int64_t every) {
    if (every > 0) until = std::min(until, (step / every + 1) * every);
  };
  if (!run.request.checkpoint_directory.empty()) stop_at(run.request.save_every);
  stop_at(run.request.fingerprint_every);
  if (run.pipeline->programs(0).flushes()) stop_at(run.request.eval_every);
  return until - step;
}

Traffic predicted_traffic(const SharedRun& run, std::int64_t steps,
                          const std::optional<DecidedByData>& decided) {
  const Plan& plan = run.request.plan;
  if (run.request.asynchronous) return predict_worker_traffic(plan, *run.pipeline, *run.request.asynchronous);
  const StepPrograms& programs = run.pipeline->programs(0);
  std::map<std::int64_t, Traffic> by_uncompressed_updates;
  const auto of = [&](std::int64_t step, const std::optional<DecidedByData>& in_step) -> const Traffic& {
    const std::int64_t updates = run.resumed.updates + step * programs.updates_per_step();
    const std::int64_t uncompressed =
        std::clamp<std::int64_t>(plan.compression.warmup_steps - updates, 0, programs.updates_per_step());
    const auto [found, fresh] = by_uncompressed_updates.try_emplace(uncompressed);
    if (fresh) found->second = predict_traffic(plan, *run.pipeline, {}, updates, in_step);
    return found->second;
  };
  if (programs.flushes()) return of(steps - 1, decided);
  Traffic sum;
  for (std::int64_t step = 0; step < steps; ++step)
    sum += of(step, decided ? std::optional(DecidedByData{}) : std::nullopt);
  if (decided) add_copies(plan, {}, decided->copies, sum);
  return sum / steps;
}

AsynchronousRun asynchronous_run(const SharedRun& run) {
  return {*run.request.asynchronous, run.resumed.step, run.request.optimizer.total_steps};
}

static std::map<std::string, std::string> kept_settings(const TrainRequest& request) {
  const OptimizerOptions& o = request.optimizer;
  std::map<std::string, std::string> settings{
      {"--lr", fmt::format("{}", o.lr)},
      {"--min-lr", fmt::format("{}", o.min_lr)},
      {"--warmup", fmt::format("{}", o.warmup_steps)},
      {"--weight-decay", fmt::format("{}", o.weight_decay)},
      {"--clip", fmt::format("{}", o.clip)},
      {"--val-fraction", fmt::format("{}", request.validation_fraction)}};
  for (const char* name :
       {"mask", "document-end", "precision", "numerics", "seq-len", "global-batch", "compress", "aux-loss",
        "device-loss", "communication-loss", "z-loss", "bias-rate", "balance-scope", "capacity", "drop"})
    settings[std::string("--") + name] = text_of(*find_field(name), request.plan);
  // Without the mask nothing ends, and its number is no value of the flag.
  if (request.plan.mask != AttentionMask::document) settings.erase("--document-end");
  return settings;
}

std::string changed_settings(const SharedRun& run) {
  std::string changes;
  const auto now = kept_settings(run.request);
  for (const auto& [flag, before] : run.resumed.settings)
    if (const auto here = now.find(flag); here != now.end() && here->second != before)
      changes += fmt::format("{}{} {} (it was {})", changes.empty() ? "" : ", ", flag, here->second, before);
  return changes.empty() ? changes : "goes on with " + changes;
}

CheckpointInfo checkpoint_info(const SharedRun& run, std::int64_t step, std::int64_t updates,
                               std::int64_t tokens) {
  run.data.check_unchanged();
  CheckpointInfo info;
  info.step = step;
  info.optimizer = run.request.plan.optimizer;
  info.updates = updates;
  info.tokens = run.resumed.tokens + tokens;
  info.seed = run.request.seed;
  info.model = run.request.plan.model;
  info.trained_on = run.data.kind();
  info.data = run.data.fingerprint();
  info.settings = kept_settings(run.request);
  info.compression = run.request.plan.compression;
  info.tokenizer = run.request.tokenizer ? run.request.tokenizer : run.resumed.tokenizer;
  return info;
}

}  // namespace echelon
