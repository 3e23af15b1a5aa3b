// A plan as data: the model, mesh, batch, precision and all other choices of a run. `train` and `verify` read
// it from flags or a TOML file; the memory and traffic predictions and the trainer use the same struct.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/split.h"
#include "spec/choices.h"
#include "spec/compression.h"
#include "spec/context_layout.h"
#include "spec/device.h"
#include "spec/mesh.h"
#include "spec/model_spec.h"
#include "spec/numerics.h"
#include "spec/optimizer.h"
#include "spec/precision.h"
#include "spec/recompute.h"
#include "spec/routing.h"
#include "spec/shard_layout.h"

namespace echelon {

// How many tokens the output layer takes at once: enough for efficient matrix products, few enough to take
// little memory. With gradients of logits in two bytes, more, since products are then fast, and each chunk
// reads the table and adds to its gradient. A GPU needs more to be busy.
inline std::int64_t logits_chunk_rows(Device device, std::int64_t gradient_bytes) {
  if (device != Device::cpu) return 2048;
  return gradient_bytes == 2 ? 1024 : 512;
}
// For how many rows of a chunk logits exist at once that are twice as wide as their gradients: the fewest
// with which two products make all, in whole tiles of a product (LogitsRoom).
inline std::int64_t wide_logits_rows(std::int64_t chunk_rows) {
  constexpr std::int64_t whole = 64;
  return std::min(chunk_rows, ((2 * chunk_rows + 2) / 3 + whole - 1) / whole * whole);
}

// Gradients are reduced in buckets of this size: large enough to amortize the latency of a collective (Li et
// al. 2020).
inline constexpr std::int64_t default_bucket_bytes = std::int64_t{25} << 20;

// Elements of each moment that a speculative optimizer step works on at a time.
inline constexpr std::int64_t guessed_moments = 1 << 16;

// What is kept in a memory-mapped file instead of in memory: the optimizer's moments, the activations that
// layers keep for the backward pass, or both.
enum class Offload { none, optimizer, activations, both };
template <>
inline constexpr std::array choice_names<Offload>{"none", "optimizer", "activations", "both"};

// "optimizer state and activations"
const char* offloaded_words(Offload offload);

// What `plan` predicted this plan for, so that it can predict it again. Training ignores it. Empty if `plan`
// did not make it.
struct Priced {
  std::string machine, software, dtype;
  int node = 0;  // devices per node
  bool operator==(const Priced&) const = default;
};

struct Plan {
  ModelSpec model;
  Mesh mesh;
  bool sequence_parallel = false;  // takes effect only with tp > 1
  std::int64_t global_batch = 1;   // sequences of a step, over all data-parallel ranks
  std::int64_t micro_batch = 1;    // sequences of a microbatch; the last one of a rank may be smaller
  std::int64_t seq_len = 1;
  PrecisionRecipe precision;
  Numerics numerics = Numerics::ordinary;
  OptimizerKind optimizer = OptimizerKind::adamw;
  PipelineRecompute recompute;
  std::string schedule = "1f1b";  // of the pipeline, where pp > 1
  // A custom schedule in text form (schedule/text.h), named by `schedule`; empty: a built-in one.
  std::string schedule_text;
  int chunks = 0;  // model chunks of each pipeline rank; 0: as many as the schedule has by default
  std::vector<std::int64_t> layers_per_stage;  // empty: even, or
  // Distributes layers so that the slowest rank has the least work, output layer included.
  bool balance_layers = false;
  // Cuts the output layer over the pipeline ranks (schedule/vocabulary.h).
  bool vocabulary_parallel = false;
  // Whether the optimizer step waits for the gradient norm of all pipeline ranks. Without the wait, a step
  // that turns out to be wrong is undone exactly.
  bool optimizer_barrier = true;
  // ZeRO stage (parallel/zero.h): which data-parallel state is sharded instead of replicated. 1: optimizer
  // state, 2: gradients too, 3: parameters too.
  int zero = 0;
  int hsdp = 1;  // replicas of the sharding group, which is then a block of dp / hsdp neighbouring ranks
  int zero_prefetch = 1;  // layer groups that ZeRO 3 gathers ahead of use
  // Least size of a gradient bucket along dp without ZeRO; ZeRO reduces layer by layer.
  std::int64_t bucket_bytes = default_bucket_bytes;
  Compression compression;  // of gradients along dp
  Offload offload = Offload::none;
  std::string offload_directory;  // for the file; empty: the system's directory for temporary files
  Balancing balancing;            // of a mixture of experts
  Priced priced;

  bool offloads_optimizer() const { return offload == Offload::optimizer || offload == Offload::both; }
  bool offloads_activations() const { return offload == Offload::activations || offload == Offload::both; }

  bool shards_sequence() const { return sequence_parallel && mesh.size(Axis::tp) > 1; }
  // Context parallelism (parallel/context_parallel.h), with cp > 1.
  ContextKind context_kind = ContextKind::ring;
  ContextBalance context_balance = ContextBalance::zigzag;
  int ulysses = 1;  // hybrid: the number of neighbouring cp ranks that exchange heads
  AttentionMask mask = AttentionMask::causal;
  // The token that ends a document; -1: the last one, as in the byte and GPT-2 vocabularies.
  int document_end = -1;

  std::int32_t end_of_document() const {
    return document_end >= 0 ? document_end : static_cast<std::int32_t>(model.vocab - 1);
  }
  // Tokens of a sequence that each rank holds.
  std::int64_t tokens_here() const { return seq_len / mesh.size(Axis::cp); }
  // How many ranks the data-parallel state is sharded over: blocks of neighbours. Routed experts are sharded
  // over those of a block that hold the same ones.
  int shards() const { return zero == 0 ? 1 : mesh.dp_cp_size() / hsdp; }
  Shards all_shards() const { return {shards(), zero_stage() == 0 ? 1 : shards() / mesh.ep}; }
  Shards shard_index(const Coordinates& at) const {
    const int index = mesh.dp_cp_index(at) % shards();
    return {index, zero_stage() == 0 ? 0 : index / mesh.ep};
  }
  bool cuts_vocabulary() const { return vocabulary_parallel && mesh.pp() > 1; }
  // The ZeRO stage in effect: 0 if there is only one rank to shard over.
  int zero_stage() const { return shards() == 1 ? 0 : zero; }
};

// RequestError naming the flag, the value and the legal values if this plan cannot be run exactly. The plan
// passes with the values that the message calls legal.
void validate(const Plan& plan);

// Whether two passes that a schedule overlaps (DualPipe) alternate where tokens travel to experts on other
// ranks, so that computation of one hides the exchange of the other. Not if parameters are gathered for their
// uses in order.
bool interleaves_pairs(const Plan& plan);

// The sequences of the global batch that data-parallel rank `dp_rank` computes, as sample numbers [begin,
// end).
Range dp_samples(const Plan& plan, int dp_rank);

// The most sequences that a rank computes at once: a microbatch, or its share of the batch if that is less.
std::int64_t sequences_at_once(const Plan& plan);

// The samples of each microbatch of a data-parallel rank, in order. Ranks that share experts must meet in
// every microbatch, and from ZeRO 2 on so must ranks that share state: those with fewer microbatches get
// empty ones at the end.
std::vector<Range> microbatches(const Plan& plan, int dp_rank);

// Parses a plan. Missing fields get the defaults of their flags. RequestError naming the key, its value and
// what is legal.
Plan plan_from_toml(const std::string& text, const std::string& where);
std::string to_toml(const Plan& plan);

}  // namespace echelon
