// Predicts the bytes that a device will hold under current training programs, by category: states by ZeRO's
// stage, saved tensors by the schedule's own peak. Plans for this repository's own trainer use plan/memory
// instead.
#pragma once

#include <vector>

#include "plan/layers_by_kind.h"
#include "plan/saved_bytes.h"
#include "plan/workload.h"
#include "spec/memory.h"

namespace echelon {

// Parameters that one tp rank holds.
// The matrices that Muon makes whole: how many, their elements, held and uncut as those of
// ParameterCounts, and the FLOPs of a step. None if all is updated by AdamW.
struct MuonWork {
  double matrices = 0, elements = 0, flops = 0;
};
struct ParameterCounts {
  PerKind layer{};                           // a layer, without routed experts
  PerKind routed{};                          // all routed experts of a layer, uncut
  double embedding = 0, head = 0, tied = 0;  // tied: a copy at the other end of the pipeline
  double head_routed = 0;                    // in a module that predicts one more token, uncut
  // Of a layer, parameters that several tp ranks hold: whole ones that are applied to a rank's own rows or
  // own heads; and heads, if there are fewer heads than ranks (as the number of elements for which an
  // all-reduce over all tp ranks would send as much).
  PerKind of_rows{}, of_heads{}, repeated{};
  // By kind of layer, and of the head (a module that predicts one more token); of routed experts apart.
  std::array<MuonWork, most_layer_kinds> muon{}, muon_routed{};
  MuonWork head_muon, head_muon_routed;
  double largest_muon_flops = 0;  // of one matrix
};
ParameterCounts parameter_counts(const ModelSpec& model, int tp, OptimizerKind optimizer);

// Of AdamW, in f32.
inline constexpr double second_moment_bytes = 4;
// Bytes for each parameter: kept (its value, its gradient, the optimizer's state) and sent (reduced gradient,
// gathered value). In f32 the values need no second copy in 32 bits, and everything is sent in 32 bits.
struct ParameterBytes {
  double value = 2, gradient = 4, optimizer = 12, reduced = 4, gathered = 2;
};
ParameterBytes parameter_bytes(const Workload& work);

// Which of these bytes the plan's offloading keeps on the host.
struct OffloadedBytes {
  double value = 0, gradient = 0, optimizer = 0;
};
OffloadedBytes offloaded_bytes(const Workload& work, const Plan& c);

// If activations are offloaded, those of the layer at work and of the next one are on the device.
inline constexpr double layers_here = 2;

// Parameters of a share that its dp ranks cut under ZeRO; those of experts are cut over another group.
struct ShareCounts {
  double common = 0, routed = 0;
  // Of the common parameters, those that this trainer also gathers for a microbatch's backward pass (ZeRO 3):
  // it runs the output layer's two passes at once, and the backward pass of the embedding needs no lookup.
  double read_twice = 0;
  double summed_over_tp = 0;  // those of which each tp rank has a partial gradient
  double largest_muon_flops = 0;
  MuonWork muon{}, muon_routed{};  // of these, as one tp rank holds them; FLOPs of all tp ranks
};

// What one pipeline rank holds of the model, and how much is in flight on it.
struct RankShare {
  PerKind layers{};
  bool embedding = false, tied_copy = false;
  double head = 0;           // its fraction of the output layer
  double largest_stage = 1;  // its fraction of the rank's parameters
  // A moment at which the rank may hold most. Layers times the microbatches that each has in flight: waiting
  // for their backward pass (`layers`), or only for W (`waiting`).
  struct InFlight {
    PerKind layers{}, waiting{};
    // For this trainer, which allocates a gradient when it is first computed: which gradients exist then.
    // That of the output layer exists from its logits on.
    PerKind with_gradients{};
    bool embedding_gradient = false;
    ShareCounts gradients{};
    double bytes(const SavedBytes& saved) const {
      return product_sum(layers, saved.layer) + product_sum(waiting, saved.waiting);
    }
  };
  std::vector<InFlight> in_flight;
};

// What of this is on the device if activations are offloaded: the layers that keep most.
RankShare::InFlight in_flight_here(const Plan& c, const SavedBytes& saved, const RankShare::InFlight& all);
// The most bytes on the host.
double activations_on_host(const Plan& c, const SavedBytes& saved, const RankShare& share);

// How many ranks the optimizer's state is cut over: what all ranks of dp x cp hold alike, and routed experts.
struct StateShards {
  double common = 1, routed = 1;
};
StateShards state_shards(const Plan& c);
// How many elements of a share's optimizer state one dp rank keeps.
double own_elements(const Plan& c, const ShareCounts& counts);
// And of the state that Muon keeps: one moment.
double own_muon_elements(const Plan& c, const ShareCounts& counts);
ShareCounts share_counts(const ParameterCounts& counts, const Plan& c, const RankShare& share);

Memory footprint(const Workload& work, const Plan& c, const ParameterCounts& counts, const SavedBytes& saved,
                 const RankShare& share);

// A term of a footprint: `count` of something, of `bytes` each, divided over `ranks`.
struct MemoryTerm {
  MemoryCategory category = MemoryCategory::other;
  const char* what = "";
  double count = 0, bytes = 0, ranks = 1;

  double total() const { return count * bytes / ranks; }
};
// The terms of at least one byte.
std::vector<MemoryTerm> footprint_terms(const Workload& work, const Plan& c, const ParameterCounts& counts,
                                        const SavedBytes& saved, const RankShare& share);

}  // namespace echelon
