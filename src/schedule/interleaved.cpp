// Interleaved 1F1B (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473): V chunks per rank; chunk c of
// rank r is stage cP+r. Microbatches go through the chunks in groups of N: all of a group through chunk 0,
// then through chunk 1, and so on; the backward pass takes the chunks in reverse. Bubble (P-1)(F+B+W)/V, V
// times the messages. Peak on rank r (2(P-r-1) + (V-1)N + 1)/V activations: P + (P-1)/V on rank 0 with N = P.
//
// The paper asks for M mod P = 0. Other M work with groups of P and a smaller last one: memory stays the same
// and the bubble grows, from 4.5 to 10.0 at P = 4, V = 2, M = 13. With floor(M/P) groups as equal as possible
// instead, any M >= P has the bubble of M mod P = 0; a group of P+1 costs (V-1)/V of an activation more.
#include <algorithm>

#include "base/error.h"
#include "base/split.h"
#include "schedule/schedules.h"

namespace echelon {
namespace {

std::vector<int> groups_of(int size, int ranks, int microbatches, int chunks) {
  std::vector<int> groups(microbatches / size, size);
  const int rest = microbatches % size;
  if (rest == 0) return groups;
  // A rank starts the backward passes of a group after running this far ahead with forward passes. A last
  // group too small for that would deadlock; so the pattern is that of a whole group, without the
  // instructions that do not exist.
  const bool in_time = size + rest >= 2 * (std::min(ranks, size) - 1) || (chunks == 2 && rest == 1);
  groups.push_back(in_time ? rest : size);
  return groups;
}

Schedule in_groups(const char* name, int ranks, int microbatches, int chunks,
                   const std::vector<int>& groups) {
  if (chunks == 1) {
    Schedule plain = one_f_one_b(ranks, microbatches);
    plain.name = name;
    return plain;
  }
  struct Pass {
    int chunk, microbatch;
  };
  std::vector<Pass> order;  // of the forwards; the backwards' is the same with chunk V-1-c
  int first = 0;
  for (int size : groups) {
    for (int c = 0; c < chunks; ++c)
      for (int m = first; m < first + size; ++m) order.push_back({c, m});
    first += size;
  }

  Schedule schedule{name, ranks * chunks, microbatches, {}};
  for (int r = 0; r < ranks; ++r) {
    auto& list = schedule.ranks.emplace_back();
    list.reserve(2 * order.size());
    const auto run = [&](Op op, int chunk, int microbatch) {
      if (microbatch < microbatches) list.push_back({op, chunk * ranks + r, microbatch});
    };
    // 2(P-r-1), or less if a group is too small for it.
    const int ahead = 2 * std::min(ranks - r - 1, groups[0] - 1) + (chunks - 1) * groups[0];
    const std::size_t warm_up = std::min(static_cast<std::size_t>(ahead), order.size());
    for (std::size_t k = 0; k < warm_up; ++k) run(Op::F, order[k].chunk, order[k].microbatch);
    for (std::size_t k = 0; k < order.size(); ++k) {
      if (warm_up + k < order.size()) run(Op::F, order[warm_up + k].chunk, order[warm_up + k].microbatch);
      run(Op::BW, chunks - 1 - order[k].chunk, order[k].microbatch);
    }
  }
  return schedule;
}

}  // namespace

std::vector<int> even_groups(int ranks, int microbatches) {
  const int count = std::max(1, microbatches / ranks);
  std::vector<int> groups;
  for (int i = 0; i < count; ++i)
    groups.push_back(static_cast<int>(split_range(microbatches, count, i).size()));
  return groups;
}

Schedule interleaved(int ranks, int microbatches, int chunks, int group) {
  check(chunks >= 1 && group >= 0, "interleaved: chunks and group");
  const int size = std::min(group == 0 ? ranks : group, microbatches);
  return in_groups("interleaved", ranks, microbatches, chunks, groups_of(size, ranks, microbatches, chunks));
}

Schedule interleaved_even(int ranks, int microbatches, int chunks) {
  check(chunks >= 1, "interleaved: chunks");
  return in_groups("interleaved-even", ranks, microbatches, chunks, even_groups(ranks, microbatches));
}

}  // namespace echelon
