// Where the tokens of a sequence are under context parallelism (cp): which positions a rank holds, in which
// order, and whose attention they take part in. The trainer, the predictions and the tests read this.
#pragma once

#include <cstdint>
#include <vector>

#include "spec/choices.h"

namespace echelon {

struct Plan;

// How attention reaches the keys and values of other ranks.
enum class ContextKind {
  ring,       // they travel around the ring (Ring Attention)
  ulysses,    // all-to-all turns parts of the sequence into parts of the heads (DeepSpeed-Ulysses)
  allgather,  // every rank gathers all of them
  hybrid,     // Ulysses inside groups of neighbouring ranks, a ring across the groups (USP)
};
template <>
inline constexpr std::array choice_names<ContextKind>{"ring", "ulysses", "allgather", "hybrid"};

// Which positions a rank of the ring holds. Under a causal mask late positions see more keys.
enum class ContextBalance {
  zigzag,  // the sequence is 2R chunks, of which rank r holds r and 2R-1-r: every rank has the same work
  stripe,  // positions r, r + R, r + 2R ... (Brandon et al. 2023): the same work but for a diagonal
  none,    // contiguous chunks in rank order: the last rank has nearly twice the mean work
};
template <>
inline constexpr std::array choice_names<ContextBalance>{"zigzag", "stripe", "none"};

// What a token may attend to.
enum class AttentionMask {
  causal,
  document,  // causal, and not across documents
};
template <>
inline constexpr std::array choice_names<AttentionMask>{"causal", "document"};

// Positions begin, begin + stride, ...: `size` of them.
struct PositionRun {
  std::int64_t begin = 0, stride = 1, size = 0;
  std::int64_t at(std::int64_t i) const { return begin + i * stride; }
  std::int64_t end() const { return at(size - 1) + 1; }  // one past the last position
};

// The ranks of a cp group as ring x Ulysses: index = ring index * ulysses + ulysses index, so that ranks that
// exchange heads are neighbours. The ranks with one ring index hold the tokens of its runs in equal
// consecutive parts; each computes attention for all of these tokens, on its part of the heads.
class ContextLayout {
 public:
  // Takes a plan whose kind, balance and sizes have passed validate(); InvariantError if its sequences do not
  // divide.
  explicit ContextLayout(const Plan& plan);

  int ring() const { return ring_; }        // ranks that keys and values are spread over
  int ulysses() const { return ulysses_; }  // ranks that heads are spread over
  int ring_index(int cp_rank) const { return cp_rank / ulysses_; }
  int ulysses_index(int cp_rank) const { return cp_rank % ulysses_; }
  std::int64_t tokens_here() const {
    return seq_len_ / ring_ / ulysses_;
  }                                                              // tokens of a sequence that each rank holds
  std::int64_t core_tokens() const { return seq_len_ / ring_; }  // tokens that each rank's attention computes

  // The core tokens of a ring index, in order.
  std::vector<PositionRun> runs(int ring_index) const;
  // The positions of a rank's tokens, in order.
  std::vector<std::int64_t> positions(int cp_rank) const;

  // A run of `own`'s queries and a run of `source`'s keys that the causal mask does not wholly hide from
  // them.
  struct RunPair {
    std::size_t queries = 0, keys = 0;  // indices into runs()
    std::int64_t offset = 0;            // query i sees keys up to i + offset
  };
  std::vector<RunPair> pairs(int own, int source) const;

  // Unmasked query/key pairs, for one sequence and one head, that a ring index computes under a causal mask.
  std::int64_t causal_pairs(int ring_index) const;
  // The same under a document mask, where a query sees only its own document. `starts`: positions where
  // documents begin, rising, the first 0. With `window` > 0 a query sees only its last `window` keys.
  std::int64_t document_pairs(int ring_index, const std::vector<std::int64_t>& starts,
                              std::int64_t window = 0) const;
  // The largest load of a rank over the mean load.
  double imbalance() const;

 private:
  int ring_ = 1, ulysses_ = 1;
  ContextBalance balance_;
  std::int64_t seq_len_;
};

// The number of ranks of a cp group that exchange heads.
int ulysses_size(const Plan& plan);
// The plan's sequence length must be a multiple of this.
std::int64_t length_unit(const Plan& plan);

}  // namespace echelon
