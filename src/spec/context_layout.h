// Where the tokens of a sequence are when it is cut over the cp axis: which positions a rank holds, in which
// order, and which rank's attention computes them. Read by the trainer, by the layers' predictions and by the
// tests.
#pragma once

#include <cstdint>
#include <vector>

#include "spec/choices.h"

namespace echelon {

struct Plan;

// How attention reaches the keys and values of other ranks.
enum class ContextKind {
  ring,       // they travel from rank to rank (RingAttention)
  ulysses,    // all-to-all from a part of the sequence to a part of the heads (DeepSpeed-Ulysses)
  allgather,  // every rank gathers all of them
  hybrid,     // Ulysses inside groups of neighbouring ranks, a ring across the groups (USP)
};
template <>
inline constexpr std::array choice_names<ContextKind>{"ring", "ulysses", "allgather", "hybrid"};

// Which positions a rank of the ring holds. Under a causal mask late positions have more keys.
enum class ContextBalance {
  zigzag,  // of 2R chunks, rank r has r and 2R-1-r: every rank has the same work
  stripe,  // r, r + R, r + 2R ... (Brandon et al. 2023): the same but for a diagonal
  none,    // one chunk after another: the last rank has nearly twice the mean
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
  std::int64_t end() const { return at(size - 1) + 1; }  // behind the last one
};

// Ranks of the cp group: index = ring index * ulysses + ulysses index, so that those that exchange heads are
// neighbours. The ranks of one ring index hold the tokens of its runs in equal parts, one after another; each
// computes attention for all of them, on its part of the heads.
class ContextLayout {
 public:
  // For a plan whose kind, balance and sizes validate() has passed; InvariantError where its sequences do not
  // divide.
  explicit ContextLayout(const Plan& plan);

  int ring() const { return ring_; }        // ranks that keys and values are cut over
  int ulysses() const { return ulysses_; }  // ranks that heads are cut over
  int ring_index(int cp_rank) const { return cp_rank / ulysses_; }
  int ulysses_index(int cp_rank) const { return cp_rank % ulysses_; }
  std::int64_t tokens_here() const { return seq_len_ / ring_ / ulysses_; }  // of a sequence, on each rank
  std::int64_t core_tokens() const { return seq_len_ / ring_; }  // that attention of a rank computes

  // The core tokens of a ring index in their order.
  std::vector<PositionRun> runs(int ring_index) const;
  // Positions of a rank's tokens in their order.
  std::vector<std::int64_t> positions(int cp_rank) const;

  // Runs of `own`'s queries and `source`'s keys between which a causal mask leaves something.
  struct RunPair {
    std::size_t queries = 0, keys = 0;  // indices into runs()
    std::int64_t offset = 0;            // query i sees keys up to i + offset
  };
  std::vector<RunPair> pairs(int own, int source) const;

  // Key/query pairs of a causal sequence and one head that a ring index computes.
  std::int64_t causal_pairs(int ring_index) const;
  // The same where documents begin at `starts`, in rising order and the first at 0, and a query sees its own
  // alone; with a window the last `window` keys of it. 0: no window.
  std::int64_t document_pairs(int ring_index, const std::vector<std::int64_t>& starts,
                              std::int64_t window = 0) const;
  // Load / average of the rank with most of them.
  double imbalance() const;

 private:
  int ring_ = 1, ulysses_ = 1;
  ContextBalance balance_;
  std::int64_t seq_len_;
};

// Ranks of a cp group that exchange heads.
int ulysses_size(const Plan& plan);
// What the plan's sequences must be a multiple of.
std::int64_t length_unit(const Plan& plan);

}  // namespace echelon
