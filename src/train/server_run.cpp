#include "train/server_run.h"

#include "train/metrics.h"
#include "train/rank_timeline.h"

namespace echelon {

ServerRun::ServerRun(const SharedRun& shared, const Rank& rank, TrainSummary& summary)
    : shared_(shared),
      rank_(rank),
      run_(asynchronous_run(shared)),
      server_(rank, shared.request.plan, shared.request.optimizer, shared.request.seed, run_,
              shared.first_values()),
      summary_(summary) {}

void ServerRun::run() {
  const int workers = shared_.request.plan.mesh.size(Axis::dp);
  const auto all = join_all(rank_, workers, run_.options.servers);
  if (!shared_.resumed.path.empty()) {
    load_checkpoint(rank_, server_.parameters(), shared_.resumed, false);
    server_.resume(shared_.resumed.updates);
  } else if (shared_.request.from) {
    shared_.request.from->load(rank_, server_.parameters());
  }
  StepTrace trace(rank_);
  trace.begin(run_.first_step + 1);
  const StalenessMeasures staleness = server_.serve(*all, [&](const ServedStep& step) {
    report(step);
    trace.next();
  });
  trace.end();
  if (leads()) summarize(staleness);
  all->barrier().wait();  // the workers have evaluated
  if (const std::string& directory = shared_.request.checkpoint_directory; !directory.empty()) {
    const Doing doing = rank_.doing(Activity::checkpoint_copy);
    const std::string path = save_checkpoint(
        rank_, server_.parameters(), directory,
        checkpoint_info(shared_, run_.last_step, server_.updates(), tokens_), {}, {}, shared_.request.keep);
    if (leads()) publish_checkpoint(shared_, run_.last_step, path, summary_);
  }
  all->barrier().wait();
  if (shared_.request.trace) (void)gather_timelines(rank_, rank_timeline(rank_, "server", {}));
}

void ServerRun::report(const ServedStep& step) {
  const StepRecord record =
      record_of(step.result, step.sequences * shared_.request.plan.seq_len, step.seconds);
  tokens_ += record.tokens;
  seconds_ += step.seconds;
  if (leads()) publish(shared_, record, summary_);
}

void ServerRun::summarize(const StalenessMeasures& staleness) {
  summary_.step_seconds = seconds_ / static_cast<double>(summary_.steps);
  summary_.tokens_per_second = static_cast<double>(tokens_) / seconds_;
  AsynchronousSummary& a = *summary_.asynchronous;
  a.measured_memory = rank_.arena().peak();
  a.bound = run_.options.staleness;
  a.histogram = staleness.histogram;
  a.mean_updates_late =
      static_cast<double>(staleness.sum_updates_late) / static_cast<double>(staleness.pushes);
  a.max_updates_late = staleness.max_updates_late;
  a.updates = server_.updates() - shared_.resumed.updates;
}

}  // namespace echelon
