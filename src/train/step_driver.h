// Drives a rank's training steps. It implements what the executor calls: the layers of the rank's stages on
// the microbatches of a step, and what each forward pass keeps until its backward pass. Its three subclasses
// differ in how a step ends:
//   flush_driver.h       after all ranks' passes, all take the optimizer step together
//   stream_driver.h      a schedule without a flush: each stage steps by itself, and the next passes go on
//   optimistic_driver.h  no optimizer barrier: a rank guesses the step, and validates it after its next
//   passes
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
  // The last run of passes. On a device the host waits for them.
  const PipelineRun& last_run() const;
  // Captures passes as graphs and replays them. Call before the first step, for plans that refuse_graphs()
  // accepts.
  void replay_passes();
  // Null if passes are not replayed.
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

  // Begins a stream with the samples of step `first_step`.
  void begin(std::int64_t first_step, const SampleSource& samples);
  // Loads the step's microbatches unless they are loaded already.
  void prepare(int step) { (void)batch(step); }
  // Reads samples of a later step while a device runs queued work. On the host nothing would overlap.
  void read_ahead(int step);
  void run(const StepPrograms::Program& program);
  // The summed loss of the backward passes since the last call, if this rank has the last stage; with
  // multi-token prediction, then its summed loss. The host waits for the passes.
  std::vector<double> take_loss_sums();
  // Target tokens of the global batch of a step of the stream; call once per step.
  double take_num_targets(int step) { return num_targets_.extract(step).mapped(); }
  // Discards what is kept for backward passes.
  void forget_forwards() { saved_.clear(); }
  [[noreturn]] void refuse_step(std::int64_t step, double loss) const;

  TrainingParts& parts_;
  std::int64_t first_step_ = 0;  // training step that is step 0 of the stream
  int stream_step_ = 0;          // steps of the stream that are done

 private:
  struct Batch {
    std::vector<Microbatch> microbatches;
    std::vector<double> gradient_scale;  // by microbatch: gradients are those of this times its summed loss
    int left = 0;                        // unfinished passes of this rank
  };
  struct Sample {
    explicit Sample(std::int64_t seq_len) : tokens(static_cast<std::size_t>(seq_len)), targets(tokens) {}
    std::vector<std::int32_t> tokens, targets;
  };
  struct SamplesAhead {
    std::int64_t step = -1;
    std::map<std::int64_t, Sample> samples = {};
  };
  // Samples: those that were read ahead, and the others.
  SampleSource samples() const;
  Batch load(int step);
  Batch& batch(int step);
  const Microbatch& microbatch(int index);
  Loss loss(int index);
  SequenceSums sums(int index);  // of a microbatch
  Stage::GroupDone counted(int expected);
  void pass_by_graph(const Instruction& i);
  void release(int microbatch);
  // Requests the offloaded activations with which the next backward pass begins.
  void expect_next();

  const SampleSource* samples_ = nullptr;
  SamplesAhead ahead_;
  PipelineExecutor executor_;
  mutable PipelineRun last_run_;
  bool pauses_;
  int microbatches_;                                     // per step
  int passes_ = 0;                                       // per step, on this rank
  int head_passes_ = 0;                                  // with its part of the output layer
  std::map<int, int> expected_;                          // by stage: microbatches that its update waits for
  std::map<int, int> done_;                              // by layer group, since the last update
  std::map<int, Batch> batches_;                         // by step
  std::map<int, double> num_targets_;                    // of the global batch, by step of the stream
  std::map<std::pair<int, int>, Stage::Saved> saved_;    // by stage and microbatch
  std::optional<std::pair<int, int>> next_backward_;     // the next backward pass
  std::map<int, VocabularyParallel::Saved> head_saved_;  // by microbatch
  std::unique_ptr<PassGraphs> graphs_;
  // Summed loss (1, f64), or by sequence of this rank under invariant numerics; if this rank has the last
  // stage.
  Tensor loss_sum_;
  Tensor next_loss_sum_;  // the same for multi-token prediction
};

// The result of a step whose loss is summed over pipeline ranks while they continue: requested now, taken a
// step later.
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
