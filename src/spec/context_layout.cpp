#include "spec/context_layout.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "base/error.h"
#include "spec/plan_refusal.h"

namespace echelon {
namespace {

template <class Kind, std::size_t n>
Kind parse(const std::array<Kind, n>& kinds, const char* (*name)(Kind), const std::string& text,
           const std::string& field) {
  std::string legal;
  for (Kind kind : kinds) {
    if (text == name(kind)) return kind;
    legal += fmt::format("{}{}", legal.empty() ? "" : ", ", name(kind));
  }
  refuse("{} {}: no such kind; legal: {}", field, text, legal);
}

int ulysses_size(const Plan& plan) {
  const int cp = plan.mesh.size(Axis::cp);
  if (cp == 1 || plan.context_kind == ContextKind::ulysses) return cp;
  return plan.context_kind == ContextKind::hybrid ? plan.ulysses : 1;
}

// What a sequence's length must be a multiple of.
std::int64_t length_unit(const Plan& plan) {
  const std::int64_t cp = plan.mesh.size(Axis::cp), ring = cp / ulysses_size(plan);
  const bool halves = ring > 1 && plan.context_balance == ContextBalance::zigzag;
  return halves ? std::lcm(2 * ring, cp) : cp;
}

}  // namespace

const char* context_kind_name(ContextKind kind) {
  switch (kind) {
    case ContextKind::ring:
      return "ring";
    case ContextKind::ulysses:
      return "ulysses";
    case ContextKind::allgather:
      return "allgather";
    case ContextKind::hybrid:
      return "hybrid";
  }
  return "?";
}

ContextKind parse_context_kind(const std::string& text, const std::string& field) {
  return parse(
      std::array{ContextKind::ring, ContextKind::ulysses, ContextKind::allgather, ContextKind::hybrid},
      context_kind_name, text, field);
}

const char* context_balance_name(ContextBalance balance) {
  return balance == ContextBalance::zigzag ? "zigzag" : balance == ContextBalance::stripe ? "stripe" : "none";
}

ContextBalance parse_context_balance(const std::string& text, const std::string& field) {
  return parse(std::array{ContextBalance::zigzag, ContextBalance::stripe, ContextBalance::none},
               context_balance_name, text, field);
}

const char* attention_mask_name(AttentionMask mask) {
  return mask == AttentionMask::causal ? "causal" : "document";
}

AttentionMask parse_attention_mask(const std::string& text, const std::string& field) {
  return parse(std::array{AttentionMask::causal, AttentionMask::document}, attention_mask_name, text, field);
}

ContextLayout::ContextLayout(const Plan& plan)
    : ring_(plan.mesh.size(Axis::cp) / ulysses_size(plan)),
      ulysses_(ulysses_size(plan)),
      balance_(plan.context_balance),
      seq_len_(plan.seq_len) {}

std::vector<PositionRun> ContextLayout::runs(int ring_index) const {
  if (ring_ == 1) return {{0, 1, seq_len_}};
  if (balance_ == ContextBalance::stripe) return {{ring_index, ring_, core_tokens()}};
  if (balance_ == ContextBalance::none) return {{ring_index * core_tokens(), 1, core_tokens()}};
  const std::int64_t chunk = core_tokens() / 2;
  return {{ring_index * chunk, 1, chunk}, {(2 * ring_ - 1 - ring_index) * chunk, 1, chunk}};
}

std::vector<std::int64_t> ContextLayout::positions(int cp_rank) const {
  std::vector<std::int64_t> core;
  for (const PositionRun& run : runs(ring_index(cp_rank)))
    for (std::int64_t i = 0; i < run.size; ++i) core.push_back(run.at(i));
  const auto begin = core.begin() + ulysses_index(cp_rank) * tokens_here();
  return {begin, begin + tokens_here()};
}

// Between runs of one stride.
static std::int64_t causal_offset(const PositionRun& queries, const PositionRun& keys) {
  const std::int64_t distance = queries.begin - keys.begin;
  return distance >= 0 ? distance / queries.stride : -((-distance + queries.stride - 1) / queries.stride);
}

std::vector<ContextLayout::RunPair> ContextLayout::pairs(int own, int source) const {
  const std::vector<PositionRun> queries = runs(own), keys = runs(source);
  std::vector<RunPair> pairs;
  for (std::size_t i = 0; i < queries.size(); ++i)
    for (std::size_t j = 0; j < keys.size(); ++j)
      if (const std::int64_t offset = causal_offset(queries[i], keys[j]); offset + queries[i].size > 0)
        pairs.push_back({i, j, offset});
  return pairs;
}

std::int64_t ContextLayout::causal_pairs(int ring_index) const {
  std::int64_t pairs = 0;  // position p sees p + 1 keys
  for (const PositionRun& run : runs(ring_index))
    pairs += run.size * (run.begin + 1) + run.stride * (run.size * (run.size - 1) / 2);
  return pairs;
}

double ContextLayout::imbalance() const {
  std::int64_t most = 0, sum = 0;
  for (int r = 0; r < ring_; ++r) {
    most = std::max(most, causal_pairs(r));
    sum += causal_pairs(r);
  }
  return static_cast<double>(most) * ring_ / static_cast<double>(sum);
}

// Why the heads of a tp rank cannot be exchanged between the plan's ranks, and the ranks between which they
// could be.
static void validate_exchanged_heads(const Plan& plan) {
  const int cp = plan.mesh.size(Axis::cp), tp = plan.mesh.size(Axis::tp), ulysses = ulysses_size(plan);
  const std::int64_t heads = plan.model.num_heads / tp;
  const std::int64_t kv_heads = plan.model.num_kv_heads >= tp ? plan.model.num_kv_heads / tp : 1;
  const auto fits = [&](std::int64_t n) {
    return heads % n == 0 && (kv_heads % n == 0 || n % kv_heads == 0);
  };
  if (fits(ulysses)) return;
  const bool is_hybrid = plan.context_kind == ContextKind::hybrid;
  std::vector<Remedy> legal;
  for (int n = 1; n <= heads; ++n) {
    if (!fits(n) || (is_hybrid && cp % n != 0)) continue;
    legal.push_back(is_hybrid ? remedy("--cp-ulysses", &Plan::ulysses, n) : remedy(Axis::cp, n));
  }
  legal.push_back({"--cp-kind", "ring", [](Plan& other) { other.context_kind = ContextKind::ring; }});
  const std::string flag = is_hybrid ? "--cp-ulysses" : "--cp",
                    given = is_hybrid ? fmt::format("--cp-ulysses {}", ulysses)
                                      : fmt::format("--cp {} --cp-kind ulysses", cp);
  throw PlanRefusal(
      flag,
      fmt::format("{}: the {} query and {} key/value heads of a tp rank of {} do not divide over {} "
                  "ranks",
                  given, heads, kv_heads, plan.model.name, ulysses),
      legal);
}

void validate_context(const Plan& plan) {
  const int cp = plan.mesh.size(Axis::cp);
  if (plan.document_end < -1 || plan.document_end >= plan.model.vocab)
    refuse("--document-end {}: {} has tokens 0 to {}", plan.document_end, plan.model.name,
           plan.model.vocab - 1);
  constexpr std::int64_t bytes = 257, gpt2 = 50257;
  if (plan.mask == AttentionMask::document && plan.document_end < 0 && plan.model.vocab != bytes &&
      plan.model.vocab != gpt2)
    refuse("--mask document: say which of the {} tokens of {} ends a document with --document-end",
           plan.model.vocab, plan.model.name);
  if (cp == 1) return;
  if (plan.context_kind == ContextKind::hybrid && (plan.ulysses < 1 || cp % plan.ulysses != 0)) {
    std::vector<Remedy> legal;
    for (int n = 1; n <= cp; ++n)
      if (cp % n == 0) legal.push_back(remedy("--cp-ulysses", &Plan::ulysses, n));
    throw PlanRefusal(
        "--cp-ulysses",
        fmt::format("--cp-ulysses {}: the {} ranks of --cp do not divide into groups of so many",
                    plan.ulysses, cp),
        legal);
  }
  const std::int64_t unit = length_unit(plan), below = plan.seq_len / unit * unit;
  if (plan.seq_len % unit != 0) {
    const bool is_balanced = cp > ulysses_size(plan);
    std::vector<Remedy> legal;
    for (std::int64_t length : {below, below + unit})
      if (length > 0) legal.push_back(remedy("--seq-len", &Plan::seq_len, length));
    throw PlanRefusal("--seq-len",
                      fmt::format("--seq-len {}: does not divide over --cp {}{}", plan.seq_len, cp,
                                  is_balanced ? fmt::format(" with --cp-balance {}",
                                                            context_balance_name(plan.context_balance))
                                              : ""),
                      legal);
  }
  validate_exchanged_heads(plan);
}

}  // namespace echelon
