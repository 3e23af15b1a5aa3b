#include "spec/plan_rules.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "base/halving_tree.h"
#include "base/units.h"
#include "spec/block.h"
#include "spec/fp8.h"
#include "spec/plan_fields.h"
#include "spec/sum_blocks.h"
#include "spec/tf32.h"

namespace echelon {
namespace {

using Verdict = std::optional<Refusal>;

constexpr auto at_most = Remedy::Kind::at_most, at_least = Remedy::Kind::at_least,
               divisors = Remedy::Kind::divisors;

// These say more than that a number is out of its range.

Verdict of_lengths(const Plan& plan, const Runner& runner) {
  // Rotary positions have no table that ends: longer sequences can be planned for, though the model must have
  // learned them.
  const ModelSpec& m = plan.model;
  const bool ends = runner.is_this_trainer || m.has_position_table();
  if (plan.seq_len >= 1 && (!ends || plan.seq_len <= m.max_seq)) return {};
  if (!ends) return refused("seq-len", {}, "must be at least 1");
  return refused("seq-len", {}, "{} has positions for 1 to {}", m.name, m.max_seq);
}

Verdict of_document_end(const Plan& plan) {
  const ModelSpec& m = plan.model;
  if (plan.document_end >= -1 && plan.document_end < m.vocab) return {};
  return refused("document-end", {}, "{} has tokens 0 to {}", m.name, m.vocab - 1);
}

// What lengths documents have says nothing of the token that ends them: who trains must know it.
Verdict of_unknown_end(const Plan& plan) {
  const ModelSpec& m = plan.model;
  constexpr std::int64_t bytes = 257, gpt2 = 50257;
  if (plan.mask == AttentionMask::causal || plan.document_end >= 0 || m.vocab == bytes || m.vocab == gpt2)
    return {};
  return refused("mask", {{"mask", "causal"}},
                 "say which of the {} tokens of {} ends a document with --document-end", m.vocab, m.name);
}

Verdict of_ranges(const Plan& plan) {
  for (const PlanField& field : plan_fields()) {
    if (!is_out_of_range(field, plan)) continue;
    Refusal refusal = refused(field.name(), {}, "must be a number {}", range_text(field));
    constexpr double few = 8;
    if (field.most - field.least > few) return refusal;
    for (double n = field.least; n <= field.most; ++n) refusal.remedies.push_back(remedy(field.name(), n));
    return refusal;
  }
  return {};
}

// Why a model is not cut over so many ranks; empty where it is.
std::string tensor_parallel_problem(const ModelSpec& m, std::int64_t tp, const Runner& runner) {
  const bool attends = m.num_attention_layers() > 0;
  if (attends && m.num_heads % tp != 0)
    return fmt::format("must divide the {} of {}", counted(m.num_heads, "head"), m.name);
  if (attends && m.num_kv_heads % tp != 0 && tp % m.num_kv_heads != 0)
    return fmt::format("is neither a divisor nor a multiple of the {} key/value heads of {}", m.num_kv_heads,
                       m.name);
  if (attends && m.num_kv_heads % tp != 0 && !runner.tensor_repeats_heads)
    return fmt::format(
        "does not divide the {} of {}, and the program has none on several ranks "
        "(tensor_repeats_heads, in its file)",
        counted(m.num_kv_heads, "key/value head"), m.name);
  if (const StateSpaceSpec& s = m.state_space; s.heads > 0 && s.heads % tp != 0)
    return fmt::format("must divide the {} of {}", counted(s.heads, "state-space head"), m.name);
  if (const StateSpaceSpec& s = m.state_space; s.heads > 0 && s.groups % tp != 0 && tp % s.groups != 0)
    return fmt::format("is neither a divisor nor a multiple of the {} groups of state-space heads of {}",
                       s.groups, m.name);
  if (m.short_conv.kernel > 0 && m.hidden < tp)
    return fmt::format("{} has short convolutions of only {} channels", m.name, m.hidden);
  if (m.vocab < tp) return fmt::format("{} has a vocabulary of only {}", m.name, m.vocab);
  if (m.num_mlp_layers() > 0 && m.mlp_hidden < tp)
    return fmt::format("{} has an MLP of only {}", m.name, m.mlp_hidden);
  if (m.experts != Experts::none && m.expert_hidden < tp)
    return fmt::format("{} has experts of only {}", m.name, m.expert_hidden);
  if (m.num_shared_experts > 0 && m.shared_width() < tp)
    return fmt::format("{} has a shared expert of only {}", m.name, m.shared_width());
  if (m.experts == Experts::gpt_oss && m.hidden < tp)
    return fmt::format("{} has experts' biases of only {}", m.name, m.hidden);
  return {};
}

Verdict of_tensor_parallel(const Plan& plan, const Runner& runner) {
  const ModelSpec& m = plan.model;
  const std::string problem = tensor_parallel_problem(m, plan.mesh.size(Axis::tp), runner);
  if (problem.empty()) return {};
  const std::int64_t heads = m.num_attention_layers() > 0 ? m.num_heads
                             : m.state_space.heads > 0    ? m.state_space.heads
                                                          : m.hidden;
  Refusal refusal = refused("tp", {}, "{}", problem);
  for (std::int64_t n = 1; n <= heads; ++n)
    if (heads % n == 0 && tensor_parallel_problem(m, n, runner).empty())
      refusal.remedies.push_back(remedy("tp", n));
  return refusal;
}

Verdict of_data_parallel(const Plan& plan) {
  const int dp = plan.mesh.size(Axis::dp);
  if (plan.global_batch >= dp) return {};
  return refused("dp", {remedy("dp", plan.global_batch, at_most), remedy("global-batch", dp, at_least)},
                 "the global batch has only {}, so some ranks would have none",
                 counted(plan.global_batch, "sequence"));
}

Verdict of_replicas(const Plan& plan) {
  const int ranks = plan.mesh.dp_cp_size();
  if (ranks % plan.hsdp != 0)
    return refused("hsdp", {remedy("hsdp", ranks, divisors)},
                   "the {} data-parallel ranks do not divide into so many groups", ranks);
  if (plan.hsdp > 1 && plan.zero == 0)
    return refused("hsdp", {{"zero", "1"}, {"zero", "2"}, {"zero", "3"}, {"hsdp", "1"}},
                   "replicates what --zero 1, 2 or 3 cuts over ranks, and --zero is 0");
  return {};
}

// What other programs ask for: they give every data-parallel rank as many microbatches, of one size.
Verdict of_equal_shares(const Plan& plan) {
  const std::int64_t dp = plan.mesh.size(Axis::dp), batch = plan.global_batch, share = batch / dp;
  const auto multiples = [&](std::int64_t unit) {
    return std::vector{remedy("global-batch", batch / unit * unit),
                       remedy("global-batch", (batch / unit + 1) * unit)};
  };
  if (batch % dp != 0) {
    Refusal refusal = refused("dp", {remedy("dp", batch, divisors)},
                              "the {} sequences of the global batch do not divide over so many ranks", batch);
    for (Remedy& one : multiples(dp)) refusal.remedies.push_back(std::move(one));
    return refusal;
  }
  if (share % plan.micro_batch == 0) return {};
  return refused("micro-batch", {remedy("micro-batch", share, divisors)},
                 "does not divide the {} of a data-parallel rank", counted(share, "sequence"));
}

// They cut what is long and what is wide into equal parts; here parts may differ by one.
Verdict of_equal_cuts(const Plan& plan) {
  const ModelSpec& m = plan.model;
  const std::int64_t tp = plan.mesh.size(Axis::tp), cp = plan.mesh.size(Axis::cp),
                     etp = plan.mesh.etp == 0 ? tp : plan.mesh.etp, parts = cp * tp;
  if (plan.shards_sequence() && plan.seq_len % parts != 0) {
    const std::int64_t below = plan.seq_len / parts * parts;
    std::vector<Remedy> remedies{{"sp", "off"}, remedy("seq-len", below + parts)};
    if (below > 0) remedies.push_back(remedy("seq-len", below));
    return refused("seq-len", std::move(remedies),
                   "programs other than Echelon cut sequences into equal parts, over --tp {}{} here", tp,
                   cp > 1 ? fmt::format(" x --cp {}", cp) : "");
  }
  for (const auto& [field, ranks, has, what, width] :
       {std::tuple{"tp", tp, m.num_mlp_layers() > 0, "an MLP", m.mlp_hidden},
        {"tp", tp, m.num_shared_experts > 0, "a shared expert", m.shared_width()},
        {plan.mesh.etp == 0 ? "tp" : "etp", etp, m.experts != Experts::none, "experts", m.expert_hidden}})
    if (has && width % ranks != 0)
      return refused(field, {remedy(field, std::gcd(width, tp), divisors)},
                     "programs other than Echelon cut {} of {} into equal parts", what, width);
  return {};
}

// What other programs keep on the host are shards of it.
Verdict of_offloaded_shards(const Plan& plan) {
  if (!plan.offloads_optimizer() || plan.zero > 0) return {};
  return refused("offload", {{"zero", "1"}, {"zero", "3"}, {"offload", "none"}, {"offload", "activations"}},
                 "what lies on the host are shards of ZeRO, and --zero is 0");
}

Verdict of_layers(const Plan& plan) {
  const ModelSpec& m = plan.model;
  if (plan.layers_per_stage.empty()) {
    if (plan.mesh.size(Axis::pp) <= m.num_layers || !plan.schedule_text.empty()) return {};
    return refused("pp", {remedy("pp", m.num_layers, at_most)},
                   "each rank of {} has a stage, and {} has only {}", plan.schedule, m.name,
                   counted(m.num_layers, "layer"));
  }
  std::int64_t sum = 0;
  for (std::int64_t count : plan.layers_per_stage) {
    if (count < 0 || count > m.num_layers)
      return refused("layers-per-stage", {{"layers-per-stage", "auto"}}, "a stage has 0 to {}",
                     counted(m.num_layers, "layer"));
    sum += count;
  }
  if (sum == m.num_layers) return {};
  return refused("layers-per-stage", {{"layers-per-stage", "auto"}},
                 "the numbers add up to {}, and {} has {}", sum, m.name, counted(m.num_layers, "layer"));
}

// Ranks that exchange a state space's heads have as many, of whole groups or of one.
Verdict of_state_space_heads(const Plan& plan) {
  const StateSpaceSpec& s = plan.model.state_space;
  if (s.heads == 0) return {};
  const std::int64_t tp = plan.mesh.size(Axis::tp), heads = s.heads / tp,
                     groups = std::max<std::int64_t>(1, s.groups / tp);
  const auto is_legal = [&](std::int64_t cp) {
    return heads % cp == 0 && (groups % cp == 0 || cp % groups == 0);
  };
  if (is_legal(plan.mesh.size(Axis::cp))) return {};
  Refusal refusal = refused("cp", {},
                            "a rank gets as many state-space heads as the others, of whole groups or of one, "
                            "and a tp rank of {} has {} of {}",
                            plan.model.name, counted(heads, "head"), counted(groups, "group"));
  for (std::int64_t n = 1; n <= heads; ++n)
    if (is_legal(n)) refusal.remedies.push_back(remedy("cp", n));
  return refusal;
}

// Ranks that exchange a convolution's channels have as many.
Verdict of_convolved_channels(const Plan& plan) {
  const ModelSpec& m = plan.model;
  const std::int64_t tp = plan.mesh.size(Axis::tp), cp = plan.mesh.size(Axis::cp);
  if (m.short_conv.kernel == 0 || m.hidden % (tp * cp) == 0) return {};
  Refusal refusal =
      refused("cp", {},
              "a rank gets as many channels of a short convolution as the others, and {} has {} "
              "over --tp {}",
              m.name, m.hidden, tp);
  for (std::int64_t n = 1; n * tp <= m.hidden; ++n)
    if (m.hidden % (tp * n) == 0 || n == 1) refusal.remedies.push_back(remedy("cp", n));
  return refusal;
}

// Equal runs of positions, and of the heads and channels that ranks exchange.
Verdict of_context_parallel(const Plan& plan, const Runner& runner) {
  const int cp = plan.mesh.size(Axis::cp), tp = plan.mesh.size(Axis::tp);
  if (cp == 1) return {};
  if (Verdict verdict = of_state_space_heads(plan)) return verdict;
  if (Verdict verdict = of_convolved_channels(plan)) return verdict;
  const bool is_hybrid = plan.context_kind == ContextKind::hybrid;
  if (is_hybrid && cp % plan.ulysses != 0)
    return refused("cp-ulysses", {remedy("cp-ulysses", cp, divisors)},
                   "the {} ranks of --cp do not divide into groups of so many", cp);
  const int ulysses = ulysses_size(plan);
  if (const std::int64_t unit = length_unit(plan), below = plan.seq_len / unit * unit;
      plan.seq_len != below) {
    std::vector<Remedy> multiples{remedy("seq-len", below), remedy("seq-len", below + unit)};
    if (below == 0) multiples.erase(multiples.begin());
    return refused("seq-len", std::move(multiples), "does not divide over --cp {}{}", cp,
                   cp > ulysses ? fmt::format(" with --cp-balance {}", name_of(plan.context_balance)) : "");
  }
  const std::int64_t heads = plan.model.num_heads / tp,
                     kv_heads = std::max<std::int64_t>(1, plan.model.num_kv_heads / tp);
  const bool attends = plan.model.num_attention_layers() > 0;
  const bool repeats = ulysses % kv_heads == 0 && runner.context_repeats_heads;
  if (!attends || (heads % ulysses == 0 && (kv_heads % ulysses == 0 || repeats))) return {};
  const std::string field = is_hybrid ? "cp-ulysses" : "cp";
  const std::int64_t divided = runner.context_repeats_heads ? heads : kv_heads;
  return refused(field, {remedy(field, divided, divisors), {"cp-kind", "ring"}},
                 "the {} query and {} key/value heads of a tp rank of {} do not divide over {} ranks{}{}",
                 heads, kv_heads, plan.model.name, ulysses, is_hybrid ? "" : " (--cp-kind ulysses)",
                 heads % ulysses == 0 && ulysses % kv_heads == 0
                     ? ", and the program has none on several (context_repeats_heads, in its file)"
                     : "");
}

// Equal runs of experts for each rank of a group, and equal groups for each block that ZeRO cuts state over.
Verdict of_expert_groups(const Plan& plan, const Runner& runner) {
  const ModelSpec& m = plan.model;
  const int ep = plan.mesh.ep, tp = plan.mesh.size(Axis::tp), etp = plan.mesh.etp == 0 ? tp : plan.mesh.etp;
  if (m.experts == Experts::none) {
    for (const auto& [field, size] : {std::pair{"ep", ep}, {"etp", plan.mesh.etp}})
      if (size > 1) return refused(field, {{field, "1"}}, "{} has no experts", m.name);
    return {};
  }
  if (runner.is_this_trainer && etp != tp)
    return refused("etp", {remedy("etp", tp)}, "experts are cut over --tp {} here, as MLPs are", tp);
  if (tp % etp != 0) return refused("etp", {remedy("etp", tp, divisors)}, "does not divide --tp {}", tp);
  const bool cuts = runner.is_this_trainer && plan.zero > 0;
  const int block = (cuts ? plan.shards() : plan.mesh.dp_cp_size()) * (tp / etp);
  if (m.num_experts % ep == 0 && block % ep == 0) return {};
  return refused("ep", {remedy("ep", std::gcd(m.num_experts, block), divisors)},
                 "{} on {} (--dp {} x --cp {}{}{}) do not divide into so many",
                 counted(m.num_experts, "expert"), counted(block, tp == etp ? "data-parallel rank" : "rank"),
                 plan.mesh.size(Axis::dp), plan.mesh.size(Axis::cp),
                 tp == etp ? "" : fmt::format(" x {}", tp / etp),
                 cuts && plan.hsdp > 1 ? fmt::format(" / --hsdp {}", plan.hsdp) : "");
}

// What follows is about what this trainer does.

Verdict of_compression(const Plan& plan) {
  if (plan.compression.kind == CompressionKind::none) return {};
  const Remedy without{"compress", "none"};
  if (plan.zero == 3)
    return refused(
        "compress", {without, {"zero", "0"}, {"zero", "1"}, {"zero", "2"}},
        "holds what it packs or carries over for all parameters, and --zero 3 is for ranks that have "
        "no room for that");
  if (plan.hsdp > 1)
    return refused("compress", {without, {"hsdp", "1"}},
                   "what travels between the {} replicas of --hsdp would not be compressed", plan.hsdp);
  if (plan.mesh.ep > 1)
    return refused("compress", {without, {"ep", "1"}},
                   "is not built for experts on several ranks, and --ep is {}", plan.mesh.ep);
  return {};
}

Verdict of_optimizer(const Plan& plan) {
  if (plan.zero > 0 && plan.bucket_bytes != default_bucket_bytes)
    return refused("bucket", {{"zero", "0"}}, "--zero {} reduces gradients layer by layer", plan.zero);
  if (!plan.optimizer_barrier && plan.zero_stage() > 0)
    return refused("optimizer-barrier", {{"optimizer-barrier", "on"}, {"zero", "0"}},
                   "with --zero {} the values of all ranks would have to travel twice", plan.zero);
  if (plan.optimizer == OptimizerKind::muon && !plan.optimizer_barrier)
    return refused("optimizer", {{"optimizer", "adamw"}, {"optimizer-barrier", "on"}},
                   "whole matrices are made for a step, and --optimizer-barrier off may take it back");
  if (plan.optimizer == OptimizerKind::muon && plan.offloads_optimizer())
    return refused(
        "optimizer",
        {{"optimizer", "adamw"}, {"offload", plan.offloads_activations() ? "activations" : "none"}},
        "needs the momentum of whole matrices at once, and --offload {} brings it in pieces",
        name_of(plan.offload));
  return {};
}

Verdict of_vocabulary(const Plan& plan) {
  if (!plan.cuts_vocabulary()) return {};
  const ModelSpec& m = plan.model;
  const int pp = plan.mesh.pp(), tp = plan.mesh.size(Axis::tp);
  const auto problem = [](Remedy other, auto form, const auto&... args) {
    return refused("vocabulary-parallel", {{"vocabulary-parallel", "off"}, std::move(other)}, "{}",
                   fmt::format(fmt::runtime(form), args...));
  };
  const Remedy alone{"pp", "1"};
  if (m.tied_embedding)
    return problem(alone, "{} ties its output layer to its embedding, which is on the first rank", m.name);
  if (m.caps.logits > 0)
    return problem(alone, "{} caps its logits, and the parts' probabilities are those of plain ones", m.name);
  if (output_matrix(m).frozen)
    return problem(alone, "the output layer of {} is frozen, and its parts make gradients", m.name);
  if (m.vocab < std::int64_t{pp} * tp)
    return problem(alone, "{} has a vocabulary of only {}, and --pp x --tp is {}", m.name, m.vocab, pp * tp);
  if (!plan.optimizer_barrier)
    return problem({"optimizer-barrier", "on"}, "with --optimizer-barrier off passes are taken back");
  if (plan.compression.kind != CompressionKind::none)
    return problem({"compress", "none"}, "its gradients are not compressed");
  return {};
}

// A module behind the last layer reads the embedding's table and the output matrix in one pass.
Verdict of_prediction(const Plan& plan) {
  const ModelSpec& m = plan.model;
  if (m.num_mtp_layers == 0) return {};
  if (plan.zero > 1)
    return refused("zero", {{"zero", "0"}, {"zero", "1"}},
                   "{} predicts one more token (num_mtp_layers), by parameters of both ends of the model",
                   m.name);
  if (plan.cuts_vocabulary())
    return refused("vocabulary-parallel", {{"vocabulary-parallel", "off"}, {"pp", "1"}},
                   "{} predicts one more token (num_mtp_layers), behind a whole output layer", m.name);
  if (plan.balancing.scope == BalanceScope::batch && plan.balancing.has_counts())
    return refused(
        "balance-scope", {{"balance-scope", "sequence"}, {"balance-scope", "microbatch"}},
        "{} predicts one more token (num_mtp_layers) in its backward passes, when counts are in use", m.name);
  return {};
}

Verdict of_balancing(const Plan& plan) {
  const ModelSpec& m = plan.model;
  const Balancing& b = plan.balancing;
  for (const auto& [field, value, is_of_groups] : {std::tuple{"aux-loss", b.expert_loss, false},
                                                   {"device-loss", b.device_loss, true},
                                                   {"communication-loss", b.communication_loss, true},
                                                   {"z-loss", b.z_loss, false},
                                                   {"bias-rate", b.bias_rate, false},
                                                   {"capacity", b.capacity, false}}) {
    if (value > 0 && m.experts == Experts::none)
      return refused(field, {{field, "0"}}, "{} has no experts", m.name);
    if (value > 0 && is_of_groups && m.router.groups == 1)
      return refused(
          field, {{field, "0"}},
          "the experts of {} are one group, whose load is always even; a model with router_groups of at "
          "least 2 has several",
          m.name);
  }
  return {};
}

// Whether every data-parallel rank's microbatches of so many are those of one rank.
bool has_whole_microbatches(const Plan& plan, std::int64_t micro_batch) {
  for (int dp = 1; dp < plan.mesh.size(Axis::dp); ++dp)
    if (dp_samples(plan, dp).begin % micro_batch != 0) return false;
  return true;
}

// A microbatch is a scope only where it is the same on one rank.
Verdict of_balance_scope(const Plan& plan) {
  if (plan.model.experts == Experts::none) return {};
  const Balancing& b = plan.balancing;
  const Remedy sequence{"balance-scope", "sequence"};
  if (b.scope == BalanceScope::batch && b.capacity > 0)
    return refused(
        "balance-scope", {sequence, {"balance-scope", "microbatch"}, {"capacity", "0"}},
        "with --capacity {} all ranks would have to agree which tokens of the batch an expert drops",
        b.capacity);
  if (b.scope != BalanceScope::microbatch || (!b.has_counts() && b.capacity == 0)) return {};
  if (has_whole_microbatches(plan, plan.micro_batch)) return {};
  std::int64_t fits = plan.micro_batch;
  while (!has_whole_microbatches(plan, fits)) --fits;
  return refused("balance-scope", {sequence, remedy("micro-batch", fits)},
                 "with --dp {} and --global-batch {} the microbatches of {} are others than on one rank",
                 plan.mesh.size(Axis::dp), plan.global_batch, plan.micro_batch);
}

const std::vector<Remedy> kinds_of_recompute{
    {"recompute", "none"}, {"recompute", "selective"}, {"recompute", "full"}};

Verdict of_recompute(const Plan& plan) {
  for (const Recompute& kind : plan.recompute.kinds())
    if (const std::string unknown = not_in_model(kind, plan.model); !unknown.empty())
      return refused("recompute", kinds_of_recompute, "no layer of {} has an op {}; it has {}",
                     plan.model.name, unknown, fmt::join(recompute_names(plan.model), ", "));
  return {};
}

Verdict of_recomputing_ranks(const Plan& plan) {
  const auto kinds = std::ssize(plan.recompute.kinds());
  if (kinds == 1 || kinds == plan.mesh.size(Axis::pp)) return {};
  Refusal refusal = refused("recompute", kinds_of_recompute, "is for {} pipeline ranks, and --pp is {}",
                            kinds, plan.mesh.size(Axis::pp));
  refusal.remedies.push_back(remedy("pp", kinds));
  return refusal;
}

Verdict of_tuning(const Plan& plan) {
  for (const auto& [field, problem] :
       {std::pair{"lora", lora_problem(plan.model)}, {"freeze", freeze_problem(plan.model)}}) {
    if (problem.words.empty()) continue;
    Refusal refusal = refused(field, {}, "{}", problem.words);
    for (const std::string& legal : problem.legal) refusal.remedies.push_back({field, legal});
    return refusal;
  }
  return {};
}

// How many microbatches each data-parallel rank has; 0 where they are not all of one size.
std::int64_t even_microbatches(const Plan& plan) {
  const std::int64_t dp = plan.mesh.size(Axis::dp), here = plan.global_batch / dp,
                     size = std::min(plan.micro_batch, here);
  return plan.global_batch % dp == 0 && here % size == 0 ? here / size : 0;
}

// Whether the sums over the sequences of the global batch are cut at nodes of their tree: into microbatches,
// these into data-parallel ranks, and these into the blocks that ZeRO sums over.
bool cuts_batch_at_nodes(const Plan& plan) {
  const std::int64_t dp = plan.mesh.size(Axis::dp), runs = dp * even_microbatches(plan),
                     ranks = plan.mesh.dp_cp_size();  // those of a cp group have one node among them
  return runs > 0 && cuts_halving_tree(plan.global_batch, runs) && cuts_halving_tree(runs, dp) &&
         cuts_halving_tree(ranks, dp) && cuts_halving_tree(ranks, plan.hsdp);
}

// Of a cut of the batch: the values of a field that its tree has nodes for.
template <class Set>
std::vector<Remedy> cuts_at_nodes(const Plan& plan, const std::string& field, std::int64_t most,
                                  const Set& set) {
  std::vector<Remedy> remedies;
  constexpr std::int64_t enough = 8;
  Plan other = plan;
  for (std::int64_t value = 1; value <= std::min<std::int64_t>(most, 4096); ++value) {
    set(other, value);
    if (cuts_batch_at_nodes(other)) remedies.push_back(remedy(field, value));
    if (std::ssize(remedies) == enough) break;
  }
  return remedies;
}

// The most tp ranks that have whole blocks of every sum over a dimension that is cut.
int most_ranks_with_blocks(const ModelSpec& m) {
  int most = num_sum_blocks({output_matrix(m)});
  const auto sum_over = [&](std::vector<ParamSpec> list) { most = std::min(most, num_sum_blocks(list)); };
  for (const LayerKind& kind : layer_kinds(m))
    for (const BlockOp& op : layer_program(m, kind.layer).ops) {
      if ((op.kind == OpKind::linear && op.weights.front().shard_dim >= 0) || op.kind == OpKind::latent)
        sum_over(op.weights);
      if (op.kind != OpKind::experts_in) continue;
      // The router, then gate, up and down of each, or the latter two, then what may weigh the last one.
      const std::vector<ParamSpec>& list = op.weights;
      const auto each = static_cast<std::size_t>(m.matrices_per_expert());
      const std::size_t last = (list.size() - 1) / each - 1;
      for (const std::size_t first : {std::size_t{1}, 1 + each * last}) {
        const auto begin = list.begin() + static_cast<std::ptrdiff_t>(first),
                   down = begin + static_cast<std::ptrdiff_t>(each) - 1;
        sum_over({begin, down});
        sum_over({*down});
      }
      // The gradient of a router's weight is over hidden units and over the bias behind them.
      if (!op.biases.empty() && num_sum_blocks({op.biases[each]}) != num_sum_blocks({list[each]})) most = 1;
    }
  return most;
}

// Whose gradient is a sum over heads.
std::string has_shared_norm(const ModelSpec& m) {
  return fmt::format("all heads of the gated delta rule of {} are on one rank, as they share a norm", m.name);
}

// With several tp ranks.
Verdict of_invariant_tensor_parallel(const Plan& plan) {
  const ModelSpec& m = plan.model;
  const int tp = plan.mesh.size(Axis::tp);
  const auto problem = [](const std::string& field, std::vector<Remedy> remedies, const std::string& why) {
    for (const Remedy& other : {Remedy{"tp", "1"}, Remedy{"numerics", "ordinary"}}) remedies.push_back(other);
    return refused(field, std::move(remedies), "{}", why);
  };
  if (m.state_space.is_delta())
    return problem("tp", {}, fmt::format("with --numerics invariant {}", has_shared_norm(m)));
  if (m.activation == Activation::xielu)
    return problem("tp", {},
                   fmt::format("with --numerics invariant an MLP of {} is on one rank, as xielu's numbers "
                               "have gradients of all its columns",
                               m.name));
  const int most = most_ranks_with_blocks(m);
  if (most % tp == 0) return {};
  std::vector<Remedy> legal;
  for (int ranks = 2; ranks <= most; ranks *= 2) legal.push_back(remedy("tp", ranks));
  return problem(
      "tp", std::move(legal),
      fmt::format("with --numerics invariant sums over what is cut are taken in {}", counted(most, "block")));
}

// With several cp ranks.
Verdict of_invariant_context_parallel(const Plan& plan) {
  const ModelSpec& m = plan.model;
  const auto problem = [](const std::string& field, std::vector<Remedy> remedies, const std::string& why) {
    if (field != "cp") remedies.push_back({"cp", "1"});
    remedies.push_back({"numerics", "ordinary"});
    return refused(field, std::move(remedies), "{}", why);
  };
  if (m.state_space.is_delta())
    return problem("cp", {{"cp", "1"}}, fmt::format("with --numerics invariant {}", has_shared_norm(m)));
  const int ulysses = ulysses_size(plan), tp = plan.mesh.size(Axis::tp);
  const std::int64_t groups = std::max<std::int64_t>(1, m.state_space.groups / tp);
  if (m.state_space.heads > 0 && groups % plan.mesh.size(Axis::cp) != 0)
    return problem("cp", {remedy("cp", groups, divisors)},
                   fmt::format("with --numerics invariant a group of state-space heads is on one rank, and a "
                               "tp rank of {} has {}",
                               m.name, counted(groups, "group")));
  const std::int64_t kv_heads = std::max<std::int64_t>(1, m.num_kv_heads / tp);
  if (kv_heads % ulysses == 0 || m.num_attention_layers() == 0) return {};
  const std::string field = plan.context_kind == ContextKind::hybrid ? "cp-ulysses" : "cp";
  return problem(
      field, {remedy(field, kv_heads, divisors), {"cp-kind", "ring"}, {"cp-kind", "allgather"}},
      fmt::format("with --numerics invariant a key/value head is on one rank, and there are {}", kv_heads));
}

// With a part of the output layer on each pipeline rank, and of that on each tp rank.
Verdict of_invariant_vocabulary_parallel(const Plan& plan) {
  const Remedy off{"vocabulary-parallel", "off"}, ordinary{"numerics", "ordinary"};
  if (plan.mesh.size(Axis::cp) > 1)
    return refused("vocabulary-parallel", {off, {"cp", "1"}, ordinary},
                   "with --numerics invariant a part of the output layer has whole sequences, and --cp cuts "
                   "them");
  const int blocks = num_sum_blocks({output_matrix(plan.model)}), tp = plan.mesh.size(Axis::tp);
  if (blocks % (plan.mesh.pp() * tp) == 0) return {};
  std::vector<Remedy> remedies;
  for (int pp = 2; pp * tp <= blocks; pp *= 2) remedies.push_back(remedy("pp", pp));
  for (const Remedy& other : {off, ordinary}) remedies.push_back(other);
  return refused("pp", std::move(remedies),
                 "with --numerics invariant a softmax over {} is made in {}, of which each of --pp x --tp {} "
                 "ranks has whole ones",
                 plan.model.vocab, counted(blocks, "block"), plan.mesh.pp() * tp);
}

// Whether an expert group has whole cp groups, where it has several ranks, and these, and of such groups
// those of a block, are nodes of the batch's tree.
bool cuts_experts_at_nodes(const Plan& plan) {
  const int dp = plan.mesh.size(Axis::dp), cp = plan.mesh.size(Axis::cp), ep = plan.mesh.ep;
  if (ep == 1) return cuts_halving_tree(dp * cp, plan.hsdp);
  if (ep % cp != 0 || dp % (ep / cp) != 0) return false;
  const int groups = dp / (ep / cp);
  return cuts_halving_tree(dp, groups) && cuts_halving_tree(groups, plan.hsdp);
}

std::vector<Remedy> expert_groups_at_nodes(const Plan& plan) {
  std::vector<Remedy> remedies;
  Plan other = plan;
  for (int ep = plan.mesh.dp_cp_size() / plan.hsdp; ep >= 1; --ep) {
    other.mesh.ep = ep;
    if (plan.model.num_experts % ep == 0 && cuts_experts_at_nodes(other))
      remedies.push_back(remedy("ep", ep));
  }
  return remedies;
}

// What goes from token to token is added up over a whole sequence.
Verdict of_state_space(const Plan& plan) {
  if (plan.model.state_space.heads == 0 || !multiplies_in_tf32(plan.precision)) return {};
  return refused(
      "precision", {{"precision", "f32"}, {"precision", "bf16"}}, "{}",
      fmt::format("{} has layers with a state space, whose scan is multiplied in f32 and never in TF32",
                  plan.model.name));
}

// Sums by sequences and by nothing else (docs/invariance.md).
Verdict of_numerics(const Plan& plan) {
  if (plan.numerics == Numerics::ordinary) return {};
  const auto problem = [](const std::string& field, std::vector<Remedy> remedies, auto form,
                          const auto&... args) {
    remedies.push_back({"numerics", "ordinary"});
    return refused(field, std::move(remedies), "{}", fmt::format(fmt::runtime(form), args...));
  };
  if (multiplies_in_tf32(plan.precision))
    return problem("precision", {{"precision", "f32"}},
                   "with --numerics invariant products are not left to a library, which TF32 is");
  if (multiplies_in_fp8(plan.precision))
    return problem(
        "precision", {{"precision", "bf16"}},
        "with --numerics invariant no number shows the mesh, and scales of fp8 are those of what a "
        "rank has");
  const Balancing& b = plan.balancing;
  if (plan.mesh.size(Axis::cp) > 1)
    if (Verdict verdict = of_invariant_context_parallel(plan)) return verdict;
  if (plan.cuts_vocabulary())
    if (Verdict verdict = of_invariant_vocabulary_parallel(plan)) return verdict;
  if (plan.compression.kind != CompressionKind::none)
    return problem("compress", {{"compress", "none"}},
                   "with --numerics invariant gradients travel as they are");
  if (!plan.optimizer_barrier)
    return problem("optimizer-barrier", {{"optimizer-barrier", "on"}},
                   "with --numerics invariant a step knows the norm of all gradients");
  if (b.scope == BalanceScope::microbatch && (b.has_counts() || b.capacity > 0))
    return problem("balance-scope", {{"balance-scope", "sequence"}},
                   "with --numerics invariant what routers count must not depend on microbatches");
  if (plan.mesh.size(Axis::tp) > 1)
    if (Verdict verdict = of_invariant_tensor_parallel(plan)) return verdict;
  if (cuts_batch_at_nodes(plan)) {
    if (cuts_experts_at_nodes(plan)) return {};
    return problem(
        "ep", expert_groups_at_nodes(plan),
        "with --numerics invariant the {} data-parallel ranks are cut in halves and halves of expert "
        "groups{}",
        plan.mesh.size(Axis::dp),
        plan.mesh.size(Axis::cp) == 1 ? "" : ", which have all of --cp or one rank");
  }
  const std::int64_t dp = plan.mesh.size(Axis::dp), batch = plan.global_batch;
  Plan whole = plan;
  whole.micro_batch = batch;
  whole.hsdp = 1;
  if (!cuts_batch_at_nodes(whole))
    return problem("dp",
                   cuts_at_nodes(whole, "dp", batch,
                                 [](Plan& p, std::int64_t v) { p.mesh.set(Axis::dp, static_cast<int>(v)); }),
                   "with --numerics invariant the global batch of {} is cut in halves and halves of these",
                   batch);
  whole.hsdp = plan.hsdp;
  if (!cuts_batch_at_nodes(whole))
    return problem(
        "hsdp",
        cuts_at_nodes(whole, "hsdp", dp, [](Plan& p, std::int64_t v) { p.hsdp = static_cast<int>(v); }),
        "with --numerics invariant the {} data-parallel ranks are cut in halves and halves of "
        "these",
        dp);
  return problem(
      "micro-batch",
      cuts_at_nodes(plan, "micro-batch", batch / dp, [](Plan& p, std::int64_t v) { p.micro_batch = v; }),
      "with --numerics invariant the {} sequences of a rank are cut in halves and halves of these",
      batch / dp);
}

template <class... Rules>
Verdict first_of(const Plan& plan, Rules... rules) {
  Verdict verdict;
  (void)((verdict = rules(plan)).has_value() || ...);
  return verdict;
}

}  // namespace

std::optional<Refusal> value_refusal(const Plan& plan, const Runner& runner) {
  if (runner.is_this_trainer && plan.model.latent_attention() &&
      plan.model.value_head_dim > plan.model.head_dim)
    return refused("model", {},
                   "has value_head_dim = {} above head_dim = {}, and attention runs with heads of one "
                   "width; legal: up to {}",
                   plan.model.value_head_dim, plan.model.head_dim, plan.model.head_dim);
  if (Verdict verdict = of_lengths(plan, runner)) return verdict;
  if (Verdict verdict = first_of(plan, of_document_end, of_ranges, of_recompute)) return verdict;
  validate(plan.mesh);
  return {};
}

// What ShapeRefusals::Axes is read by.
static Verdict of_axes(const Plan& plan, const Runner& runner) {
  if (Verdict verdict = of_tensor_parallel(plan, runner)) return verdict;
  return first_of(plan, of_data_parallel, of_layers);
}

static Verdict of_rest(const Plan& plan, const Runner& runner) {
  Verdict verdict = of_replicas(plan);
  if (!verdict) verdict = of_context_parallel(plan, runner);
  if (!verdict) verdict = of_recomputing_ranks(plan);
  if (!verdict) verdict = of_expert_groups(plan, runner);
  if (!verdict && !runner.is_this_trainer)
    verdict = first_of(plan, of_equal_shares, of_equal_cuts, of_offloaded_shards);
  if (verdict || !runner.is_this_trainer) return verdict;
  return first_of(plan, of_tuning, of_compression, of_optimizer, of_vocabulary, of_prediction, of_balancing,
                  of_balance_scope, of_state_space, of_numerics);
}

std::optional<Refusal> shape_refusal(const Plan& plan, const Runner& runner) {
  if (Verdict verdict = of_axes(plan, runner)) return verdict;
  return of_rest(plan, runner);
}

const std::optional<Refusal>& ShapeRefusals::of(const Plan& plan) {
  Axes axes{plan.mesh, plan.schedule};
  axes.mesh.ep = axes.mesh.etp = 1;
  if (axes_ != axes) {
    of_axes_ = of_axes(plan, runner_);
    axes_ = std::move(axes);
  }
  if (of_axes_) return of_axes_;
  return of_rest_ = of_rest(plan, runner_);
}

void judge(const Plan& plan) {
  validate(plan.model);
  if (const Verdict verdict = of_unknown_end(plan)) throw PlanRefusal(plan, *verdict);
  for (const auto& rules : {value_refusal, shape_refusal})
    if (const Verdict verdict = rules(plan, this_trainer)) throw PlanRefusal(plan, *verdict);
}

void validate(const Plan& plan) {
  check_with_remedies(plan, [](const Plan& one, const std::string&) { judge(one); });
}

}  // namespace echelon
