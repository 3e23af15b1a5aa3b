#include "plan/footprint.h"

#include <algorithm>

#include "base/real.h"
#include "spec/flat_layout.h"

namespace echelon {
namespace {

double held(const std::vector<ParamSpec>& list, int tp, bool routed) {
  double sum = 0;
  for (const ParamSpec& p : list)
    if ((p.expert >= 0) == routed) sum += routed ? real(p.numel()) : real(local_numel(p, tp, 0));
  return sum;
}

// Parameters that are whole on each tp rank, and whose gradients come from the rank's own rows of the
// sequence, or from its own heads.
double partial(const std::vector<ParamSpec>& list, bool of_rows) {
  double sum = 0;
  for (const ParamSpec& p : list)
    if (of_rows ? p.rows_are_sequence_sharded : p.tp_partial) sum += real(p.numel());
  return sum;
}

// A head that several tp ranks hold is summed over these ranks only: counted as the elements for which an
// all-reduce over all tp ranks would send as much.
double repeated(const std::vector<ParamSpec>& list, int tp) {
  double sum = 0;
  for (const ParamSpec& p : list)
    for (const Piece& piece : p.pieces) {
      const double heads = real(piece.length / piece.unit);
      if (!piece.repeats || heads >= tp) continue;
      const double row = real(p.numel()) / real(p.shape[static_cast<std::size_t>(p.shard_dim)]);
      sum += real(piece.unit) * row * (1 - heads / tp) / (1 - 1.0 / tp);
    }
  return sum;
}

MuonWork muon_work(const std::vector<ParamSpec>& list, int tp, OptimizerKind optimizer, bool routed,
                   double& largest) {
  MuonWork work;
  for (const ParamSpec& p : list)
    if ((p.expert >= 0) == routed && is_updated_whole(optimizer, p)) {
      ++work.matrices;
      work.elements += routed ? real(p.numel()) : real(local_numel(p, tp, 0));
      work.flops += muon_flops(p);
      largest = std::max(largest, muon_flops(p));
    }
  return work;
}

MuonWork operator*(double times, const MuonWork& work) {
  return {times * work.matrices, times * work.elements, times * work.flops};
}
MuonWork operator+(const MuonWork& a, const MuonWork& b) {
  return {a.matrices + b.matrices, a.elements + b.elements, a.flops + b.flops};
}

}  // namespace

ParameterCounts parameter_counts(const ModelSpec& m, int tp, OptimizerKind optimizer) {
  ParameterCounts counts;
  double& largest = counts.largest_muon_flops;
  std::size_t k = 0;
  for (const LayerKind& kind : layer_kinds(m)) {
    const auto block = block_parameters(m, kind.layer);
    counts.layer[k] = held(block, tp, false);
    counts.of_rows[k] = partial(block, true);
    counts.of_heads[k] = partial(block, false);
    counts.repeated[k] = repeated(block, tp);
    counts.muon[k] = muon_work(block, tp, optimizer, false, largest);
    counts.muon_routed[k] = muon_work(block, tp, optimizer, true, largest);
    counts.routed[k++] = held(block, tp, true);
  }
  counts.head_muon = muon_work(head_parameters(m), tp, optimizer, false, largest);
  counts.head_muon_routed = muon_work(head_parameters(m), tp, optimizer, true, largest);
  counts.embedding = held(embedding_parameters(m), tp, false);
  counts.head = held(head_parameters(m), tp, false);
  counts.head_routed = held(head_parameters(m), tp, true);
  if (m.tied_embedding || m.num_mtp_layers > 0)
    counts.tied = real(local_numel(embedding_parameters(m).front(), tp, 0));
  return counts;
}

ParameterBytes parameter_bytes(const Workload& work) {
  const Software& s = work.software;
  if (work.precision == Precision::f32) {
    constexpr double width = 4;
    const double copy = s.value_bytes < width ? s.master_bytes : 0;
    return {width, std::max(width, s.gradient_bytes), std::max(0.0, s.optimizer_bytes - copy), width, width};
  }
  // fp8 products read parameters in 8 bits: casting these before they travel halves the all-gathers.
  // (Embedding and output matrix stay in 16 bits, but are counted the same way here.)
  const bool narrow = work.precision == Precision::fp8 && s.narrow_parameters;
  return {s.value_bytes, s.gradient_bytes, s.optimizer_bytes, s.reduced_bytes, narrow ? 1.0 : 2.0};
}

// Values in 16 bits have a copy in 32 bits beside the moments.
OffloadedBytes offloaded_bytes(const Workload& work, const Plan& c) {
  const Software& s = work.software;
  OffloadedBytes off;
  if (!c.offloads_optimizer() || !s.offloads) return off;
  const auto has = [&](const char* what) {
    return std::find(s.offloads->begin(), s.offloads->end(), what) != s.offloads->end();
  };
  const ParameterBytes bytes = parameter_bytes(work);
  const double masters =
      bytes.value < element_bytes(DType::f32) ? std::min(s.master_bytes, bytes.optimizer) : 0;
  off.optimizer = (has("masters") ? masters : 0) + (has("moments") ? bytes.optimizer - masters : 0);
  if (has("gradients") && gradient_sums(s, c).keeps_shards) off.gradient = bytes.gradient;
  if (has("parameters") && c.zero == 3) off.value = bytes.value;
  return off;
}

StateShards state_shards(const Plan& c) {
  if (c.zero == 0) return {};
  const double ranks = static_cast<double>(c.mesh.dp_cp_size()) / c.hsdp;
  return {ranks, std::max(1.0, ranks * c.mesh.tp() / c.mesh.expert_ranks())};
}

double own_elements(const Plan& c, const ShareCounts& counts) {
  const StateShards shards = state_shards(c);
  return counts.common / shards.common + counts.routed / shards.routed;
}

double own_muon_elements(const Plan& c, const ShareCounts& counts) {
  ShareCounts of_muon;
  of_muon.common = counts.muon.elements;
  of_muon.routed = counts.muon_routed.elements;
  return own_elements(c, of_muon);
}

RankShare::InFlight in_flight_here(const Plan& c, const SavedBytes& saved, const RankShare::InFlight& all) {
  if (!c.offloads_activations()) return all;
  RankShare::InFlight here;
  here.waiting = all.waiting;
  double room = layers_here;
  PerKind left = all.layers;
  while (room > 0 && sum_of(left) > 0) {
    std::size_t most = most_layer_kinds;
    for (std::size_t k = 0; k < most_layer_kinds; ++k)
      if (left[k] > 0 && (most == most_layer_kinds || saved.layer[k] > saved.layer[most])) most = k;
    here.layers[most] = std::min(room, left[most]);
    room -= here.layers[most];
    left[most] = 0;
  }
  return here;
}

double activations_on_host(const Plan& c, const SavedBytes& saved, const RankShare& share) {
  double most = 0;
  for (const RankShare::InFlight& all : share.in_flight)
    most = std::max(most, all.bytes(saved) - in_flight_here(c, saved, all).bytes(saved));
  return most;
}

ShareCounts share_counts(const ParameterCounts& counts, const Plan& c, const RankShare& share) {
  ShareCounts sum;
  const double layers = product_sum(share.layers, counts.layer);
  sum.common = layers + (share.embedding ? counts.embedding : 0) + share.head * counts.head +
               (share.tied_copy ? counts.tied : 0);
  sum.read_twice = layers + (share.embedding && share.head > 0 ? counts.tied : 0);
  if (c.mesh.tp() > 1)
    sum.summed_over_tp = product_sum(share.layers, counts.of_heads) +
                         product_sum(share.layers, counts.repeated) +
                         (c.shards_sequence() ? product_sum(share.layers, counts.of_rows) : 0);
  sum.routed =
      (product_sum(share.layers, counts.routed) + share.head * counts.head_routed) / c.mesh.expert_ranks();
  sum.muon = share.head * counts.head_muon;
  sum.muon_routed = share.head * counts.head_muon_routed;
  for (std::size_t k = 0; k < most_layer_kinds; ++k) {
    sum.muon = sum.muon + share.layers[k] * counts.muon[k];
    sum.muon_routed = sum.muon_routed + share.layers[k] * counts.muon_routed[k];
  }
  sum.muon_routed = 1.0 / c.mesh.expert_ranks() * sum.muon_routed;
  sum.largest_muon_flops = counts.largest_muon_flops;
  return sum;
}

// What is counted in flight: of the only kind of layers on a rank (kind == nullptr), or of one of several
// kinds.
static const char* layers_in_flight(const Plan& c, const LayerKind* kind) {
  const bool offloads = c.offloads_activations();
  if (kind == nullptr)
    return offloads ? "layers whose activations are here" : "layers x microbatches in flight";
  const LayerParts has = layer_parts(c.model, kind->layer);
  const bool mixed = has.experts && c.model.num_expert_layers() < c.model.num_layers;
  if (mixed && c.model.short_conv.kernel > 0 && has.short_conv)
    return offloads ? "layers with a convolution and experts whose activations are here"
                    : "layers with a convolution and experts x microbatches in flight";
  if (mixed && c.model.short_conv.kernel > 0)
    return offloads ? "layers with attention and experts whose activations are here"
                    : "layers with attention and experts x microbatches in flight";
  if (mixed)
    return offloads ? "layers of experts whose activations are here"
                    : "layers of experts x microbatches in flight";
  if (has.state_space)
    return offloads ? "layers with a state space whose activations are here"
                    : "layers with a state space x microbatches in flight";
  if (has.short_conv)
    return offloads ? "layers with a convolution whose activations are here"
                    : "layers with a convolution x microbatches in flight";
  if (has.attention && c.model.mixes_channels())
    return offloads ? "layers with attention whose activations are here"
                    : "layers with attention x microbatches in flight";
  return offloads ? "dense layers whose activations are here" : "dense layers x microbatches in flight";
}

// Calls `put` for each MemoryTerm except activations between passes, and `hold` for these: with a kind of
// layers, how many of them are in flight, and the bytes of one.
template <class Put, class Hold>
static void each_term(const Workload& work, const Plan& c, const ParameterCounts& counts,
                      const SavedBytes& saved, const RankShare& share, const Put& put, const Hold& hold) {
  const ParameterBytes bytes = parameter_bytes(work);
  const OffloadedBytes off = offloaded_bytes(work, c);
  const GradientSums sums = gradient_sums(work.software, c);
  const ShareCounts here = share_counts(counts, c, share);
  const double shards = c.shards();
  const double routed_shards =
      std::max(1.0, c.zero == 0 ? 1.0 : shards * c.mesh.tp() / c.mesh.expert_ranks());
  // The moment at which this trainer holds most of activations plus gradients, for which it allocates memory
  // as they are computed.
  RankShare::InFlight most;
  most.gradients = here;
  double activations = 0, of_both = -1;
  for (const RankShare::InFlight& all : share.in_flight) {
    RankShare::InFlight on_device = in_flight_here(c, saved, all);
    const double held = on_device.bytes(saved);
    double both = held;
    if (work.software.is_this_trainer)
      both += bytes.gradient * (all.gradients.common / (sums.keeps_shards ? shards : 1) +
                                all.gradients.routed / (sums.keeps_shards ? routed_shards : 1));
    if (both <= of_both) continue;
    of_both = both, activations = held;
    on_device.gradients = work.software.is_this_trainer ? all.gradients : here;
    most = on_device;
  }
  using C = MemoryCategory;
  const auto states_of = [&](const ShareCounts& of, MemoryCategory category, const char* what,
                             const char* of_experts, double width, bool is_cut, double part = 1) {
    put({category, what, part * of.common, width, is_cut ? shards : 1});
    if (of.routed > 0) put({category, of_experts, part * of.routed, width, is_cut ? routed_shards : 1});
  };
  const auto states = [&](auto... rest) { states_of(here, rest...); };
  states(C::parameters, "parameters", "parameters of experts", bytes.value - off.value, c.zero >= 3);
  states_of(most.gradients, C::gradients, "gradients", "gradients of experts", bytes.gradient - off.gradient,
            sums.keeps_shards);
  if (sums.groups > 0)
    states(C::gradients, "whole gradients of a stage", "whole gradients of a stage's experts", bytes.gradient,
           false, share.largest_stage);
  states(C::optimizer, "optimizer states", "optimizer states of experts", bytes.optimizer - off.optimizer,
         c.zero >= 1);
  if (here.muon.elements + here.muon_routed.elements > 0) {
    ShareCounts of_muon;
    of_muon.common = here.muon.elements;
    of_muon.routed = here.muon_routed.elements;
    states_of(of_muon, C::optimizer, "second moments that Muon has not", "those of experts",
              -second_moment_bytes, c.zero >= 1);
  }
  double layer = 0, in_layer = 0;
  for (std::size_t k = 0; k < most_layer_kinds; ++k)
    if (share.layers[k] > 0) {
      layer = std::max(layer, counts.layer[k] + counts.routed[k] / c.mesh.expert_ranks());
      in_layer = std::max(in_layer, saved.working[k]);
    }
  if (c.zero == 3 && !gathers_each_microbatch(work.software, c)) {
    states(C::communication, "gathered parameters", "gathered parameters of experts", bytes.gathered, false);
  } else if (c.zero == 3) {
    const double largest = std::max({2 * layer, share.embedding ? counts.embedding : 0,
                                     share.head > 0 ? share.head * counts.head + counts.tied : 0});
    put({C::communication, "gathered parameters, of this layer and the next or of an end", largest,
         bytes.value});
  }
  if (sums.keeps_shards && sums.groups == 0)
    put({C::communication, "whole gradients of a layer", layer, bytes.reduced});
  for (std::size_t k = 0; k < most_layer_kinds; ++k)
    if (most.layers[k] > 0) hold(k, most.layers[k], saved.layer[k]);
  if (const double waiting = product_sum(most.waiting, saved.waiting); waiting > 0)
    put({C::activations, "what gradients of weights wait for", 1, waiting});
  const double head = share.head * saved.head, working = std::max(in_layer, head);
  put({C::activations, head > in_layer ? "the output layer at work" : "a layer at work", 1, working});
  if (c.mesh.pp() > 1) put({C::communication, "messages between stages", 4, saved.boundary});
  put({C::other, "what the allocator cannot give out", work.software.fragmentation, activations + working});
}

Memory footprint(const Workload& work, const Plan& c, const ParameterCounts& counts, const SavedBytes& saved,
                 const RankShare& share) {
  Memory memory;
  const auto put = [&](const MemoryTerm& term) {
    memory[term.category] += static_cast<std::int64_t>(term.total());
  };
  each_term(work, c, counts, saved, share, put, [&](std::size_t, double layers, double bytes) {
    put({MemoryCategory::activations, "", layers, bytes});
  });
  return memory;
}

std::vector<MemoryTerm> footprint_terms(const Workload& work, const Plan& c, const ParameterCounts& counts,
                                        const SavedBytes& saved, const RankShare& share) {
  std::vector<MemoryTerm> terms, held;
  std::vector<std::size_t> kinds;
  std::size_t at = 0;  // where the held terms go
  const auto put = [&](const MemoryTerm& term) {
    if (term.total() >= 1) terms.push_back(term);
  };
  each_term(work, c, counts, saved, share, put, [&](std::size_t kind, double layers, double bytes) {
    if (held.empty()) at = terms.size();
    held.push_back({MemoryCategory::activations, "", layers, bytes});
    kinds.push_back(kind);
  });
  const std::vector<LayerKind> all = layer_kinds(c.model);
  for (std::size_t i = 0; i < held.size(); ++i)
    held[i].what = layers_in_flight(c, held.size() > 1 ? &all[kinds[i]] : nullptr);
  terms.insert(terms.begin() + static_cast<std::ptrdiff_t>(at), held.begin(), held.end());
  return terms;
}

}  // namespace echelon
