// Seconds of what a step does with gradients and the optimizer's state besides the passes through layers:
// reductions and gathers along dp, and the optimizer.
#pragma once

#include <algorithm>

#include "plan/footprint.h"
#include "plan/op_seconds.h"
#include "plan/workload.h"

namespace echelon {

// The time that overlapping communication adds to computation: what is longer than the computation, and the
// slow-down of both.
double added_seconds(double compute, double communication, double slowdown);

class StateSeconds {
 public:
  // Both must outlive this.
  StateSeconds(const Workload& work, const OpSeconds& ops)
      : work_(work), ops_(ops), bytes_(parameter_bytes(work)) {}

  struct Exchange {
    double reduce = 0, gather = 0;
  };
  // Seconds to exchange all these gradients, and the values if ZeRO shards them, over `layers` layers.
  Exchange exchange(const Plan& c, const ShareCounts& counts, double layers) const;
  // Whether a microbatch's passes gather parameters (ZeRO 3), sum gradients over the ranks, or move either
  // between host and device.
  bool adds_to_passes(const Plan& c) const;
  // How much that adds to a microbatch's passes through the layer with these parameters; and the part that is
  // due to transfers to the host and back.
  struct Added {
    double seconds = 0, of_host = 0;
  };
  Added unit_adds(const Plan& c, const ShareCounts& counts, double forward, double backward) const;
  // The time of reductions after a rank's last backward pass, and of gathers before its first forward pass,
  // that passes do not hide. Without what is inside passes: see above.
  double exposed(const Plan& c, const ShareCounts& counts, double layers, double forward,
                 double backward) const;
  // Summing gradients over the ranks that hold copies of an expert, once per step: of the shard that each
  // keeps of the sum over its own group.
  struct Copies {
    double seconds = 0, bytes = 0;  // that a rank sends
  };
  Copies copies(const Plan& c, const ShareCounts& counts) const;
  // The same for pairs of ranks that hold each other's stages (DualPipe).
  Copies of_same_stages(const Plan& c, const ShareCounts& counts, const RankGroups& pairs) const;
  // The same for `elements` that both ranks of each pair hold.
  Copies of_pairs(double elements, const RankGroups& pairs) const;
  // The sum of partial gradients over a tp group.
  Copies over_tp(const Plan& c, const ShareCounts& counts) const;
  // Bytes that a rank sends along dp or tp to make whole matrices for Muon and to bring back their steps.
  double muon_bytes(const Plan& c, const ShareCounts& counts, Axis axis) const;
  // Seconds of the optimizer, including the host and its link.
  double optimizer(const Plan& c, const ShareCounts& counts) const;
  // Only that of the host and its link.
  double host(const Plan& c, const ShareCounts& counts) const;
  // How long a microbatch waits for a layer's activations (`saved` bytes) on their way to the host and back.
  double activations(const Plan& c, double saved, double forward, double backward) const;
  // Bytes that a rank exchanges with its host per step, both ways, without activations; its stages each run
  // `microbatches` microbatches.
  double host_traffic(const Plan& c, const ShareCounts& counts, double microbatches) const;
  // Bytes that a rank sends per step; its stages each run `microbatches` microbatches.
  double bytes(const Plan& c, const ShareCounts& counts, double microbatches) const;

 private:
  bool reduces_whole(const Plan& c) const;
  // The parameters among these that are gathered once more for the backward pass.
  ShareCounts gathered_again(const ShareCounts& counts) const;
  double over_link(double bytes) const;
  double in_host_memory(double bytes) const;
  // Bytes from the host for each own element that a pass gathers: FSDP keeps the 32-bit copy there, from
  // which the device makes the values.
  static double comes_up(const OffloadedBytes& off) { return off.value > 0 ? std::max(4.0, off.value) : 0; }
  // Bytes for each own element when the host runs the optimizer: to the host before the update, and to the
  // device after it.
  double update_down(const OffloadedBytes& off) const { return bytes_.gradient - off.gradient; }
  double update_up(const OffloadedBytes& off) const { return bytes_.value - off.value; }
  double device_update(const Plan& c, const ShareCounts& counts) const;
  double muon(const Plan& c, const ShareCounts& counts) const;
  // It travels in the type of activations, in fp8 too.
  double muon_element_bytes() const { return work_.precision == Precision::f32 ? 4 : 2; }
  double in_calls(Verb verb, double bytes, double calls, const RankGroups& groups) const;

  const Workload& work_;
  const OpSeconds& ops_;
  ParameterBytes bytes_;
};

}  // namespace echelon
