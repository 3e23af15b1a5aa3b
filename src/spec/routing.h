// How routers choose experts and what keeps the experts evenly loaded, as data.
#pragma once

#include <cstdint>

#include "base/split.h"
#include "spec/choices.h"

namespace echelon {

// How a router turns logits into scores. A sigmoid scores each expert by itself (DeepSeek-V3,
// https://arxiv.org/abs/2412.19437).
enum class RouterScores { softmax, sigmoid };

// A router, as part of the model. Brackets give the keys of Hugging Face configurations.
struct RouterSpec {
  RouterScores scores = RouterScores::softmax;  // [scoring_func]
  bool normalise = true;  // the weights of a token's experts add up to `scale` [norm_topk_prob]
  double epsilon = 0;     // added to the sum by which normalised weights are divided (LFM2: 1e-6)
  double scale = 1;       // multiplies the weights [routed_scaling_factor]
  // Node-limited routing (DeepSeek-V3, section 2.1.2): experts form `groups` equal runs of indices [n_group],
  // and a token's experts come from at most `most_groups` of them [topk_group]: those with the largest sums
  // of their `group_best` best scores (0: k / most_groups). transformers uses 2 for DeepSeek-V3 and 1 for V2.
  std::int64_t groups = 1, most_groups = 1, group_best = 0;
  bool operator==(const RouterSpec&) const = default;
};

// Length of the report that ranks sum after a step for each layer: tokens routed to each expert, tokens
// dropped by each, tokens sent to other ranks, and the balance losses.
constexpr std::int64_t routing_report_size(std::int64_t num_experts) { return 2 * num_experts + 2; }

// The tokens over which a balance loss or a capacity counts.
enum class BalanceScope {
  sequence,    // each sequence by itself: independent of the mesh and of --micro-batch
  microbatch,  // a data-parallel rank's microbatch, over all ranks that share its sequences (cp)
  // The global batch (Qiu et al. 2025, https://arxiv.org/abs/2501.11873). Its counts are complete only after
  // all forward passes, so no backward pass may begin earlier: it needs one microbatch per rank, or a
  // schedule like GPipe's.
  batch,
};

template <>
inline constexpr std::array choice_names<BalanceScope>{"sequence", "microbatch", "batch"};

// Which tokens an expert keeps if it has more than its capacity.
enum class DropPolicy {
  probability,  // those with the largest weight; if equal (to half the digits), the earlier one
  position,     // the earlier ones
};

template <>
inline constexpr std::array choice_names<DropPolicy>{"probability", "position"};

// Load balancing, as part of a run. The losses are means over the tokens of the global batch, with these
// coefficients; 0: none.
struct Balancing {
  double expert_loss = 0;  // Switch Transformer, https://arxiv.org/abs/2101.03961, equation 4
  double device_loss = 0;  // DeepSeek-V2, https://arxiv.org/abs/2405.04434, equation 26; a device is a group
  double communication_loss = 0;  // the same, equation 29
  double z_loss = 0;              // ST-MoE, https://arxiv.org/abs/2202.08906, equation 5
  BalanceScope scope = BalanceScope::sequence;
  // Loss-free balancing (Wang et al. 2024, https://arxiv.org/abs/2408.15664), over the global batch.
  double bias_rate = 0;
  double capacity = 0;  // of an expert, times the even load over a scope (GShard); 0: nothing is dropped
  DropPolicy drop = DropPolicy::probability;
  bool has_counts() const { return expert_loss != 0 || device_loss != 0 || communication_loss != 0; }
  bool has_losses() const { return has_counts() || z_loss != 0; }
  bool operator==(const Balancing&) const = default;
};

struct Plan;

// The capacity of an expert for a scope of `tokens` (GShard, Lepikhin et al. 2020,
// https://arxiv.org/abs/2006.16668): factor times the even load, rounded up, at most `tokens`.
std::int64_t expert_capacity(double factor, std::int64_t tokens, std::int64_t k, std::int64_t experts);

// The routed experts of a rank of an expert group: equal runs of indices.
Range experts_of(const Plan& plan, int ep_index);

// The most copies of tokens that a rank sends in a microbatch of `sequences`: all choices, or what the
// capacities of its scopes allow together.
std::int64_t room_for_copies(const Plan& plan, std::int64_t sequences);

// The copies of tokens that a rank's experts have buffer space for, from all ranks of the expert group. With
// a capacity: the most that it allows, given microbatches as long as possible. Without one the router
// decides, and this is the even load if each rank has `sequences`.
std::int64_t room_for_received(const Plan& plan, std::int64_t sequences);

}  // namespace echelon
