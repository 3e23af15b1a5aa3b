// How routers choose experts, and what keeps experts evenly loaded, as data.
#pragma once

#include <cstdint>

#include "base/split.h"
#include "spec/choices.h"

namespace echelon {

// What a router makes of its logits. Sigmoids look at each expert by itself (DeepSeek-V3,
// https://arxiv.org/abs/2412.19437).
enum class RouterScores { softmax, sigmoid };

// Part of the model; in brackets the names of Hugging Face's configurations.
struct RouterSpec {
  RouterScores scores = RouterScores::softmax;  // [scoring_func]
  bool normalise = true;  // the weights of a token's experts add up to `scale` [norm_topk_prob]
  double epsilon = 0;     // added to the sum that they are divided by for that (LFM2's 1e-6)
  double scale = 1;       // of the weights [routed_scaling_factor]
  // Node-limited routing (DeepSeek-V3, section 2.1.2): experts are in `groups` equal runs of numbers
  // [n_group], and a token's are in at most `most_groups` of these [topk_group], those with the largest sums
  // of their `group_best` best scores; 0: k / most_groups. transformers has 2 for DeepSeek-V3 and 1 for V2.
  std::int64_t groups = 1, most_groups = 1, group_best = 0;
  bool operator==(const RouterSpec&) const = default;
};

// Numbers that ranks add up after a step for each layer: tokens routed to each expert and dropped by it,
// tokens sent away, the balance losses.
constexpr std::int64_t routing_report_size(std::int64_t num_experts) { return 2 * num_experts + 2; }

// Tokens over which a balance loss and a capacity count.
enum class BalanceScope {
  sequence,    // each sequence by itself: the same on every mesh and for every --micro-batch
  microbatch,  // those of a data-parallel rank's microbatch, over all ranks that share its sequences (cp)
  // The global batch (Qiu et al. 2025, https://arxiv.org/abs/2501.11873). Its counts are known when all its
  // forward passes are done, so that no backward pass may begin before: one microbatch a rank, or a schedule
  // like GPipe's.
  batch,
};

template <>
inline constexpr std::array choice_names<BalanceScope>{"sequence", "microbatch", "batch"};

// Which tokens stay where an expert has more than its capacity.
enum class DropPolicy {
  probability,  // those with the largest weight; of equal ones (to half their digits) the earlier
  position,     // the earlier ones
};

template <>
inline constexpr std::array choice_names<DropPolicy>{"probability", "position"};

// Part of a run. Coefficients of losses, each a mean over the tokens of the global batch; 0: none.
struct Balancing {
  double expert_loss = 0;  // Switch Transformer, https://arxiv.org/abs/2101.03961, equation 4
  double device_loss = 0;  // DeepSeek-V2, https://arxiv.org/abs/2405.04434, equation 26; a device is a group
  double communication_loss = 0;  // the same, equation 29
  double z_loss = 0;              // ST-MoE, https://arxiv.org/abs/2202.08906, equation 5
  BalanceScope scope = BalanceScope::sequence;
  double bias_rate =
      0;  // loss-free (Wang et al. 2024, https://arxiv.org/abs/2408.15664), over the global batch
  double capacity = 0;  // of an expert, times the even load over a scope (GShard); 0: nothing is dropped
  DropPolicy drop = DropPolicy::probability;
  bool has_counts() const { return expert_loss != 0 || device_loss != 0 || communication_loss != 0; }
  bool has_losses() const { return has_counts() || z_loss != 0; }
  bool operator==(const Balancing&) const = default;
};

struct Plan;

// Tokens that an expert takes of a scope of `tokens` (GShard, Lepikhin et al. 2020,
// https://arxiv.org/abs/2006.16668): factor times the even load, rounded up, and never more than there are.
std::int64_t expert_capacity(double factor, std::int64_t tokens, std::int64_t k, std::int64_t experts);

// The routed experts at a place of an expert group: equal runs of numbers.
Range experts_of(const Plan& plan, int ep_index);

// Copies of tokens that a microbatch of `sequences` has room for on a rank: all choices, or what the
// capacities of its scopes allow together.
std::int64_t room_for_copies(const Plan& plan, std::int64_t sequences);

// Copies for which a rank has room for its experts, from all ranks of its expert group together: what
// capacities allow of them, microbatches of all ranks being as long as they may. Without a capacity the
// router decides, and this is what an even load brings where each rank has `sequences`.
std::int64_t room_for_received(const Plan& plan, std::int64_t sequences);

}  // namespace echelon
