// A training program as data: which plans it can run, which tensors it keeps, what it fuses and what it
// overlaps. A plan's time and memory depend on the program as much as on the machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spec/provenance.h"

namespace echelon {

// Programs that pad the vocabulary pad each tp rank's part to a multiple of this: rows of logits then start
// at multiples of 16 bytes, even in 8 bits.
inline constexpr int padded_vocabulary_multiple = 16;

struct Software {
  std::string name;
  std::string as_of;  // the program's version, as a date: "2025-11"; empty: not given

  // The preset of which this is another version: keys that this file lacks are taken from it.
  std::string version_of;

  // Whether it is this repository's trainer, whose memory plan/memory counts to the byte.
  bool is_this_trainer = false;
  // What the program can run; not given: all that the planner knows. A search stays within it. What the user
  // asks for by name is predicted as if the program could run it.
  std::optional<std::vector<std::string>> schedules;  // of pipelines
  std::optional<std::vector<int>> zero_stages;
  std::optional<std::vector<int>> pipeline_zero_stages;   // with a pipeline; not given: zero_stages
  std::optional<std::vector<int>> tensor_zero_stages;     // with tensor parallelism
  bool replicated_shards = true;                          // several sharding groups that are replicas (HSDP)
  std::optional<std::vector<std::string>> context_kinds;  // of context parallelism
  std::optional<std::vector<std::string>> context_precisions;  // for context parallelism; not given: all
  bool context_beside_pipelines = true;                        // context parallelism together with a pipeline
  // Even with Ulysses, the sequence length must be a multiple of twice the ranks, as the ring's balanced
  // parts need.
  bool context_cuts_pairs = false;
  // Ulysses may have more ranks than a tp rank has key/value heads, so that several hold the same head.
  // Otherwise its ranks must divide these heads.
  bool context_repeats_heads = false;
  // Context parallelism cuts each packed document by itself, instead of the sequence that they are packed
  // into.
  bool context_cuts_documents = false;
  // The ZeRO stages with which, without a pipeline, each document is spread over as many dp and cp ranks as
  // its length needs (Megatron-Core's hybrid context parallelism). Not given: it cannot do this.
  std::optional<std::vector<int>> dynamic_context_zero_stages;
  bool tensor_parallel = true;
  // tp may exceed the key/value heads, as a multiple of them. Programs other than this trainer then gather
  // the queries, keys and values of all heads, and each rank takes its own.
  bool tensor_repeats_heads = false;
  bool places_experts = false;                         // by load, with copies of the busiest ones
  std::optional<std::vector<std::string>> precisions;  // of matrix products
  // What it can recompute (names of --recompute), the same on all pipeline ranks. Not given: any ops, and
  // different ones on each rank.
  std::optional<std::vector<std::string>> recompute;
  // What it can keep in the host's memory. With --offload optimizer: "moments", "masters" (the 32-bit
  // copies), "gradients" (between microbatches, if a rank keeps only its shard), "parameters" (those that
  // ZeRO 3 gathers). With --offload activations: "activations" (what each layer keeps of a microbatch). Not
  // given: nothing.
  std::optional<std::vector<std::string>> offloads;
  bool offloads_state() const;
  bool offloads_activations() const;
  // The ZeRO stages with which it keeps state there; not given: all from 1 on.
  std::optional<std::vector<int>> offload_zero_stages;
  // Offloaded activations: with which recomputation it has them (not given: any), whether in a pipeline, and
  // whether copies overlap with computation.
  std::optional<std::vector<std::string>> activation_offload_recompute;
  bool activation_offload_pipelines = true;
  bool activation_offload_overlaps = true;
  // The optimizer runs on the host, where its state is; otherwise the state is copied to the device and back.
  bool updates_on_host = false;
  // When ZeRO 2 and 3 reduce gradients. true: after each microbatch, and only shards of the sum are kept.
  // false: once after the last microbatch, until which whole gradients are kept (gradient_sums() in
  // plan/configuration.h).
  bool reduces_each_microbatch = true;
  bool pipelines_reduce_once = false;  // once, whenever there is a pipeline
  // If it reduces once and a rank has several stages: it reduces a stage's gradients after each group of
  // microbatches that passes the stage, and keeps whole gradients of that stage only (Lamy-Poirier 2022).
  bool reduces_each_group = false;
  // In interleaved pipelines the number of microbatches must be a multiple of pp.
  bool interleaves_whole_groups = false;
  // Attention never stores its scores (Dao et al. 2022), and computes only the half that a causal mask
  // leaves.
  bool fused_attention = true;
  bool older_attention = false;   // with kernels for the previous machines (FlashAttention 2 on H100)
  bool tf32 = false;              // f32 products round their operands to TF32, if the machine can
  bool trains_with_muon = false;  // --optimizer muon, in rounds (spec/optimizer.h)
  bool pads_vocabulary = true;    // each tp rank's part to a multiple of padded_vocabulary_multiple
  bool dropout = false;           // keeps masks of one byte per element
  bool sharded_states = true;     // ZeRO 1 communicates by reduce_scatter and all_gather
  // Bytes per parameter that training keeps besides its 2-byte value.
  double gradient_bytes = 4, optimizer_bytes = 12;
  double value_bytes = 2;
  // The part of optimizer_bytes that a run in f32 does not need, where the values are the master weights.
  double master_bytes = 4;
  double reduced_bytes = 4;        // per gradient that travels along dp
  double logit_bytes = 10;         // held per logit in the output layer
  double fragmentation = 0.05;     // extra memory, as a fraction of the activations
  double saved_factor = 1;         // multiplies a layer's saved bytes, for what is kept twice or in more bits
  bool keeps_norm_outputs = true;  // as inputs of the products after them
  bool keeps_activated = true;     // the output of the MLP's activation function
  double activation_input_bytes = 2;  // kept per element of the activation function's input
  // Products in 8 or 4 bits keep their operands in 16 bits; otherwise as they read them, besides what
  // attention keeps.
  bool keeps_operands = true;
  // Keeps the experts' outputs, to which the routing weights apply; otherwise the weights apply before the
  // last product.
  bool keeps_expert_outputs = true;
  // "selective" keeps attention's output and the output of every second product of a layer, from the first
  // on, and recomputes all else (torchtitan's per-op checkpointing).
  bool keeps_every_second_product = false;
  // ZeRO 3 in a pipeline gathers a stage once per step and keeps it whole until the step ends.
  bool pipelines_keep_gathered = false;
  // Under sequence parallelism it keeps a norm's output sharded and gathers it again for the backward pass.
  bool regathers_sequence = true;
  bool overlaps_gradients = true;   // reduces a layer's gradients while other layers compute
  bool overlaps_parameters = true;  // gathers those of ZeRO 1 and 3 while layers compute
  // For products in 8 or 4 bits, parameters are cast where they are stored, once per step; otherwise where
  // each microbatch reads them.
  bool narrow_parameters = true;
  bool reshards = true;  // ZeRO 3 frees a layer between its forward and its backward pass
  // Without sequence parallelism each tp rank sends its part of a message, and the next stage gathers
  // (Narayanan et al. 2021, 4.1).
  bool scatters_messages = false;
  // If the last stage has no layer, it computes only the loss, from logits that the stage before it sends.
  bool loss_apart = false;
  // A token travels once to each node and once to each rank that has any of its experts (DeepEP,
  // https://github.com/deepseek-ai/DeepEP, and its branch HybridEP); otherwise one copy travels per expert.
  bool sends_tokens_once = false;
  // Under sequence parallelism a tp group gathers all rows before it sends copies to experts, and sums what
  // each rank's part of every expert made. Otherwise each rank sends copies of its own rows.
  bool gathers_before_experts = false;
  // The forward pass of one microbatch runs beside the backward pass of another, layer by layer, so that the
  // computation of each hides the experts' all-to-alls of the other (Megatron-Core's
  // --overlap-moe-expert-parallel-comm).
  bool overlaps_experts = false;
  // The number of all-reduces for one layer's gradients; 0: one for all layers together.
  double layer_reductions = 0;
  // The host's time per layer and rank, if ZeRO's shards travel as lists of tensors.
  double shard_copy_seconds = 0;
  double accumulation_bytes = 0;  // moved per parameter to accumulate a microbatch's gradient
  double loss_passes = 1;         // over the bytes that a fused loss kernel moves
  // The host's time per rank of the group, for each call of a collective.
  double collective_rank_seconds = 0;

