// What is to be run, as data: model, mesh, batch, precision. `train` and `verify` take it from flags or a
// TOML file; the memory and traffic predictions and the trainer itself read the same struct.
#pragma once

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
#include "spec/precision.h"
#include "spec/recompute.h"
#include "spec/routing.h"
#include "spec/shard_layout.h"

namespace echelon {

// Tokens whose logits exist at once in the output layer: large enough for the matrix product, small enough to
// be little memory. A GPU is filled by no fewer.
inline std::int64_t logits_chunk_rows(Device device) { return device == Device::cpu ? 512 : 2048; }

// Size of gradients that are reduced together: as much as hides the latency of many small messages (Li et al.
// 2020).
inline constexpr std::int64_t default_bucket_bytes = std::int64_t{25} << 20;

// Elements of each moment that a guessed optimizer step works on at a time.
inline constexpr std::int64_t guessed_moments = 1 << 16;

// What lies in a file that is mapped into memory instead of in memory: moments; what layers keep from their
// forward to their backward passes; both.
enum class Offload { none, optimizer, activations, both };
template <>
inline constexpr std::array choice_names<Offload>{"none", "optimizer", "activations", "both"};

// "optimizer state and activations"
const char* offloaded_words(Offload offload);

// What `plan` priced a plan for, so that it can price it again; nothing of it trains. Empty where nobody did.
struct Priced {
  std::string machine, software, dtype;
  int node = 0;  // devices of a node
  bool operator==(const Priced&) const = default;
};

struct Plan {
  ModelSpec model;
  Mesh mesh;
  bool sequence_parallel = false;  // effective only where tp > 1
  std::int64_t global_batch = 1;   // sequences of one step, over all data-parallel ranks
  std::int64_t micro_batch = 1;    // sequences of one microbatch; the last one of a rank may be smaller
  std::int64_t seq_len = 1;
  PrecisionRecipe precision;
  Numerics numerics = Numerics::ordinary;
  PipelineRecompute recompute;
  std::string schedule = "1f1b";  // of the pipeline, where pp > 1
  // A schedule of one's own in text form (schedule/text.h); `schedule` is then its name.
  std::string schedule_text;
  int chunks = 0;  // model chunks of a pipeline rank; 0: the schedule's own number
  std::vector<std::int64_t> layers_per_stage;  // empty: even, or
  bool balance_layers = false;  // so that the slowest rank has least to do, output layer included
  bool vocabulary_parallel =
      false;  // the output layer is cut over the pipeline's ranks (schedule/vocabulary.h)
  // Whether the optimizer's step waits for all pipeline ranks; without it a wrong step is taken back exactly.
  bool optimizer_barrier = true;
  // ZeRO (parallel/zero.h): what of the data-parallel state is cut over ranks instead of held by each. 1:
  // optimizer state, 2: gradients too, 3: parameters too.
  int zero = 0;
  int hsdp = 1;           // replicas of the group that it is cut over: blocks of dp / hsdp neighbouring ranks
  int zero_prefetch = 1;  // layer groups that ZeRO 3 gathers ahead of the one that computes
  // Gradients that are reduced together along dp, at least, where nothing is cut; ZeRO reduces layer by
  // layer.
  std::int64_t bucket_bytes = default_bucket_bytes;
  Compression compression;  // of the gradients that travel along dp
  Offload offload = Offload::none;
  std::string offload_directory;  // of the file; empty: the system's place for temporary files
  Balancing balancing;            // of a mixture's experts
  Priced priced;

  bool offloads_optimizer() const { return offload == Offload::optimizer || offload == Offload::both; }
  bool offloads_activations() const { return offload == Offload::activations || offload == Offload::both; }

  bool shards_sequence() const { return sequence_parallel && mesh.size(Axis::tp) > 1; }
  // Context parallelism (parallel/context_parallel.h), where cp > 1.
  ContextKind context_kind = ContextKind::ring;
  ContextBalance context_balance = ContextBalance::zigzag;
  int ulysses = 1;  // hybrid: neighbouring cp ranks that exchange heads
  AttentionMask mask = AttentionMask::causal;
  int document_end =
      -1;  // the token that ends a document; -1: the last one of bytes' and GPT-2's vocabularies

  std::int32_t end_of_document() const {
    return document_end >= 0 ? document_end : static_cast<std::int32_t>(model.vocab - 1);
  }
  // Tokens of a sequence that each rank holds.
  std::int64_t tokens_here() const { return seq_len / mesh.size(Axis::cp); }
  // Ranks that the data-parallel state is cut over: blocks of neighbours, and of a block those that hold the
  // same routed experts.
  int shards() const { return zero == 0 ? 1 : mesh.dp_cp_size() / hsdp; }
  Shards all_shards() const { return {shards(), zero_stage() == 0 ? 1 : shards() / mesh.ep}; }
  Shards shard_index(const Coordinates& at) const {
    const int index = mesh.dp_cp_index(at) % shards();
    return {index, zero_stage() == 0 ? 0 : index / mesh.ep};
  }
  bool cuts_vocabulary() const { return vocabulary_parallel && mesh.pp() > 1; }
  // What is in effect: over one rank there is nothing to cut.
  int zero_stage() const { return shards() == 1 ? 0 : zero; }
};

// Throws RequestError naming the flag, the value and the legal values when this plan cannot be run exactly;
// with those that it calls legal it passes.
void validate(const Plan& plan);

// Whether two passes that a schedule overlaps (DualPipe) change places where tokens travel to experts on
// other ranks: computation of one hides the exchange of the other. Not where parameters are gathered for
// their uses one after another.
bool interleaves_pairs(const Plan& plan);

// Sequences of the global batch that data-parallel rank `dp_rank` computes: sample numbers [begin, end).
Range dp_samples(const Plan& plan, int dp_rank);

// At most, of any rank: its microbatch, or its share of the batch where that is less.
std::int64_t sequences_at_once(const Plan& plan);

// Samples of each microbatch of that rank, in order. From ZeRO 2 on the ranks that share state must meet
// in every microbatch, and so must those that share experts: those that have fewer get empty ones after the
// others.
std::vector<Range> microbatches(const Plan& plan, int dp_rank);

// RequestError naming the key, its value and what is legal. Fields that the text does not have are as where
// no flag is given.
Plan plan_from_toml(const std::string& text, const std::string& where);
std::string to_toml(const Plan& plan);

}  // namespace echelon
