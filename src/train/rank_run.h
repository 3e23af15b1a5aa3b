// A training rank, from the first step to the sample of text at the end.
#pragma once

#include <deque>
#include <vector>

#include "train/shared_run.h"

namespace echelon {

class RankRun {
 public:
  // The references must outlive it. Rank 0 fills the summary.
  RankRun(const SharedRun& shared, const Rank& rank, TrainSummary& summary);

  // The whole run: what Trainer and Communicator throw.
  void run();

 private:
  // The servers bring the values, and save them.
  void run_as_worker();
  void train_step(std::int64_t step);
  void report(const StepResult& result);
  void summarize();
  void keep_run();
  // Of the first pipeline, by messages.
  void gather_shown_runs();
  void gather_ring();
  // The first sequences of the held-out part, one after another: the same at every evaluation.
  void evaluate(std::int64_t step);
  void save(std::int64_t step);
  bool saves_after(std::int64_t step) const;
  // Until the next checkpoint or the end, where the pipeline must be empty; without a barrier in the
  // optimizer until the next evaluation too, which wants the true weights.
  std::int64_t steps_left(std::int64_t step) const;
  // Continues the beginning of the held-out part, or of the training part where nothing is held out.
  void sample_text();

  bool leads() const { return rank_.index() == 0; }
  std::int64_t step_tokens() const {
    return shared_.request.plan.global_batch * shared_.request.plan.seq_len;
  }
  SampleSource source(Range range, std::int64_t seq_len) const;

  const SharedRun& shared_;
  const Rank& rank_;
  Trainer trainer_;
  TrainSummary& summary_;
  std::vector<double> step_seconds_;
  Traffic traffic_, messages_;          // of all steps
  std::vector<RingSpan> last_ring_;     // of the last step
  std::deque<PipelineRun> shown_runs_;  // the last ones
  int max_staleness_ = 0;
};

}  // namespace echelon
