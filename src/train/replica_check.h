// Silent corruption of data, found: `train --check-replicas`. (Dixit et al. 2021,
// https://arxiv.org/abs/2102.11245; of 419 interruptions of Llama 3's training 6 were of this kind,
// https://arxiv.org/abs/2407.21783.)
//
// A rank is deterministic: from the same state and the same messages it makes the same bits, whatever its
// threads and the others do. So the steps behind a copy of the state are run again from it, and each rank
// compares the fingerprints of all that it sent, received and held after each step (comm/witness.h). The
// first difference in the order of a rank's own program says whose fault it is. Where that is something that
// it sent, or held after a step, though all that it had received before was the same, the rank differs from
// itself. Where it is something that it received, and its sender sent the same both times, the message was
// changed on its way.
//
// Where the two differ the steps are run a third time. When two of the three agree, their state is that of a
// run which nobody disturbed, and the training goes on with it; else the job ends. Then ranks that hold the
// same elements compare these: a rank that makes the same mistake each time agrees with itself, and not with
// the others.
//
// What is not found: a mistake that a rank makes each time before what it has made is summed over ranks,
// which makes all of them equally wrong.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/witness.h"
#include "train/metrics.h"
#include "train/state_copy.h"

namespace echelon {

class ReplicaCheck {
 public:
  // All outlive it. Every rank makes one.
  ReplicaCheck(const Rank& rank, Trainer& trainer, Witness& witness);

  // The steps from here on will be run again.
  void begin(std::int64_t step);
  bool under_way() const { return copied_; }
  // Around each step, when it is run first.
  void begin_step(std::int64_t step);
  void end_step();
  // The step ended in an error, on every rank alike.
  void end_broken_step(std::exception_ptr error);

  struct Result {
    std::optional<Corruption> corruption;  // where it is not repaired, the run must end()
    std::vector<StepResult> steps;  // since begin(), as they are right; empty where nothing was run again
  };
  // After the last of the steps since begin(), each of which `run` runs again; the same on every rank.
  // Without begin() replicas are compared, and no more.
  Result check(std::int64_t end, const std::function<StepResult(std::int64_t step)>& run);
  // RunError, by the rank that is at fault.
  [[noreturn]] void end(const Corruption& corruption) const;

 private:
  struct Execution {
    Witness::Log log;
    std::vector<StepResult> results;
    std::exception_ptr error;
  };
  struct Finding;  // of one rank
  Execution execute(std::int64_t end, const std::function<StepResult(std::int64_t step)>& run);
  Finding finding(const Execution& before, const Execution& again) const;
  // Over all ranks: what is to be said of the first fault, if there is one. In words, but for the step that
  // it is found after.
  std::optional<Corruption> compare(const Execution& before, const Execution& again) const;
  // Of the state behind so many steps: as they were taken when the last one had ended, or now.
  const StateFingerprints& fingerprints_after(std::int64_t steps);
  std::optional<Corruption> sent_again() const;
  std::optional<Corruption> compare_replicas(std::int64_t end);
  template <class T>
  std::vector<T> tell_all(const T& mine) const;

  const Rank& rank_;
  Witness& witness_;
  const std::unique_ptr<Communicator> group_;  // of all ranks, beside the training
  StateCopy copy_;
  std::uint32_t state_stream_;
  bool copied_ = false;
  std::int64_t step_ = 0;  // that is watched
  std::exception_ptr broken_;
  StateFingerprints last_;       // after a step that was watched
  std::int64_t last_step_ = -1;  // which is this, from 1
  std::vector<Witness::Repeat> repeats_;
};

}  // namespace echelon
