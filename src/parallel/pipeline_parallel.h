// Pipeline parallelism (GPipe, Huang et al. 2018, https://arxiv.org/abs/1811.06965, and every schedule
// since): the executor. One loop runs the lowered instructions of one rank, whatever the schedule: what
// differs between GPipe, 1F1B, PipeDream, zero-bubble and DualPipe is in the list, not here. Bytes sent per
// rank: one activation and one gradient, rows_here x C elements each, per microbatch and stage boundary to
// another rank.
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

// What the executor asks of the stages that a rank holds: the stage, microbatch and version of weights are
// those of the instruction. Tensors are handed over: the receiver decides when they go.
class PipelineStages {
 public:
  virtual ~PipelineStages() = default;
  // Called before each instruction.
  virtual void before(const Instruction&) {}
  // Then, of those that run alone: what computes next on this rank; null: nothing, or several together.
  virtual void upcoming(const Instruction*) {}
  // F, B or BW: from the value that it reads to the one that it writes, of those that travel; undefined where
  // there is none, at the ends of the model.
  virtual Work<Tensor> pass(Instruction i, Tensor input) = 0;
  // Whether these pause where they wait for other ranks than the pipeline's. Two that the schedule overlaps
  // change places there, each time: in the same order on all ranks that run the same list.
  virtual bool pauses() const = 0;
  virtual void backward_weight(const Instruction& i) = 0;
  // Optimizer step of a stage, in a schedule that does not flush.
  virtual void step(const Instruction& i) = 0;
  // What is left to do of the step before. False if what was run since then, all of it forward passes, ran on
  // wrong weights: it is forgotten and run again.
  virtual bool validate() = 0;
  // Room for what travels of this microbatch.
  virtual Tensor make_room(ValueKind kind, int microbatch) = 0;

  // Where the output layer is cut over the ranks (parallel/vocabulary_parallel.h): V, from the last stage's
  // output; VW; and what comes before the backward pass of the last stage.
  virtual VocabularyParallel::Part head_part(const Instruction& i, Tensor hidden) = 0;
  virtual void head_part_weight(const Instruction& i, Tensor scale) = 0;
  virtual VocabularyParallel::Whole merge_head(int microbatch,
                                               const std::vector<VocabularyParallel::Part>& parts) = 0;
};

struct PipelineRun {
  Clock::time_point start;
  std::vector<Span> spans;  // seconds since the run's beginning; of a device when it ran them, see settle()
  int peak_saved = 0;  // most microbatches of a stage that were kept at once, summed over the rank's stages
  std::int64_t messages = 0;  // sent
  // Optimizer steps of the rank that a gradient was late, at most: between the weights that it was computed
  // with and those that it changed. 0 where the schedule flushes.
  int max_staleness = 0;
  bool was_again = false;  // validation made all that was before it run again

  // The spans in seconds since `zero`.
  std::vector<Span> spans_since(Clock::time_point zero) const;

  // Of a device: the events between which it ran each span. The host waits for them, and `start` and `spans`
  // tell their times.
  std::vector<DeviceWork> on_device{};
  void settle(DeviceClock& clock);
};

// One rank's executor. Where the schedule does not flush, it keeps what is in flight from step to step.
class PipelineExecutor {
 public:
  // `group` is the pp group and outlives the executor. Spans are on the clock of `time`, or between marks of
  // a device's.
  explicit PipelineExecutor(Communicator& group, Time time = {}, const DeviceClock* device = nullptr)
      : group_(&group), time_(std::move(time)), device_(device) {}

  // Runs the rank's list of a program in order. Throws what stages and group throw.
  PipelineRun run(const StepPrograms::Program& program, PipelineStages& stages);

 private:
  // When something began or ended.
  struct Moment {
    double seconds = 0;  // since the run's beginning
    std::shared_ptr<DeviceEvent> on_device{};
  };
  Moment now(const PipelineRun& run) const;
  static void add_span(const Instruction& i, const Moment& begin, const Moment& end, PipelineRun& run);
  // The value that an instruction reads, off the shelf, and the one that it wrote, onto it.
  Tensor fetch(const Instruction& i, const Schedule& schedule);
  Tensor take(const Value& v);
  // The gradient of the last stage's output, off the shelf in parts; what these are told goes onto it.
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
  std::map<Value, Tensor> shelf_;  // activations and gradients that wait for their one reader
  std::optional<int>
      oldest_read_;  // version of the weights that backward passes have read since the last step
  std::vector<Pending> sends_;
  int saved_ = 0;
};

}  // namespace echelon
