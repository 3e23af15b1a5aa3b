#include "train/stream_driver.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "schedule/simulate.h"

namespace echelon {

StreamDriver::StreamDriver(TrainingParts& parts)
    : StepDriver(parts),
      versions_(parts.rank, parts.parameters.values(),
                weight_versions(
                    parts.programs.schedule())[static_cast<std::size_t>(parts.rank.coordinate(Axis::pp))]) {}

std::vector<StepResult> StreamDriver::train(std::int64_t step, const SampleSource& samples,
                                            std::int64_t steps_left) {
  if (stream_step_ == 0) {
    updates_ = 0;
    versions_.restart();
  }
  check(stream_step_ == 0 || first_step_ + stream_step_ == step, "a stream goes from step to step");
  begin(step - stream_step_, samples);
  constexpr std::int64_t far = 1 << 30;
  run(parts_.programs.program(stream_step_, static_cast<int>(std::min(steps_left, far))));
  LateResult now(parts_, step, take_loss_sums(), take_num_targets(stream_step_));
  std::vector<StepResult> finished;
  if (unfinished_) finished.push_back(unfinished_->finish());
  unfinished_ = std::move(now);
  ++stream_step_;
  if (steps_left == 1) {
    finished.push_back(unfinished_->finish());
    unfinished_.reset();
    stream_step_ = 0;
  }
  for (const StepResult& result : finished)
    if (!std::isfinite(result.loss))
      fail_for_good("step {}: the loss is {} (learning rate {}); stages had stepped on by then",
                    result.step + 1, result.loss, result.learning_rate);
  return finished;
}

void StreamDriver::before_pass(const Instruction& i) {
  versions_.use(i.version);
  if (i.op == Op::F) return versions_.keep(i.version);
  versions_.drop(i.version);
  if (!parts_.gradients.begun()) parts_.gradients.begin(parts_.updates(first_step_) + updates_);
}

void StreamDriver::step(const Instruction& i) {
  parts_.gradients.finish();
  ++updates_;
  versions_.advance(i.version);
  const std::int64_t step = first_step_ + i.microbatch / parts_.programs.microbatches();
  optimizer_step(parts_.rank, parts_.parameters, parts_.optimizer, learning_rate(parts_.optimizer, step),
                 parts_.updates(first_step_) + i.version, 1.0);
}

}  // namespace echelon
