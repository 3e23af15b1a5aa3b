// Seconds of what a step does with gradients and the optimizer's state beside the passes through the layers:
// reductions and gathers along dp, and the optimizer.
#pragma once

#include <algorithm>

#include "plan/footprint.h"
#include "plan/op_seconds.h"
#include "plan/workload.h"

namespace echelon {

// What communication adds to computation beside which it runs: what sticks out, and the slow-down of both.
double added_seconds(double compute, double communication, double slowdown);

class StateSeconds {
 public:
  // Both outlive this.
  StateSeconds(const Workload& work, const OpSeconds& ops)
      : work_(work), ops_(ops), bytes_(parameter_bytes(work)) {}

  struct Exchange {
    double reduce = 0, gather = 0;
  };
  // The exchange of all these gradients, and of the values where ZeRO shards them, in so many layers.
  Exchange exchange(const Plan& c, const ShareCounts& counts, double layers) const;
  // Whether a microbatch's passes gather parameters (ZeRO 3) or sum gradients over the ranks.
  bool adds_to_passes(const Plan& c) const;
  // What that adds to a microbatch's passes through these parameters' layer, and of it what the way to the
  // host and back does.
  struct Added {
    double seconds = 0, of_host = 0;
  };
  Added unit_adds(const Plan& c, const ShareCounts& counts, double forward, double backward) const;
  // What of reductions after a rank's last backward pass and gathers before its first forward pass is not
  // hidden beside them; not of what is in the passes, see above.
  double exposed(const Plan& c, const ShareCounts& counts, double layers, double forward,
                 double backward) const;
  // What the ranks that hold copies of an expert sum of its gradients, once a step: of what each keeps of the
  // sum over its own group.
  struct Copies {
    double seconds = 0, bytes = 0;  // that a rank sends
  };
  Copies copies(const Plan& c, const ShareCounts& counts) const;
  // The same of two pipeline ranks, so many ranks apart: each holds the stages of the other (DualPipe).
  Copies of_same_stages(const Plan& c, const ShareCounts& counts, std::int64_t apart) const;
  // The same of so many elements that both hold.
  Copies of_two_ranks(double elements, std::int64_t apart) const;
  // What a tp rank sums over its group.
  Copies over_tp(const Plan& c, const ShareCounts& counts) const;
  // With what the host and the link to it take.
  double optimizer(const Plan& c, const ShareCounts& counts) const;
  // That part of it.
  double host(const Plan& c, const ShareCounts& counts) const;
  // What of a layer's activations, so many bytes, a microbatch waits for on their way to the host and back.
  double activations(const Plan& c, double saved, double forward, double backward) const;
  // That a rank sends and gets over the link to its host in a step but for activations, whose stages each see
  // so many microbatches.
  double host_traffic(const Plan& c, const ShareCounts& counts, double microbatches) const;
  // That a rank sends in a step, whose stages each see so many microbatches.
  double bytes(const Plan& c, const ShareCounts& counts, double microbatches) const;

 private:
  bool reduces_whole(const Plan& c) const;
  // Of these what is gathered once more for the backward pass.
  ShareCounts gathered_again(const ShareCounts& counts) const;
  double over_link(double bytes) const;
  double in_host_memory(double bytes) const;
  // Of each own element that a pass gathers from the host: FSDP's is the copy in 32 bits, of which the device
  // makes the values.
  static double comes_up(const OffloadedBytes& off) { return off.value > 0 ? std::max(4.0, off.value) : 0; }
  // Of each own element of the optimizer's update on the host: what goes down before it and comes up after
  // it.
  double update_down(const OffloadedBytes& off) const { return bytes_.gradient - off.gradient; }
  double update_up(const OffloadedBytes& off) const { return bytes_.value - off.value; }
  double device_update(const Plan& c, const ShareCounts& counts) const;
  double in_calls(Verb verb, double bytes, double calls, const RankGroups& groups) const;

  const Workload& work_;
  const OpSeconds& ops_;
  ParameterBytes bytes_;
};

}  // namespace echelon
