// What the executor runs in training: the layers of a rank's stages on the microbatches of a step, with what
// each forward pass keeps until its backward pass.
#pragma once

#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "model/held_stages.h"
#include "parallel/pipeline_parallel.h"

namespace echelon {

// The microbatches that a data-parallel rank has of one step.
struct StepBatch {
  std::vector<Microbatch> microbatches;
  std::vector<double> gradient_scale;  // of each: gradients are those of this times its summed loss
};

class TrainingStages : public PipelineStages {
 public:
  struct Hooks {
    std::function<StepBatch(int step)> load;  // `step` of the stream; once for each, ahead of its first F
    std::function<void(const Instruction&)> before_pass;  // F, B or BW
    std::function<void(int group)>
        group_done;  // a layer group has the gradients of all microbatches of an update
    std::function<void(const Instruction&)> update;  // optimizer step in a schedule that does not flush
    std::function<bool()> validate;                  // see PipelineStages
  };
  // All outlive this. `pauses`: see PipelineStages.
  TrainingStages(const HeldStages& held, const StepPrograms& programs, int pp_rank, bool pauses, Hooks hooks);

  Work<Tensor> forward(Instruction i, Tensor input) override;
  Work<Tensor> backward(Instruction i, Tensor gradient) override;
  Work<Tensor> backward_input(Instruction i, Tensor gradient) override;
  bool pauses() const override { return pauses_; }
  void backward_weight(const Instruction& i) override;
  void step(const Instruction& i) override { hooks_.update(i); }
  bool validate() override;
  Tensor make_boundary(int microbatch) override;

  // Loads the step's microbatches if they are not there yet.
  void prepare(int step) { (void)batch(step); }
  // The summed loss of the backward passes since the last call, where this rank has the last stage. The host
  // waits for them.
  double take_loss_sum();

 private:
  struct Loaded {
    StepBatch batch;
    int left = 0;  // passes of this rank that are not finished
  };
  Loaded& batch(int step);
  const Microbatch& microbatch(int index);
  Loss loss(int index);
  Stage::GroupDone counted(int stage);
  void release(int microbatch);

  const HeldStages& held_;
  bool pauses_;
  Hooks hooks_;
  int microbatches_;                                   // of a step
  int passes_ = 0;                                     // of a step, on this rank
  std::map<int, int> expected_;                        // microbatches that an update of a stage waits for
  std::map<int, int> done_;                            // of a layer group, since the last update
  std::map<int, Loaded> loaded_;                       // by step
  std::map<std::pair<int, int>, Stage::Saved> saved_;  // by stage and microbatch
  Tensor loss_sum_;                                    // (1, f64), where this rank has the last stage
};

}  // namespace echelon
