// The executor of pipeline parallelism (GPipe, Huang et al. 2018, https://arxiv.org/abs/1811.06965, and every
// schedule since). One loop runs the lowered instructions of one rank, whatever the schedule: GPipe, 1F1B,
// PipeDream, zero-bubble and DualPipe differ only in the list. Bytes sent per rank: one activation and one
// gradient, of rows_here x C elements each, per microbatch and stage boundary to another rank.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/work.h"
#include "comm/communicator.h"
#include "parallel/vocabulary_parallel.h"
#include "schedule/step_programs.h"
#include "schedule/timeline.h"
#include "tensor/device_clock.h"

namespace echelon {

// What the executor calls on a rank's stages. Instructions give the stage, the microbatch and the version of
// the weights. Tensors are handed over: the receiver frees them.
class PipelineStages {
 public:
  virtual ~PipelineStages() = default;
  // Called before each instruction.
  virtual void before(const Instruction&) {}
  // Then, before an instruction that runs alone: the next computation on this rank; null if there is none, or
  // several run together.
  virtual void upcoming(const Instruction*) {}
  // F, B or BW: from the travelling value that it reads to the one that it writes; undefined if there is
  // none, at the ends of the model.
  virtual Work<Tensor> pass(Instruction i, Tensor input) = 0;
  // Whether pass() pauses when it waits for ranks outside the pipeline. Two passes that the schedule overlaps
  // then alternate at each pause, in the same order on all ranks with the same list.
  virtual bool pauses() const = 0;
  virtual void backward_weight(const Instruction& i) = 0;
  // The optimizer step of a stage, in a schedule without a flush.
  virtual void step(const Instruction& i) = 0;
  // Completes the previous optimizer step (post-validation). Returns false if the forward passes that ran
  // since then used wrong weights: they are discarded and run again.
  virtual bool validate() = 0;
  // Allocates a travelling value of this microbatch.
  virtual Tensor make_room(ValueKind kind, int microbatch) = 0;

  // With vocabulary parallelism (parallel/vocabulary_parallel.h): V, from the last stage's output; VW; and
  // the merge before the last stage's backward pass.
  virtual VocabularyParallel::Part head_part(const Instruction& i, Tensor hidden) = 0;
  virtual void head_part_weight(const Instruction& i, Tensor scale) = 0;
  virtual VocabularyParallel::Whole merge_head(int microbatch,
                                               const std::vector<VocabularyParallel::Part>& parts) = 0;
};

struct PipelineRun {
  Clock::time_point start;
  // In seconds since the run began; on a device, the times at which it ran them: see settle().
  std::vector<Span> spans;
  // The most microbatches kept per stage at once, summed over the rank's stages.
  int peak_saved = 0;
  std::int64_t messages = 0;  // sent
  // Staleness: the most optimizer steps of the rank between the weights that a gradient was computed with and
  // those that it changed. 0 if the schedule flushes.
  int max_staleness = 0;
  bool was_again = false;  // validate() failed, and all passes before it ran again

  // The spans in seconds since `zero`.
  std::vector<Span> spans_since(Clock::time_point zero) const;

  // On a device: the events around each span. settle() makes the host wait for them and fills `start` and
  // `spans` with their times.
  std::vector<DeviceWork> on_device{};
  void settle(DeviceClock& clock);
};

// One rank's executor. In a schedule without a flush it keeps values in flight from step to step.
class PipelineExecutor {
 public:
  // `group` is the pp group and outlives the executor. Spans are measured by `time`, or by events of
  // `device`.
  explicit PipelineExecutor(Communicator& group, Time time = {}, const DeviceClock* device = nullptr)
      : group_(&group), time_(std::move(time)), device_(device) {}

  // Runs the rank's list of a program, in order. Throws what `stages` and the group throw.
  PipelineRun run(const StepPrograms::Program& program, PipelineStages& stages);

 private:
  // The start or end of a span.
  struct Moment {
    double seconds = 0;  // since the run's beginning
    std::shared_ptr<DeviceEvent> on_device{};
  };
  Moment now(const PipelineRun& run) const;
  static void add_span(const Instruction& i, const Moment& begin, const Moment& end, PipelineRun& run);
  // Takes the value that an instruction reads off the shelf; shelve() puts the one that it wrote onto it.
  Tensor fetch(const Instruction& i, const Schedule& schedule);
  Tensor take(const Value& v);
  // Takes the parts of the gradient of the last stage's output off the shelf and merges them; shelves the
  // scales for these parts.
  Tensor merge_head(const Instruction& i, const Schedule& schedule, PipelineStages& stages);
  void shelve(const Instruction& i, const Schedule& schedule, const Tensor& result, PipelineRun& run);
  void execute(const Instruction& i, const Schedule& schedule, PipelineStages& stages, PipelineRun& run);
  // Computations that run together, and the messages between them.
  void execute_together(std::span<const Instruction> list, const Schedule& schedule, PipelineStages& stages,
                        PipelineRun& run);
  void note_staleness(const Instruction& step, PipelineRun& run);
  static const Instruction* next_compute(const std::vector<Instruction>& list, std::size_t behind,
                                         bool overlaps);

  Communicator* group_;
  Time time_;
  const DeviceClock* device_;
  std::map<Value, Tensor> shelf_;  // activations and gradients that wait for their only reader
  // The version of the weights that backward passes have read since the last step.
  std::optional<int> oldest_read_;
  std::vector<Pending> sends_;
  int saved_ = 0;
};

}  // namespace echelon
