// How a training program runs a plan, as data: which tensors it saves, what it fuses, what it overlaps. A
// plan's time and memory depend on it as much as on the machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "spec/provenance.h"

namespace echelon {

// Of a tp rank's part of the vocabulary, where a program pads it: rows of logits then begin at multiples of 16
// bytes, in 8 bits too.
inline constexpr int padded_vocabulary_multiple = 16;

struct Software {
  std::string name;
  std::string as_of;  // which version of the program this is, by its date: "2025-11"; empty: not said

  // A preset of which this is another version: what its file does not say is as there.
  std::string version_of;

  // The trainer of this repository: memory is what plan/memory counts, byte for byte.
  bool is_this_trainer = false;
  // What it can run; not given: everything that the planner knows. The search keeps to it; what is asked for
  // by name is priced as if the program had it.
  std::optional<std::vector<std::string>> schedules;  // of pipelines
  std::optional<std::vector<int>> zero_stages;
  std::optional<std::vector<int>> pipeline_zero_stages;   // those beside a pipeline; not given: the same
  std::optional<std::vector<int>> tensor_zero_stages;     // and those beside tensor parallelism
  bool replicated_shards = true;                          // several groups of shards, the same in each (HSDP)
  std::optional<std::vector<std::string>> context_kinds;  // of context parallelism
  std::optional<std::vector<std::string>> context_precisions;  // in which it has them; not given: in all
  bool context_beside_pipelines = true;                        // these and a pipeline together
  // Ulysses too takes sequences alone that are multiples of twice the ranks, as the ring's balanced parts
  // need.
  bool context_cuts_pairs = false;
  // More ranks of Ulysses than a tp rank has key/value heads: several have the same one. Else their number
  // divides that of these heads.
  bool context_repeats_heads = false;
  // Of packed documents each is cut over cp by itself; else the sequence that they are packed into.
  bool context_cuts_documents = false;
  // Stages of ZeRO beside which, without a pipeline, each document is on as many ranks of dp and cp as its
  // length needs (Megatron-Core's hybrid context parallelism). Not given: it has none.
  std::optional<std::vector<int>> dynamic_context_zero_stages;
  bool tensor_parallel = true;
  // The same of tp, a multiple of the model's key/value heads. Programs but this trainer gather queries, keys
  // and values of all heads then, and take their own of them.
  bool tensor_repeats_heads = false;
  bool places_experts = false;                         // by their load, with copies of those that have most
  std::optional<std::vector<std::string>> precisions;  // of products
  // What it makes again, the same on all pipeline ranks (names of --recompute); not given: any op, and on
  // each rank others.
  std::optional<std::vector<std::string>> recompute;
  // What it keeps in the host's memory. With --offload optimizer, of a parameter's state: "moments",
  // "masters" (the copy in 32 bits), "gradients" (between microbatches, where a rank keeps its shard alone),
  // "parameters" (those that ZeRO 3 gathers). With --offload activations: "activations" (what each layer
  // keeps of a microbatch). Not given: it keeps nothing there.
  std::optional<std::vector<std::string>> offloads;
  bool offloads_state() const;
  bool offloads_activations() const;
  std::optional<std::vector<int>>
      offload_zero_stages;  // beside which it keeps state there; not given: all from 1 on
  // Recomputation beside which it keeps activations there; not given: any. And whether it does in a pipeline,
  // and beside computation.
  std::optional<std::vector<std::string>> activation_offload_recompute;
  bool activation_offload_pipelines = true;
  bool activation_offload_overlaps = true;
  // The optimizer runs where its state is; else the state is brought to the device, and back.
  bool updates_on_host = false;
  // When ZeRO 2 and 3 sum gradients over the ranks: behind each microbatch, and keep shards of the sum; or
  // all at once behind the last microbatch, until which whole gradients are kept (gradient_sums() in
  // plan/configuration.h).
  bool reduces_each_microbatch = true;
  bool pipelines_reduce_once = false;  // the latter, wherever there is a pipeline
  // Where it is the latter and a rank has several stages: sums those of a stage behind each group of
  // microbatches that goes through it, and keeps whole gradients of that stage alone (Lamy-Poirier 2022).
  bool reduces_each_group = false;
  // Interleaved pipelines take microbatches in whole groups of pp.
  bool interleaves_whole_groups = false;
  // Attention without its scores in memory (Dao et al. 2022), and only the half that a causal mask leaves.
  bool fused_attention = true;
  bool older_attention = false;  // fused by kernels for the machines before (FlashAttention 2 on H100)
  bool tf32 = false;             // products of f32 round their operands to TF32, where the machine has that
  bool pads_vocabulary = true;   // each tp rank's part to a multiple of padded_vocabulary_multiple
  bool dropout = false;          // keeps masks of one byte an element
  bool sharded_states = true;    // gradients and parameters of ZeRO 1 travel as reduce_scatter and all_gather
  // Bytes that training keeps for each parameter, beside its 2-byte value.
  double gradient_bytes = 4, optimizer_bytes = 12;
  double value_bytes = 2;
  double master_bytes = 4;  // of optimizer_bytes those that no run in f32 keeps, whose values are the weights
  double reduced_bytes = 4;        // of each gradient that travels along dp
  double logit_bytes = 10;         // held for each logit in the output layer
  double fragmentation = 0.05;     // of activations, on top
  double saved_factor = 1;         // of a layer's saved bytes: what is kept more than once, or in more bits
  bool keeps_norm_outputs = true;  // for the products after them
  bool keeps_activated = true;     // the MLP's activation function's output
  double activation_input_bytes = 2;  // kept for the MLP's activation function, of each element
  // What products in 8 or 4 bits read, in 16; else as they read it, beside what attention keeps of it.
  bool keeps_operands = true;
  bool keeps_expert_outputs = true;  // before they are weighted; else the weights act before the last product
  // "selective" keeps, of a layer's products, the output of every second one from the first on, and
  // attention's output; all else is made again (torchtitan's per-op checkpointing).
  bool keeps_every_second_product = false;
  // ZeRO 3 under a pipeline gathers a stage once a step and keeps it whole until the step ends.
  bool pipelines_keep_gathered = false;
  bool regathers_sequence =
      true;  // under sequence parallelism keeps a norm's output cut, and gathers it again
  bool overlaps_gradients = true;   // reduces a layer's gradients while others compute
  bool overlaps_parameters = true;  // gathers those of ZeRO 1 and 3 while others compute
  // Operands of products in 8 or 4 bits: parameters are cast where they are kept, once a step, not where a
  // microbatch reads them.
  bool narrow_parameters = true;
  bool reshards = true;  // ZeRO 3 lets a layer go between its passes
  // Without sequence parallelism each tp rank hands over its part, and the next stage gathers (Narayanan et
  // al. 2021, 4.1).
  bool scatters_messages = false;
  // Where the last stage has no layer it computes the loss alone, from logits that the one before it hands
  // over.
  bool loss_apart = false;
  // A token travels once to each node and once to each rank that has experts of it, whichever number of them
  // (DeepEP, https://github.com/deepseek-ai/DeepEP, and HybridEP, its branch); else a copy for each expert.
  bool sends_tokens_once = false;
  // Under sequence parallelism the ranks of a tp group gather all rows before they send copies to experts,
  // and add up what each made of its part of every expert; else each sends copies of the rows that it has.
  bool gathers_before_experts = false;
  // The forward pass of one microbatch runs beside the backward pass of another, layer by layer, and the
  // experts' all-to-alls of each beside what the other computes (Megatron-Core's
  // --overlap-moe-expert-parallel-comm).
  bool overlaps_experts = false;
  // All-reduces into which a layer's gradients are cut; 0: one for all layers.
  double layer_reductions = 0;
  // The host's time for each layer and rank, where ZeRO's shards travel as lists of tensors.
  double shard_copy_seconds = 0;
  double accumulation_bytes = 0;  // moved for each parameter after each microbatch, to add its gradient up
  double loss_passes = 1;         // over the bytes that a loss of fused kernels moves
  // The host's time for each rank of a collective's group, at each call.
  double collective_rank_seconds = 0;

