#include "comm/diagnosis.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <utility>

namespace echelon {
namespace {

bool is_waiting(const RankState& s) { return !s.waits_in.empty(); }
// Whom it waits for is to be known from its record.
bool can_be_followed(const RankState& s) { return !s.gone && !s.silent; }

using States = std::vector<RankState>;
const RankState& state_of(const States& states, int rank) { return states[static_cast<std::size_t>(rank)]; }

// The ranks that hold this one up by making it wait: a message that only has to be received is on its way,
// unless nobody is there to receive it.
std::vector<int> holding_up(const States& states, const RankState& s) {
  if (!can_be_followed(s) || !is_waiting(s)) return {};
  std::vector<int> ranks = s.waits_for;
  if (s.to_take) std::erase_if(ranks, [&](int rank) { return can_be_followed(state_of(states, rank)); });
  return ranks;
}

// The ranks that can be come to from these, themselves included.
std::set<int> found_from(const States& states, const std::vector<int>& first) {
  std::set<int> found;
  for (std::vector<int> next = first; !next.empty();) {
    const int rank = next.back();
    next.pop_back();
    if (!found.insert(rank).second) continue;
    const std::vector<int> more = holding_up(states, state_of(states, rank));
    next.insert(next.end(), more.begin(), more.end());
  }
  return found;
}

// Of those ranks that are `so`, the one that has been so for longest; the lowest of several, -1: none.
template <class So, class Seconds>
int longest(const States& states, const std::set<int>& ranks, const So& so, const Seconds& seconds) {
  int found = -1;
  for (int rank : ranks) {
    const RankState& s = state_of(states, rank);
    if (so(s) && (found < 0 || seconds(s) > seconds(state_of(states, found)))) found = rank;
  }
  return found;
}

std::string list_ranks(const std::vector<int>& ranks) {
  return ranks.size() == 1 ? fmt::format("rank {}", ranks[0])
                           : fmt::format("ranks {}", fmt::join(ranks, ", "));
}

Diagnosis blame(const RankState& s, const std::string& why) {
  return {s.rank, {}, fmt::format("; the rank at fault is rank {}: {}", s.rank, why)};
}

// The shortest way from a rank back to itself; empty: there is none. `follows`: from one rank to another.
template <class Follows>
std::vector<int> shortest_circle(const States& states, const std::set<int>& found, const Follows& follows) {
  std::vector<int> shortest;
  for (int first : found) {
    std::map<int, int> before;  // on the way from `first`
    std::deque<int> next{first};
    while (!next.empty() && !before.contains(first)) {
      const int rank = next.front();
      next.pop_front();
      for (int other : holding_up(states, state_of(states, rank)))
        if (follows(rank, other) && before.emplace(other, rank).second) next.push_back(other);
    }
    if (!before.contains(first)) continue;
    std::vector<int> circle{first};
    for (int rank = before[first]; rank != first; rank = before[rank]) circle.push_back(rank);
    std::sort(circle.begin(), circle.end());
    if (shortest.empty() || circle.size() < shortest.size()) shortest = circle;
  }
  return shortest;
}

// All that were found wait for ranks that were found: some of them for one another.
Diagnosis circle_among(const States& states, const std::set<int>& found) {
  // Ranks that have come to the same operation do not keep each other there, as long as anything else does.
  const auto come_together = [&](int a, int b) {
    return state_of(states, a).waits_in == state_of(states, b).waits_in;
  };
  Diagnosis d;
  d.circle = shortest_circle(states, found, [&](int a, int b) { return a == b || !come_together(a, b); });
  if (d.circle.empty()) d.circle = shortest_circle(states, found, [](int, int) { return true; });
  if (d.circle.size() == 1) {
    d.verdict = fmt::format("; rank {} waits for itself", d.circle.front());
    return d;
  }
  if (std::all_of(d.circle.begin(), d.circle.end(),
                  [&](int rank) { return come_together(rank, d.circle.front()); })) {
    d.verdict = fmt::format("; {} have all come there, and what they sent each other does not arrive",
                            list_ranks(d.circle));
    return d;
  }
  d.verdict = fmt::format("; {} wait for one another", list_ranks(d.circle));
  const char* before = ": ";
  for (int rank : d.circle) {
    const RankState& s = state_of(states, rank);
    d.verdict += fmt::format("{}rank {} in {} for {}", std::exchange(before, "; "), rank, s.waits_in,
                             list_ranks(s.waits_for));
  }
  return d;
}

}  // namespace

bool waits_too_long(const RankState& s, std::chrono::milliseconds patience,
                    const std::function<double(int rank)>& unheard_seconds) {
  const double seconds = std::chrono::duration<double>(patience).count();
  if (!is_waiting(s) || s.waits_for.empty() || s.seconds <= seconds) return false;
  return !s.to_take || std::any_of(s.waits_for.begin(), s.waits_for.end(),
                                   [&](int rank) { return unheard_seconds(rank) > seconds; });
}

std::string describe_late_wait(const RankState& s, std::chrono::milliseconds patience) {
  return fmt::format("{}: rank {} waited {} ms for {}", s.waits_in, s.rank, patience.count(),
                     list_ranks(s.waits_for));
}

Diagnosis diagnose(const States& states, int waiting, double given_up_seconds) {
  std::set<int> found = found_from(states, {waiting});
  const auto unknown = [&](const RankState& s) {
    return can_be_followed(s) && is_waiting(s) && holding_up(states, s).empty();
  };
  const auto age = [](const RankState& s) { return s.age_seconds; };
  const auto seconds = [](const RankState& s) { return s.seconds + s.age_seconds; };
  const int waits_for_unknown = longest(states, found, unknown, seconds);
  if (waits_for_unknown >= 0)
    for (const RankState& s : states)
      if (!can_be_followed(s)) found.insert(s.rank);

  if (const int rank = longest(
          states, found, [](const RankState& s) { return s.gone; }, age);
      rank >= 0)
    return blame(state_of(states, rank), "its process ended");
  if (const int rank = longest(
          states, found, [](const RankState& s) { return s.silent; }, age);
      rank >= 0)
    return blame(state_of(states, rank), fmt::format("silent since {:.1f} s (stopped, or its machine is)",
                                                     state_of(states, rank).age_seconds));
  const auto does_not_wait = [](const RankState& s) { return !is_waiting(s); };
  if (const int rank = longest(states, found, does_not_wait, seconds); rank >= 0)
    return blame(state_of(states, rank),
                 fmt::format("it does not wait, since {:.1f} s", seconds(state_of(states, rank))));
  const auto came_late = [&](const RankState& s) {
    return s.rank != waiting && seconds(s) < given_up_seconds;
  };
  if (const int rank = longest(states, found, came_late, seconds); rank >= 0)
    return blame(state_of(states, rank),
                 fmt::format("it came too late, and waits since {:.1f} s", seconds(state_of(states, rank))));
  if (waits_for_unknown >= 0)
    return {-1,
            {},
            fmt::format("; which rank is at fault cannot be told: nobody knows what holds up rank {}",
                        waits_for_unknown)};
  return circle_among(states, found);
}

}  // namespace echelon
