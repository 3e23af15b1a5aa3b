// Bytes that a device will hold under a training program of today, by category: states by ZeRO's stage,
// saved tensors by the schedule's own peak. For the trainer of this repository a plan has what
// plan/memory counts.
#pragma once

#include <vector>

#include "plan/layers_by_kind.h"
#include "plan/workload.h"
#include "spec/memory.h"

namespace echelon {

// Parameters that one tp rank holds.
struct ParameterCounts {
  PerKind layer{};                           // a layer, without experts that tokens are routed to
  PerKind routed{};                          // all routed experts of a layer, uncut
  double embedding = 0, head = 0, tied = 0;  // tied: of a copy at the other end of the pipeline
  double head_routed = 0;                    // of a module that predicts one more token, uncut
  // Of a layer those that several tp ranks hold: whole, and used on rows or on heads of a rank's own; and
  // heads of which there are fewer than ranks, as many as all ranks would send as much of.
  PerKind of_rows{}, of_heads{}, repeated{};
};
ParameterCounts parameter_counts(const ModelSpec& model, int tp);

// Of each parameter: what is kept (its value, its gradient, the optimizer's state), and what travels of it.
// In f32 the values need no second copy in 32 bits, and nothing travels in less.
struct ParameterBytes {
  double value = 2, gradient = 4, optimizer = 12, reduced = 4, gathered = 2;
};
ParameterBytes parameter_bytes(const Workload& work);

// Of these what the plan's offloading keeps on the host.
struct OffloadedBytes {
  double value = 0, gradient = 0, optimizer = 0;
};
OffloadedBytes offloaded_bytes(const Workload& work, const Plan& c);

// Bytes of one microbatch. 16-bit, dropout, unfused attention: s b h (10 + 24/t + 5 a s/(h t)) a layer, all
// of it over t under sequence parallelism, without the last term under selective recomputation (Korthikanti
// et al. 2022, table 2).
struct SavedBytes {
  PerKind layer{};      // kept from the forward to the backward pass
  PerKind waiting{};    // and from there, where B and W are apart, until W; of others than this trainer, all
  PerKind working{};    // comes and goes in a layer's backward pass
  double head = 0;      // of the output layer while it runs
  double boundary = 0;  // one activation between stages
  double logits = 0;    // as the output matrix leaves them
};
SavedBytes saved_bytes(const Workload& work, const Plan& c, const Recompute& recompute);

// Where activations are offloaded a layer at work and the next one have theirs on the device.
inline constexpr double layers_here = 2;

// Parameters of a share that its dp ranks cut under ZeRO: those of experts over another group.
struct ShareCounts {
  double common = 0, routed = 0;
  // Of the common ones those that this trainer gathers for a microbatch's backward pass too (ZeRO 3): it runs
  // the output layer forwards and backwards at once, and looks nothing up backwards.
  double read_twice = 0;
  double summed_over_tp = 0;  // those whose gradients each tp rank has a part of
};

// What one pipeline rank holds of the model, and how much is in flight on it.
struct RankShare {
  PerKind layers{};
  bool embedding = false, tied_copy = false;
  double head = 0;           // its part of the output layer
  double largest_stage = 1;  // its part of the rank's parameters
  // Layers times the microbatches that each has in flight, where the rank may hold most: whose backward pass
  // comes, and of which only W is left.
  struct InFlight {
    PerKind layers{}, waiting{};
    // Of this trainer, which makes room for a gradient when it comes: what has one then. The output layer's
    // comes with the logits.
    PerKind with_gradients{};
    bool embedding_gradient = false;
    ShareCounts gradients{};
    double bytes(const SavedBytes& saved) const {
      return product_sum(layers, saved.layer) + product_sum(waiting, saved.waiting);
    }
  };
  std::vector<InFlight> in_flight;
};

// Of these what is on the device, where activations are offloaded: of the layers those that keep most.
RankShare::InFlight in_flight_here(const Plan& c, const SavedBytes& saved, const RankShare::InFlight& all);
// And the most that lies on the host.
double activations_on_host(const Plan& c, const SavedBytes& saved, const RankShare& share);

// Of a share what one dp rank keeps of the optimizer's state.
double own_elements(const Plan& c, const ShareCounts& counts);
ShareCounts share_counts(const ParameterCounts& counts, const Plan& c, const RankShare& share);

Memory footprint(const Workload& work, const Plan& c, const ParameterCounts& counts, const SavedBytes& saved,
                 const RankShare& share);

// What a footprint is the sum of: `count` of something, of `bytes` each, over so many ranks.
struct MemoryTerm {
  MemoryCategory category = MemoryCategory::other;
  const char* what = "";
  double count = 0, bytes = 0, ranks = 1;

  double total() const { return count * bytes / ranks; }
};
// Those that are not nothing.
std::vector<MemoryTerm> footprint_terms(const Workload& work, const Plan& c, const ParameterCounts& counts,
                                        const SavedBytes& saved, const RankShare& share);

}  // namespace echelon
