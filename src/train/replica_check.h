// Detects silent data corruption: `train --check-replicas`. (Dixit et al. 2021,
// https://arxiv.org/abs/2102.11245; 6 of 419 interruptions of Llama 3's training were of this kind,
// https://arxiv.org/abs/2407.21783.)
//
// A rank is deterministic: from the same state and the same messages it computes the same bits, whatever its
// threads and other ranks do. So the steps after a copy of the state run again from it, and each rank
// compares the fingerprints of all that it sent, received and held after each step (comm/witness.h). The
// first difference, in the order of a rank's own program, shows who is at fault. If something that it sent,
// or held after a step, differs although all that it had received before was the same, the rank itself is at
// fault. If something that it received differs and its sender sent the same both times, the message was
// corrupted on its way.
//
// If the two runs differ, the steps run a third time. If two of the three agree, their state is that of an
// undisturbed run, and training goes on with it; otherwise the job ends. Then ranks that hold the same
// elements compare these: a rank that repeats the same error agrees with itself, but not with the others.
//
// Not detected: an error that a rank repeats each time before its result is summed over ranks, which makes
// all of them equally wrong.
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

  // Steps from here on will be run again.
  void begin(std::int64_t step);
  bool under_way() const { return copied_; }
  // Called around each step in its first run.
  void begin_step(std::int64_t step);
  void end_step();
  // The step ended in an error, alike on every rank.
  void end_broken_step(std::exception_ptr error);

  struct Result {
    std::optional<Corruption> corruption;  // if it is not repaired, the run must end()
    // The correct results since begin(); empty if nothing was run again.
    std::vector<StepResult> steps;
  };
  // Called after the last step since begin(); `run` runs each of them again. The result is the same on every
  // rank. Without begin() only replicas are compared.
  Result check(std::int64_t end, const std::function<StepResult(std::int64_t step)>& run);
  // RunError, thrown by the rank at fault.
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
  // Over all ranks: describes the first fault, if any, except for the step after which it was found.
  std::optional<Corruption> compare(const Execution& before, const Execution& again) const;
  // Fingerprints of the state after `steps` steps: those taken when the last step ended, or new ones.
  const StateFingerprints& fingerprints_after(std::int64_t steps);
  std::optional<Corruption> sent_again() const;
  std::optional<Corruption> compare_replicas(std::int64_t end);
  template <class T>
  std::vector<T> tell_all(const T& mine) const;

  const Rank& rank_;
  Witness& witness_;
  const std::unique_ptr<Communicator> group_;  // of all ranks, separate from training
  StateCopy copy_;
  std::uint32_t state_stream_;
  bool copied_ = false;
  std::int64_t step_ = 0;  // being watched
  std::exception_ptr broken_;
  StateFingerprints last_;       // after a watched step
  std::int64_t last_step_ = -1;  // that step, counted from 1
  std::vector<Witness::Repeat> repeats_;
};

}  // namespace echelon
