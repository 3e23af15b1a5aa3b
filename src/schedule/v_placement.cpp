#include "schedule/v_placement.h"

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace echelon {
namespace {

constexpr int period = 6;
constexpr int num_passes = 4;  // F0 F1 B1 B0

int chunk_of(int pass) { return pass == 1 || pass == 2; }
Op op_of(int pass) { return pass < 2 ? Op::F : Op::B; }
int stage_of(int ranks, int rank, int chunk) { return chunk == 0 ? rank : 2 * ranks - 1 - rank; }

struct Limits {
  std::vector<int> first_chunk;  // activations of each rank's first chunk
  int both = 2;                  // of both chunks of any rank
};

Limits limits_of(const Schedule& schedule) {
  Limits limits;
  for (const auto& list : schedule.ranks) {
    int held[2] = {}, most = 0;
    for (const Instruction& i : list) {
      const int change = i.op == Op::F ? 1 : i.op == Op::W ? -1 : 0;
      held[i.stage >= schedule.num_ranks()] += change;
      most = std::max(most, held[0]);
      limits.both = std::max(limits.both, held[0] + held[1]);
    }
    limits.first_chunk.push_back(most);
  }
  // The oldest microbatch must always have room for its second chunk.
  for (int& most : limits.first_chunk) most = std::min(most, limits.both - 1);
  return limits;
}

// List scheduling in slots of half a stage.
class Squeezer {
 public:
  Squeezer(Schedule& schedule, const std::vector<BlockStarts>& blocks)
      : schedule_(schedule),
        blocks_(blocks),
        limits_(limits_of(repeat_blocks("", std::min(schedule.num_microbatches, 2 * num_ranks()), blocks))),
        ranks_(blocks.size()) {
    for (auto& table : end_)
      table.assign(static_cast<std::size_t>(schedule.num_stages) * schedule.num_microbatches, never);
  }

  void run() {
    schedule_.ranks.resize(blocks_.size());
    std::int64_t left = std::int64_t{3} * schedule_.num_stages * schedule_.num_microbatches;
    for (int slot = 0; left > 0; ++slot) {
      const std::int64_t before = left;
      for (int r = 0; r < num_ranks(); ++r) left -= advance(r, slot);
      check(left < before, "a building block is stuck");
    }
  }

 private:
  static constexpr int never = std::numeric_limits<int>::max();
  struct RankState {
    int next[num_passes] = {};  // microbatch of each pass
    int next_weight[2] = {};    // of each chunk's W
    int held[2] = {};
  };

  int num_ranks() const { return static_cast<int>(blocks_.size()); }
  int& end_of(Op op, int stage, int microbatch) {
    return end_[op == Op::F ? 0 : 1]
               [static_cast<std::size_t>(stage) * schedule_.num_microbatches + microbatch];
  }

  bool ready(int r, int pass, int slot) {
    const RankState& rank = ranks_[static_cast<std::size_t>(r)];
    const int m = rank.next[pass], stage = stage_of(num_ranks(), r, chunk_of(pass));
    if (m == schedule_.num_microbatches) return false;
    if (op_of(pass) == Op::B)
      return end_of(Op::F, stage, m) <= slot &&
             (stage + 1 == schedule_.num_stages || end_of(Op::B, stage + 1, m) <= slot);
    if (rank.held[0] + rank.held[1] == limits_.both) return false;
    if (pass == 0 && rank.held[0] == limits_.first_chunk[static_cast<std::size_t>(r)]) return false;
    return stage == 0 || end_of(Op::F, stage - 1, m) <= slot;
  }

  // Passes run: 0 or 1.
  int advance(int r, int slot) {
    RankState& rank = ranks_[static_cast<std::size_t>(r)];
    auto& list = schedule_.ranks[static_cast<std::size_t>(r)];
    int best = -1, best_start = never;
    for (int pass = 0; pass < num_passes; ++pass) {
      const int start =
          blocks_[static_cast<std::size_t>(r)][static_cast<std::size_t>(pass)] + period * rank.next[pass];
      if (start < best_start && ready(r, pass, slot)) {
        best = pass;
        best_start = start;
      }
    }
    if (best >= 0) {
      const int stage = stage_of(num_ranks(), r, chunk_of(best)), m = rank.next[best]++;
      list.push_back({op_of(best), stage, m});
      end_of(op_of(best), stage, m) = slot + 1;
      if (op_of(best) == Op::F) ++rank.held[chunk_of(best)];
      return 1;
    }
    for (int chunk : {1, 0})
      if (rank.next_weight[chunk] < rank.next[chunk == 1 ? 2 : 3]) {
        list.push_back({Op::W, stage_of(num_ranks(), r, chunk), rank.next_weight[chunk]++});
        --rank.held[chunk];
        return 1;
      }
    return 0;
  }

  Schedule& schedule_;
  const std::vector<BlockStarts>& blocks_;
  const Limits limits_;
  std::vector<RankState> ranks_;
  std::vector<int> end_[2];  // slot at which F and B of (stage, microbatch) have ended
};

}  // namespace

Schedule repeat_blocks(const std::string& name, int microbatches, const std::vector<BlockStarts>& blocks) {
  const int ranks = static_cast<int>(blocks.size());
  Schedule schedule{name, 2 * ranks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    auto& list = schedule.ranks.emplace_back();
    std::vector<Instruction> waiting;  // W
    std::size_t next = 0;
    const std::size_t all = std::size_t{6} * microbatches;
    for (int slot = 0; list.size() < all; ++slot) {
      const std::size_t before = list.size();
      for (int pass = 0; pass < num_passes; ++pass) {
        const int since = slot - blocks[static_cast<std::size_t>(r)][static_cast<std::size_t>(pass)];
        if (since < 0 || since % period != 0 || since / period >= microbatches) continue;
        const int stage = stage_of(ranks, r, chunk_of(pass)), m = since / period;
        list.push_back({op_of(pass), stage, m});
        if (op_of(pass) == Op::B) waiting.push_back({Op::W, stage, m});
      }
      check(list.size() <= before + 1, "two passes of a building block share a slot");
      if (list.size() == before && next < waiting.size()) list.push_back(waiting[next++]);
    }
  }
  return schedule;
}

Schedule squeeze_blocks(const std::string& name, int microbatches, const std::vector<BlockStarts>& blocks) {
  Schedule schedule{name, 2 * static_cast<int>(blocks.size()), microbatches, {}};
  Squeezer(schedule, blocks).run();
  return schedule;
}

}  // namespace echelon
