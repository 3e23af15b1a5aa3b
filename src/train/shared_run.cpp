#include "train/shared_run.h"

#include <algorithm>
#include <numeric>

namespace echelon {

void publish(const SharedRun& run, const StepRecord& record, TrainSummary& summary) {
  summary.steps += 1;
  summary.last_step = record.step;
  summary.final_loss = record.loss;
  summary.experts = record.experts;
  run.outputs->write_log(to_json(record));
  if (run.observer.on_step) run.observer.on_step(record);
}

double mfu(const SharedRun& run, double tokens_per_second) {
  const Plan& plan = run.request.plan;
  return tokens_per_second * model_flops_per_token(plan.model, plan.seq_len) / run.start.peak_flops;
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

StepRecord record_of(const SharedRun& run, const StepResult& result, std::int64_t tokens, double seconds) {
  StepRecord record;
  record.step = result.step + 1;
  record.loss = result.loss;
  record.skipped = result.skipped;
  record.grad_norm = result.gradient_norm;
  record.lr = result.learning_rate;
  record.tokens = tokens;
  record.step_seconds = seconds;
  record.tokens_per_second = static_cast<double>(tokens) / seconds;
  record.mfu = mfu(run, record.tokens_per_second);
  for (const RoutingCounts& layer : result.routing) record.experts.push_back(load_of(layer));
  return record;
}

AsynchronousRun asynchronous_run(const SharedRun& run) {
  return {*run.request.asynchronous, run.resumed.step, run.request.optimizer.total_steps,
          run.request.run.timeout};
}

void save_to(const SharedRun& run, const Rank& rank, const ParameterStore& parameters, CheckpointInfo info,
             TrainSummary& summary, const std::vector<CarriedTensor>& carried) {
  if (run.request.checkpoint_directory.empty()) return;
  info.seed = run.request.seed;
  info.dtype = rank.dtype();
  info.model = run.request.plan.model;
  info.trained_on = run.data.kind();
  info.compression = run.request.plan.compression;
  const std::string path = save_checkpoint(rank, parameters, run.request.checkpoint_directory, info, carried);
  if (rank.index() > 0) return;
  summary.checkpoint = path;
  if (run.observer.on_checkpoint) run.observer.on_checkpoint(path);
}

}  // namespace echelon
