// One rank of a training run, from the first step to the sample of text at the end.
#pragma once

#include <atomic>
#include <deque>
#include <vector>

#include "checkpoint/checkpoint_writer.h"
#include "checkpoint/fingerprint.h"
#include "train/replica_check.h"
#include "train/shared_run.h"
#include "train/step_meeting.h"

namespace echelon {

class RankRun {
 public:
  // The references must outlive it. Rank 0 fills the summary.
  // `witness`: watches the rank's groups, if the run is checked or a flip is planted; else nullptr.
  RankRun(const SharedRun& shared, const Rank& rank, TrainSummary& summary, Witness* witness);

  // The whole run. Throws as Trainer and Communicator do.
  void run();

 private:
  // As a worker: servers send the values, and save them.
  void run_as_worker();
  void train_step(std::int64_t step);
  void report(const StepResult& result);
  void count_offloaded();
  // The same if the run is checked: a step that is not finite may be due to corruption.
  void train_checked_step(std::int64_t step);
  StepResult run_again(std::int64_t step);
  void check_replicas(std::int64_t end);
  // Whether the steps from this one to the next check are run again.
  bool reruns_from(std::int64_t step) const;
  bool fingerprints_after(std::int64_t step) const;
  void refuse_idle_flip() const;
  void summarize();
  void keep_run();
  // Collects them from the first pipeline, by messages.
  void gather_shown_runs();
  std::vector<Span> shown_spans() const;
  void gather_traces();  // of all ranks
  // Evaluates the first sequences of the held-out part, the same at every evaluation.
  void evaluate(std::int64_t step);
  // Copies the state; it is written while training goes on, and committed once every rank's part is there.
  void save(std::int64_t step);
  void commit();
  void finish_save();  // waits
  bool saves_after(std::int64_t step) const;
  // Takes this rank's share of the fingerprint; shares are exchanged after a later step, or at the end.
  void take_fingerprint(std::int64_t step);
  // This rank's share of the pending fingerprint, once.
  StepMeeting::Words words_of_fingerprint();
  void publish_fingerprint(const std::vector<StepMeeting::Words>& words);
  // Sends this rank's message of a step, once: when the sums of its gradients are there, or before the step
  // if it continues into the next.
  void speak();
  // After a step: acts on what each rank sent in it.
  void meet(std::int64_t step);
  bool stop_requested() const;
  // Whether the step ends before the next one begins.
  bool ends_with_step() const;
  void add_to_spread(std::int64_t step, const std::vector<StepMeeting::Words>& words);
  // The faults that the request plants on this rank.
  TrainerHooks hooks();
  // Generates a continuation of the start of the held-out part, or of the training part if nothing is held
  // out.
  void sample_text();

  bool leads() const { return rank_.index() == 0; }
  std::int64_t step_tokens() const {
    return shared_.request.plan.global_batch * shared_.request.plan.seq_len;
  }
  SampleSource source(Range range, std::int64_t seq_len) const;

  const SharedRun& shared_;
  const Rank& rank_;
  Witness* const witness_;
  std::optional<FlipPlanter> flip_;  // on the rank of the planted flip
  Trainer trainer_;
  std::optional<ReplicaCheck> check_;
  std::vector<StepResult> unchecked_;  // of steps that will run again
  TrainSummary& summary_;
  std::vector<double> step_seconds_;
  Traffic traffic_, messages_;          // of all steps
  HostActivations host_;                // of all steps, and the most
  DecidedByData decided_;               // of the last step; without a flush, of all steps
  std::deque<PipelineRun> shown_runs_;  // the last ones
  int max_staleness_ = 0;
  StepMeeting meeting_;
  CheckpointWriter writer_;
  FingerprintTaker fingerprint_;
  std::int64_t last_step_;                   // number of steps when the run ends
  bool has_spoken_ = false;                  // in this step
  double step_work_ = 0;                     // seconds of the last one
  std::atomic<std::int64_t> saved_step_{0};  // of the checkpoint in progress
  WorkSpread spread_;
};

}  // namespace echelon
