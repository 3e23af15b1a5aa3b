// What drives a rank's training steps: it is what the executor runs, the layers of the rank's stages on the
// microbatches of a step, with what each forward pass keeps until its backward pass. How a step ends is told
// by its three kinds:
//   flush_driver.h       all ranks' passes end, then all take the optimizer's step together
//   stream_driver.h      a schedule without a flush: each stage takes its own, and the next passes go on
//   optimistic_driver.h  no optimizer barrier: a rank guesses the step, and checks it after its next passes
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "comm/host_group.h"
#include "parallel/pipeline_parallel.h"
#include "train/pass_graphs.h"
#include "train/training_parts.h"

namespace echelon {

class StepDriver : public PipelineStages {
 public:
  explicit StepDriver(TrainingParts& parts);

  // See Trainer::step().
  virtual std::vector<StepResult> train(std::int64_t step, const SampleSource& samples,
                                        std::int64_t steps_left) = 0;
  // Of the last run of passes. On a device the host waits for them.
  const PipelineRun& last_run() const;
  // Passes are captured as graphs, and replayed: of what refuse_graphs() takes, before the first step.
  void replay_passes();
  // Null where they are not.
  const PassGraphs* pass_graphs() const { return graphs_.get(); }
  // Target tokens of the global batch.
  double num_targets() const { return num_targets_.at(0); }

  void before(const Instruction& i) override;
  void upcoming(const Instruction* next) override;
  Work<Tensor> pass(Instruction i, Tensor input) override;
  bool pauses() const override { return pauses_; }
  void backward_weight(const Instruction& i) override;
  Tensor make_room(ValueKind kind, int microbatch) override;
  VocabularyParallel::Part head_part(const Instruction& i, Tensor hidden) override;
  void head_part_weight(const Instruction& i, Tensor scale) override;
  VocabularyParallel::Whole merge_head(int microbatch,
                                       const std::vector<VocabularyParallel::Part>& parts) override;
  void step(const Instruction& i) override;
  bool validate() override;

 protected:
  // Before F, B or BW.
  virtual void before_pass(const Instruction&) {}

  // The samples of step `first_step`, and on: a stream begins.
  void begin(std::int64_t first_step, const SampleSource& samples);
  // Loads the step's microbatches if they are not there yet.
  void prepare(int step) { (void)batch(step); }
  // Reads those of a later step, while a device runs what is queued. On the host nothing would run.
  void read_ahead(int step);
  void run(const StepPrograms::Program& program);
  // The summed loss of the backward passes since the last call, where this rank has the last stage. The host
  // waits for them.
  // Of the next tokens; where a model predicts one more, of these behind them.
  std::vector<double> take_loss_sums();
  // Target tokens of the global batch of a step of the stream, once.
  double take_num_targets(int step) { return num_targets_.extract(step).mapped(); }
  // What is kept for backward passes is of no use.
  void forget_forwards() { saved_.clear(); }
  [[noreturn]] void refuse_step(std::int64_t step, double loss) const;

  TrainingParts& parts_;
  std::int64_t first_step_ = 0;  // what step 0 of the stream is
  int stream_step_ = 0;          // done of the stream

 private:
  struct Batch {
    std::vector<Microbatch> microbatches;
    std::vector<double> gradient_scale;  // of each: gradients are those of this times its summed loss
    int left = 0;                        // passes of this rank that are not finished
  };
  struct Sample {
    explicit Sample(std::int64_t seq_len) : tokens(static_cast<std::size_t>(seq_len)), targets(tokens) {}
    std::vector<std::int32_t> tokens, targets;
  };
  struct SamplesAhead {
    std::int64_t step = -1;
    std::map<std::int64_t, Sample> samples = {};
  };
  // Those that have been read, and the others.
  SampleSource samples() const;
  Batch load(int step);
  Batch& batch(int step);
  const Microbatch& microbatch(int index);
  Loss loss(int index);
  SequenceSums sums(int index);  // of a microbatch
  Stage::GroupDone counted(int expected);
  void pass_by_graph(const Instruction& i);
  void release(int microbatch);
  // Of offloaded activations those that the next backward pass begins with.
  void expect_next();

  const SampleSource* samples_ = nullptr;
  SamplesAhead ahead_;
  PipelineExecutor executor_;
  mutable PipelineRun last_run_;
  bool pauses_;
  int microbatches_;                                     // of a step
  int passes_ = 0;                                       // of a step, on this rank
  int head_passes_ = 0;                                  // of its part of the output layer
  std::map<int, int> expected_;                          // microbatches that an update of a stage waits for
  std::map<int, int> done_;                              // of a layer group, since the last update
  std::map<int, Batch> batches_;                         // by step
  std::map<int, double> num_targets_;                    // of the global batch, by step of the stream
  std::map<std::pair<int, int>, Stage::Saved> saved_;    // by stage and microbatch
  std::optional<std::pair<int, int>> next_backward_;     // whose backward pass comes next
  std::map<int, VocabularyParallel::Saved> head_saved_;  // by microbatch
  std::unique_ptr<PassGraphs> graphs_;
  // (1, f64), under invariant numerics (sequences of this rank), where this rank has the last stage
  Tensor loss_sum_;
  Tensor next_loss_sum_;  // the same of what is predicted of one more token
};

// The result of a step whose loss pipeline ranks sum while they go on: asked for now, taken a step later.
struct LateResult {
  LateResult(const TrainingParts& parts, std::int64_t step, std::vector<double> loss_sums,
             double num_targets);
  StepResult finish();  // waits

  StepResult result;

 private:
  HostNumbers loss_sums_;  // over the pipeline
  double num_targets_;
};

}  // namespace echelon
