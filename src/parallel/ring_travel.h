// Sends each rank's part of a sequence around a ring: after R-1 exchanges with its neighbours, a rank has
// held the parts of all R ranks.
#pragma once

#include <utility>

#include "comm/exchange.h"
#include "comm/rank.h"

namespace echelon {

// The current part, and the exchange for the next one.
class RingTravel {
 public:
  // `rank` and `ring` outlive this. own: contiguous, with the same shape on each rank. `are_keys`: traced as
  // keys and values.
  RingTravel(const Rank& rank, Communicator& ring, Tensor own, bool are_keys = true)
      : rank_(&rank), ring_(&ring), recorder_(are_keys ? rank.recorder() : nullptr), here_(std::move(own)) {}

  const Tensor& here() const { return here_; }
  int next() const { return around(ring_->rank() + 1, ring_->size()); }
  int previous() const { return around(ring_->rank() - 1, ring_->size()); }
  // The ring index whose part is here at a step, and the step at which a ring index's part is here.
  int source(int step) const { return around(ring_->rank() - step, ring_->size()); }
  int step_of(int ring_index) const { return source(ring_index); }

  // start() before computing with the current part, finish() after it.
  void start() {
    if (recorder_ != nullptr) asked_ = recorder_->now();
    arriving_ = Tensor(rank_->arena(), MemoryCategory::activations, here_.dtype(), here_.shape());
    sent_ = ring_->send(here_, next());
    received_ = ring_->recv(arriving_, previous());
  }
  void finish() {
    received_.wait();
    const int from = source(++steps_);
    if (recorder_ != nullptr) recorder_->add({Activity::keys_arriving, from, asked_, recorder_->now()});
    sent_.wait();
    here_ = std::exchange(arriving_, {});
  }

 private:
  const Rank* rank_;
  Communicator* ring_;
  TraceRecorder* recorder_;
  Tensor here_, arriving_;
  Pending sent_, received_;
  TraceTime asked_ = 0;
  int steps_ = 0;  // taken
};

}  // namespace echelon
