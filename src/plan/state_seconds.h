// Seconds of what a step does with gradients and the optimizer's state beside the passes through the layers:
// reductions and gathers along dp, and the optimizer.
#pragma once

#include "plan/configuration.h"
#include "plan/footprint.h"
#include "plan/op_seconds.h"

namespace echelon {

// What communication adds to computation beside which it runs: what sticks out, and the slow-down of both.
double added_seconds(double compute, double communication, double slowdown);

class StateSeconds {
 public:
  // Both outlive this.
  StateSeconds(const Workload& work, const OpSeconds& ops) : work_(work), ops_(ops) {}

  struct Exchange {
    double reduce = 0, gather = 0;
  };
  // Of all of these parameters' gradients, and of their values where ZeRO shards them; of so many layers.
  Exchange exchange(const Configuration& c, const ShareCounts& counts, double layers) const;
  // What ZeRO 3 adds to a microbatch's passes through these parameters' layer: its gathers before both, and
  // its reduction.
  double unit_adds(const Configuration& c, const ShareCounts& counts, double forward, double backward) const;
  // Of reductions behind a rank's last backward pass and gathers before its first forward pass, what is not
  // hidden beside them. 0 under ZeRO 3, see above.
  double exposed(const Configuration& c, const ShareCounts& counts, double layers, double forward,
                 double backward) const;
  double optimizer(const Configuration& c, const ShareCounts& counts) const;
  // That a rank sends in a step.
  double bytes(const Configuration& c, const ShareCounts& counts) const;

 private:
  bool reduces_whole(const Configuration& c) const;
  double gathered_bytes() const;
  double in_calls(Verb verb, double bytes, double calls, std::int64_t size, std::int64_t stride) const;

  const Workload& work_;
  const OpSeconds& ops_;
};

}  // namespace echelon
