#include "schedule/dualpipe_steps.h"

#include "base/error.h"

namespace echelon {
namespace {

class Steps {
 public:
  Steps(DualPipePhase near, DualPipePhase far) : phases_{near, far} {}

  void forward(int phase) { list_.push_back(make(Op::F, phase, next_forward_[phase]++)); }
  void backward(int phase) { list_.push_back(make(Op::BW, phase, next_backward_[phase]++)); }
  void split_backward(int phase) {
    const Instruction b = make(Op::B, phase, next_backward_[phase]++);
    list_.push_back(b);
    waiting_.push_back({Op::W, b.stage, b.microbatch});
  }
  // First in, first out.
  void weight() { list_.push_back(waiting_.at(next_weight_++)); }
  void overlapped(int forward_phase, int backward_phase) {
    forward(forward_phase);
    list_.back().overlaps_next = true;
    backward(backward_phase);
  }
  std::vector<Instruction> take() {
    check(next_weight_ == waiting_.size(), "DualPipe leaves a weight gradient out");
    return std::move(list_);
  }

 private:
  Instruction make(Op op, int phase, int k) const {
    return {op, phases_[phase].stage, phases_[phase].first_microbatch + k};
  }

  DualPipePhase phases_[2];
  int next_forward_[2] = {}, next_backward_[2] = {};
  std::vector<Instruction> list_, waiting_;
  std::size_t next_weight_ = 0;
};

}  // namespace

std::vector<Instruction> dualpipe_steps(DualPipePhase near, DualPipePhase far, int distance, int half,
                                        int microbatches) {
  const int h = distance, to_middle = half - h - 1;
  Steps run(near, far);
  for (int i = 0; i < 2 * to_middle; ++i) run.forward(0);  // 1
  for (int i = 0; i < h + 1; ++i) {                        // 2
    run.forward(0);
    run.forward(1);
  }
  for (int i = 0; i < to_middle; ++i) {  // 3
    run.split_backward(1);
    run.weight();
    run.forward(1);
  }
  for (int i = 0; i < microbatches - 2 * half + h + 1; ++i) {  // 4
    if (i == 0 && to_middle == 0) {
      // The neighbour waits for this forward: it is handed on before the backward runs.
      run.forward(0);
      run.backward(1);
    } else {
      run.overlapped(0, 1);
    }
    run.overlapped(1, 0);
  }
  for (int i = 0; i < to_middle; ++i) {  // 5
    run.backward(1);
    run.overlapped(1, 0);
  }
  bool split = false;
  const auto backward = [&](int phase) { split ? run.split_backward(phase) : run.backward(phase); };
  for (int i = 0; i < h + 1; ++i) {  // 6: the second half leaves its W to the cool-down
    const bool middle = i == (h + 1) / 2;
    if (middle && h % 2 == 1) split = true;
    backward(1);
    if (middle && h % 2 == 0) split = true;
    backward(0);
  }
  for (int i = 0; i < to_middle; ++i) {  // 7
    run.weight();
    run.split_backward(0);
  }
  for (int i = 0; i < h + 1; ++i) run.weight();  // 8
  return run.take();
}

}  // namespace echelon
