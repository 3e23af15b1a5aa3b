#include "spec/context_layout.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "spec/plan.h"

namespace echelon {
int ulysses_size(const Plan& plan) {
  const int cp = plan.mesh.size(Axis::cp);
  if (cp == 1 || plan.context_kind == ContextKind::ulysses) return cp;
  return plan.context_kind == ContextKind::hybrid ? plan.ulysses : 1;
}

std::int64_t length_unit(const Plan& plan) {
  const std::int64_t cp = plan.mesh.size(Axis::cp), ring = cp / ulysses_size(plan);
  const bool halves = ring > 1 && plan.context_balance == ContextBalance::zigzag;
  return halves ? std::lcm(2 * ring, cp) : cp;
}

ContextLayout::ContextLayout(const Plan& plan)
    : ring_(plan.mesh.size(Axis::cp) / ulysses_size(plan)),
      ulysses_(ulysses_size(plan)),
      balance_(plan.context_balance),
      seq_len_(plan.seq_len) {
  // Else runs would overlap, leave positions out, or have none.
  check(seq_len_ >= 1 && seq_len_ % length_unit(plan) == 0, "sequences divide over the cp group");
}

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

// Sum of min(first + i stride, most) for i < count; most 0: no bound.
static std::int64_t rising_sum(std::int64_t first, std::int64_t stride, std::int64_t count,
                               std::int64_t most) {
  std::int64_t rising = count;
  if (most > 0) rising = first >= most ? 0 : std::min(count, (most - first + stride - 1) / stride);
  return rising * first + stride * (rising * (rising - 1) / 2) + (count - rising) * most;
}

std::int64_t ContextLayout::document_pairs(int ring_index, const std::vector<std::int64_t>& starts,
                                           std::int64_t window) const {
  std::int64_t pairs = 0;
  for (const PositionRun& run : runs(ring_index)) {
    // The document that the run begins in.
    auto start = std::upper_bound(starts.begin(), starts.end(), run.begin) - 1;
    for (std::int64_t i = 0; i < run.size; ++start) {
      const std::int64_t end = start + 1 == starts.end() ? seq_len_ : start[1];
      const std::int64_t next =
          std::min(run.size, std::max(i, (end - run.begin + run.stride - 1) / run.stride));
      pairs += rising_sum(run.at(i) - *start + 1, run.stride, next - i, window);
      i = next;
    }
  }
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

}  // namespace echelon
