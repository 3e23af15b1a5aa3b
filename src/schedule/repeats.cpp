#include "schedule/repeats.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <utility>

namespace echelon {
namespace {

using std::size_t;

constexpr size_t rounds_left = 3;  // the first and the last may hold something of their own

using List = std::span<const Instruction>;

// The change in how many values of each kind and stage a rank holds after part of its list, and the stages
// and parts of the output layer that it begins in that part.
struct Effect {
  std::map<std::pair<ValueKind, int>, int> held;
  std::set<std::pair<Op, int>> begun;
};
Effect effect_of(const Schedule& schedule, List whole, List part) {
  std::set<std::pair<ValueKind, int>> received;
  for (const Instruction& i : whole)
    if (i.op == Op::recv) received.emplace(i.carries, i.stage);
  Effect effect;
  for (const Instruction& i : part) {
    if (i.op == Op::recv) ++effect.held[{i.carries, i.stage}];
    if (!is_compute(i.op)) continue;
    if (i.op == Op::F || i.op == Op::V) effect.begun.emplace(i.op, i.stage);
    each_read(schedule, i, [&](const Value& v) {
      if (received.contains({v.kind, v.stage})) --effect.held[{v.kind, v.stage}];
    });
    each_write(schedule, i, [&](const Value& v) {
      if (!travels(v)) ++effect.held[{v.kind, v.stage}];
    });
    each_release(i, [&](const Value& v) { --effect.held[{v.kind, v.stage}]; });
  }
  return effect;
}

// Whether a rank can run this list: every value that a pass reads is there, and no pass runs twice.
bool is_complete(const Schedule& schedule, List list) {
  std::set<Value> there;
  std::set<std::tuple<Op, int, int>> passes;
  for (const Instruction& i : list) {
    bool reads = true;
    each_read(schedule, i,
              [&](const Value& v) { reads &= v.kind == ValueKind::weights || there.contains(v); });
    if (!reads || (is_compute(i.op) && !passes.emplace(i.op, i.stage, i.microbatch).second)) return false;
    each_write(schedule, i, [&](const Value& v) { there.insert(v); });
  }
  return true;
}

// Whether instructions [begin, end) are rounds of `length`, each `shift` microbatches after the one before.
struct Rounds {
  size_t begin = 0, end = 0, length = 0;
  int shift = 0;
};

// The longest stretch around the middle of the list that consists of rounds of this length.
Rounds rounds_of(const std::vector<Instruction>& list, size_t length) {
  const size_t middle = list.size() / 2;
  const int shift = list[middle].microbatch - list[middle - length].microbatch;
  const auto repeats = [&](size_t i) {  // the one a round before it
    Instruction later = list[i - length];
    later.microbatch += shift;
    return list[i] == later;
  };
  if (shift <= 0 || !repeats(middle)) return {};
  size_t first = middle, last = middle;
  while (first > length && repeats(first - 1)) --first;
  while (last + 1 < list.size() && repeats(last + 1)) ++last;
  return {first - length, last + 1, length, shift};
}

}  // namespace

std::vector<Instruction> without_repeats(const Schedule& lowered, int rank) {
  const std::vector<Instruction>& list = lowered.ranks[static_cast<size_t>(rank)];
  const List all(list);
  const auto goes_on_alike = [&](const Rounds& rounds) {
    const Effect effect = effect_of(lowered, all, all.subspan(rounds.begin, rounds.length));
    return std::all_of(effect.held.begin(), effect.held.end(),
                       [](const auto& held) { return held.second == 0; }) &&
           effect.begun == effect_of(lowered, all, all).begun;
  };
  Rounds found;
  for (size_t length = 1; found.length == 0 && (rounds_left + 1) * length <= list.size(); ++length) {
    const Rounds rounds = rounds_of(list, length);
    if (rounds.end - rounds.begin > rounds_left * length && goes_on_alike(rounds)) found = rounds;
  }
  if (found.length == 0) return list;
  const size_t left_out = (found.end - found.begin) / found.length - rounds_left;
  std::vector<Instruction> shorter(list.begin(), list.begin() + static_cast<std::ptrdiff_t>(found.begin));
  for (size_t i = found.begin + left_out * found.length; i < list.size(); ++i) {
    shorter.push_back(list[i]);
    shorter.back().microbatch -= static_cast<int>(left_out) * found.shift;
  }
  // In DualPipe each direction leaves out its own microbatches.
  std::map<int, int> numbers;
  for (const Instruction& i : shorter) numbers[i.microbatch] = 0;
  int next = 0;
  for (auto& [microbatch, number] : numbers) number = next++;
  for (Instruction& i : shorter) i.microbatch = numbers.at(i.microbatch);
  return is_complete(lowered, shorter) ? shorter : list;
}

}  // namespace echelon