  // Fitted to measured times.
  double elementwise_passes = 1;         // memory traffic of all but products, over the least possible
  double launch_seconds = 0;             // the host's time per kernel, a lower bound of a layer's time
  double collective_launch_seconds = 0;  // the same per tp collective
  double product_efficiency = 1;         // times the machine's, of products
  double attention_efficiency = 1;       // times the machine's, of fused attention
  double tensor_overlap = 0;             // fraction of the tp collectives that products hide
  double expert_efficiency = 1;          // times that, of grouped products of many experts
  // The width of the widest experts of which expert_efficiency was measured. Wider ones lose no more time
  // than these did; 0: the efficiency holds for all widths.
  double expert_width = 0;
  double expert_call_seconds = 0;  // per expert, if experts' products are separate calls
  double scan_efficiency = 1;      // fraction of compute and memory rates that a state space's scan reaches
  double expert_passes = 1;        // like elementwise_passes, for sorting tokens by expert and summing them
  // The host's time to route and call the experts of a layer, forward; the second with overlaps_experts.
  double expert_launch_seconds = 0;
  double expert_pair_seconds = 0;
  double overlap_slowdown = 1;    // of computation during communication
  double network_efficiency = 1;  // of links between nodes
  double step_seconds = 0;        // added to each step
  double message_seconds = 0;     // of sending a microbatch on, in each forward and backward pass
  double optimizer_passes = 1;    // memory traffic of the optimizer, over the least possible
  double straggling = 0;          // relative slow-down of a step per doubling of the nodes
  // Factors of the predicted step time between which 80% of measured times lie, for runs that took no part in
  // the fit (plan/interval.h): dense models on one node (low, high), on several nodes, mixtures of experts
  // (0: as those before), and plans far from all measurements (0: none is far). If `high` is 0, no run of the
  // program was measured.
  double low = 0, high = 0;
  double nodes_low = 0, nodes_high = 0;
  double experts_low = 0, experts_high = 0;
  double far_low = 0, far_high = 0;
  // The plans that were measured; not given: whatever a plan may be.
  std::optional<std::vector<std::string>> measured_on;  // machine and precision: "h100 bf16"
  // Smallest and largest.
  std::optional<std::vector<std::int64_t>> measured_gpus, measured_parameters, measured_seq_len;
  Provenance provenance;
};

void validate(const Software& software);
Software load_software(const std::string& name_or_path);
std::vector<std::string> software_preset_names();
Software software_from_toml(const std::string& text, const std::string& where);
std::string to_toml(const Software& software);

}  // namespace echelon