  // Fitted.
  double elementwise_passes = 1;         // over memory, of what is not a product, over the least possible
  double launch_seconds = 0;             // of the host for each kernel: a layer takes no less than all of its
  double collective_launch_seconds = 0;  // the same of each tp collective
  double product_efficiency = 1;         // of the machine's, on products
  double attention_efficiency = 1;       // of the machine's, in fused attention
  double tensor_overlap = 0;             // part of the tp collectives hidden behind products
  double expert_efficiency = 1;          // of products, on those of many experts at once
  double expert_width = 0;  // of the widest experts that this was seen of: what theirs take longer, so do
                            // wider ones, and no more; 0: any
  double expert_call_seconds = 0;        // of each expert's product, where they are not one call
  double scan_efficiency = 1;  // of the rates of products and of memory, what a state space's scan reaches
  double expert_passes = 1;          // as elementwise_passes, of sorting tokens by expert and adding them up
  double expert_launch_seconds = 0;  // of the host, for routing and calling the experts of a layer, forwards
  double expert_pair_seconds = 0;    // the same where overlaps_experts
  double overlap_slowdown = 1;       // of computation beside communication
  double network_efficiency = 1;     // of links between nodes
  double step_seconds = 0;           // of a step beside everything else
  double message_seconds = 0;        // of handing a microbatch over, in a rank's forward and backward pass
  double optimizer_passes = 1;       // over the state's least possible traffic
  double straggling = 0;             // a step's slow-down for each doubling of the nodes
  // Factors of the predicted step time between which lay 80% of measured ones, of groups of runs that had no
  // part in finding them (plan/interval.h): of dense models on one node, on several, and of mixtures of
  // experts (0: as those before it); of plans that are far from all that was measured (0: nothing is). Where
  // `high` is 0 no run of the program was measured.
  double low = 0, high = 0;
  double nodes_low = 0, nodes_high = 0;
  double experts_low = 0, experts_high = 0;
  double far_low = 0, far_high = 0;
  // What was measured; not given: what a plan may be.
  std::optional<std::vector<std::string>> measured_on;  // machine and precision: "h100 bf16"
  // The least and the most.
  std::optional<std::vector<std::int64_t>> measured_gpus, measured_parameters, measured_seq_len;
  Provenance provenance;
};

void validate(const Software& software);
Software load_software(const std::string& name_or_path);
std::vector<std::string> software_preset_names();
Software software_from_toml(const std::string& text, const std::string& where);
std::string to_toml(const Software& software);

}  // namespace echelon
