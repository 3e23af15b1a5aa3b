#include "schedule/repeats.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

namespace echelon {
namespace {

using std::size_t;

constexpr int longest_period = 8;  // microbatches

// What a rank holds where F of its first stage comes next, and what it runs from there to the next such F.
// Microbatches count from the one of this F.
struct Stretch {
  std::vector<std::tuple<ValueKind, int, int>> held;  // kind, stage, microbatch
  std::vector<Instruction> run;
  bool operator==(const Stretch&) const = default;
};

// One for each microbatch, what comes before the first F with it. Empty where those F are not in order.
std::vector<Stretch> stretches(const Schedule& schedule, const std::vector<Instruction>& list) {
  const auto first = std::find_if(list.begin(), list.end(), [](const Instruction& i) { return i.op == Op::F; });
  std::set<std::tuple<ValueKind, int, int>> held;
  std::vector<Stretch> all(1);
  for (const Instruction& i : list) {
    if (i.op == Op::F && i.stage == first->stage && i.microbatch > 0) {
      if (i.microbatch != static_cast<int>(all.size())) return {};
      all.emplace_back();
      for (const auto& [kind, stage, microbatch] : held)
        all.back().held.emplace_back(kind, stage, microbatch - i.microbatch);
    }
    all.back().run.push_back(i);
    all.back().run.back().microbatch -= static_cast<int>(all.size()) - 1;
    each_write(schedule, i, [&](const Value& v) {
      if (!travels(v)) held.insert({v.kind, v.stage, v.microbatch});
    });
    each_release(i, [&](const Value& v) { held.erase({v.kind, v.stage, v.microbatch}); });
  }
  return all;
}

}  // namespace

Schedule without_repeats(const Schedule& schedule) {
  const int count = schedule.num_microbatches;
  std::vector<std::vector<Stretch>> ranks;
  for (const auto& list : schedule.ranks) {
    ranks.push_back(stretches(schedule, list));
    if (static_cast<int>(ranks.back().size()) != count) return schedule;
  }
  // The longest run of microbatches that are like those a period before them, on all ranks.
  int begin = 0, most = 0, period = 1;
  for (int p = 1; p <= std::min(longest_period, count - 1); ++p) {
    int alike = 0;
    for (int m = p; m < count; ++m) {
      const bool is_alike = std::all_of(ranks.begin(), ranks.end(), [&](const std::vector<Stretch>& rank) {
        return rank[static_cast<size_t>(m)] == rank[static_cast<size_t>(m - p)];
      });
      alike = is_alike ? alike + 1 : 0;
      if (alike <= most) continue;
      most = alike;
      begin = m - alike + 1;
      period = p;
    }
  }
  // The period before `begin` stays, one behind what is left out, and as many microbatches as a message may be
  // received early.
  const int left_out = std::max(0, most - period - schedule.num_ranks()) / period * period;
  if (left_out == 0) return schedule;
  Schedule shorter = schedule;
  shorter.num_microbatches = count - left_out;
  for (size_t r = 0; r < ranks.size(); ++r) {
    auto& list = shorter.ranks[r];
    list.clear();
    for (int m = 0; m < count; ++m) {
      if (m >= begin && m < begin + left_out) continue;
      for (Instruction i : ranks[r][static_cast<size_t>(m)].run) {
        i.microbatch += m < begin ? m : m - left_out;
        list.push_back(i);
      }
    }
  }
  return shorter;
}

}  // namespace echelon
