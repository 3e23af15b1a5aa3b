// The cost of an order, and the bound that no order beats.
#include <algorithm>
#include <cmath>

#include "schedule/zb_auto_orders.h"

namespace echelon::zb_auto_detail {

bool operator<(const Cost& a, const Cost& b) {
  const auto less = [](double x, double y) { return y - x > 1e-9 * std::abs(x); };
  if (less(a.span, b.span) || less(b.span, a.span)) return a.span < b.span;
  if (less(a.makespan, b.makespan) || less(b.makespan, a.makespan)) return a.makespan < b.makespan;
  return less(a.ends, b.ends);
}

bool reaches(const Cost& cost, const Bound& bound) {
  return cost.span <= bound.span * (1 + 1e-9) && cost.makespan <= bound.makespan * (1 + 1e-9);
}

// Independent of the unit of memory.
double slack(const Rank& rank) { return rank.limit == never ? 0 : 1e-9 * rank.limit; }

double peak_memory(const Rank& rank, const Order& order) {
  double held = 0, most = 0;
  for (Op op : order) {
    if (op == Op::F) held += rank.hold;
    if (op == Op::B) {
      most = std::max(most, held);
      held += rank.keep - rank.hold;
    }
    most = std::max(most, held);
    if (op == Op::W) held -= rank.keep;
  }
  return most;
}

bool keeps_limit(const Rank& rank, const Order& order) {
  return peak_memory(rank, order) <= rank.limit + slack(rank);
}

Cost cost_of(const Problem& problem, const Orders& orders) {
  const std::size_t count = problem.ranks.size(), last = count - 1;
  const auto all = static_cast<std::size_t>(problem.microbatches);
  // Arrival times of the k-th activation and gradient on each rank, so far.
  std::vector<double> arrival[2] = {std::vector<double>(count * all), std::vector<double>(count * all)};
  struct State {
    std::size_t next = 0, forwards = 0, backwards = 0, here[2] = {0, 0};
    double free = 0;
    bool queued = true;
  };
  std::vector<State> states(count);
  std::vector<std::size_t> ready;
  for (std::size_t r = count; r-- > 0;) ready.push_back(r);
  const auto hand = [&](std::size_t to, int kind, double end) {
    State& s = states[to];
    double& at = arrival[kind][to * all + s.here[kind]];
    at = end;
    if (s.here[kind] > 0) at = std::max(at, arrival[kind][to * all + s.here[kind] - 1]);
    at += problem.message;
    ++s.here[kind];
    if (!s.queued) ready.push_back(to);
    s.queued = true;
  };
  while (!ready.empty()) {
    const std::size_t r = ready.back();
    ready.pop_back();
    State& s = states[r];
    const Rank& rank = problem.ranks[r];
    s.queued = false;
    for (; s.next < orders[r].size(); ++s.next) {
      const Op op = orders[r][s.next];
      if (op == Op::F) {
        if (r > 0 && s.forwards == s.here[0]) break;
        if (r > 0) s.free = std::max(s.free, arrival[0][r * all + s.forwards]);
        s.free += rank.f;
        ++s.forwards;
        if (r < last) hand(r + 1, 0, s.free);
      } else if (op == Op::B) {
        if (r < last && s.backwards == s.here[1]) break;
        if (r < last) s.free = std::max(s.free, arrival[1][r * all + s.backwards]);
        s.free += rank.b;
        ++s.backwards;
        if (r > 0) hand(r - 1, 1, s.free);
      } else {
        s.free += rank.w;
      }
    }
  }
  Cost cost{0, 0, 0};
  for (std::size_t r = 0; r < count; ++r) {
    if (states[r].next < orders[r].size()) return {};
    cost.span = std::max(cost.span, states[r].free - problem.ranks[r].head);
    cost.makespan = std::max(cost.makespan, states[r].free);
    cost.ends += states[r].free;
  }
  return cost;
}

namespace {

double floor_div(double a, double b, double most) {
  if (b <= 0 || a == never) return most;
  return std::clamp(std::floor(a / b + 1e-9), 0.0, most);
}

}  // namespace

// Why no order beats it. Take one rank with times f, b, w, limit L, first F at `head` (which no order
// changes: the first instruction of every rank is an F, and the first F of rank r follows those of ranks
// 0..r-1 alone). Times below count from there. D = round_trip. K = most_forwards.
//
// 1. opening: between the end of the first F and the start of the first B lie at least D, in which only Fs
//    can run (a W needs a B), at most K-1 of them. So at least D - (K-1)f of it is idle.
// 2. closing: between the end of the last F and the start of its B lie at least D, in which only B and W of
//    microbatches held at the start of that F can run: i that wait for B (memory `hold` each), j for W
//    (`keep` each), i hold + j keep <= L - hold. So D minus the most work that such i, j have is idle. If
//    K < M a B comes before the last F: the two windows are disjoint and their idle times add. Otherwise
//    the larger one counts.
// 3. When the last F starts, at most K-1 others are between F and B, so at least M-K Bs are done; at most
//    (L - hold) / min(hold, keep) microbatches are held, so at least M-1 less that many Ws are done.
// 4. rotation: at most K microbatches are between F start and B end at once. Order the starts s and ends e: F
//    number i+K can start only when i are over, e_i >= s_i + h with h = f + D + b, so s_(i+K) >= s_i + h, and
//    s_(i+1) >= s_i + f. If B frees nothing the same holds for F start to W end, with L / hold microbatches
//    and h + w.
// 5. When the last B starts at most j others wait for W, hold (or keep, if more) + j keep <= L: so M-1-j Ws
// are done.
//
// Together these bound the end of the last F, the last B and the last W of each rank, and messages carry the
// bounds from rank to rank: the last F of rank r follows that of r-1, the last B of r that of r+1.
Bound lower_bound(const Problem& problem) {
  const std::size_t count = problem.ranks.size();
  const double all = problem.microbatches;
  std::vector<double> forwards(count), backwards(count), ends(count);
  for (std::size_t r = 0; r < count; ++r) {
    const Rank& k = problem.ranks[r];
    const double most = std::min<double>(k.most_forwards, all);
    const double opening = std::max(0.0, k.round_trip - (most - 1) * k.f);
    double work = 0;
    for (double i = 0; i <= all - 1; ++i) {
      const double left = k.limit - k.hold - i * k.hold;
      if (left < -slack(k)) break;
      work = std::max(work, i * (k.b + k.w) + k.w * floor_div(std::max(0.0, left), k.keep, all - 1 - i));
    }
    const double closing = std::max(0.0, k.round_trip - work);
    const bool disjoint = k.most_forwards < problem.microbatches;
    const double idle = disjoint ? opening + closing : std::max(opening, closing);

    const double others = floor_div(std::max(0.0, k.limit - k.hold), std::min(k.hold, k.keep), all - 1);
    double last_start =
        (all - 1) * k.f + (all - most) * k.b + (all - 1 - others) * k.w + (disjoint ? opening : 0.0);
    const auto rotation = [&](double slots, double length) {
      const double turns = std::floor((all - 1) / slots);
      last_start = std::max(last_start, turns * length + (all - 1 - turns * slots) * k.f);
    };
    const double held = k.f + k.round_trip + k.b;
    rotation(most, held);
    if (k.keep >= k.hold) rotation(std::max(1.0, floor_div(k.limit, k.hold, all)), held + k.w);

    const double waiting = floor_div(std::max(0.0, k.limit - std::max(k.hold, k.keep)), k.keep, all - 1);
    forwards[r] = k.head + last_start + k.f;
    if (r > 0) forwards[r] = std::max(forwards[r], forwards[r - 1] + problem.message + k.f);
    backwards[r] = std::max(k.head + all * (k.f + k.b) + (all - 1 - waiting) * k.w + idle,
                            forwards[r] + k.round_trip + k.b);
    ends[r] = k.head + all * (k.f + k.b + k.w) + idle;
  }
  Bound bound;
  for (std::size_t r = count; r-- > 0;) {
    const Rank& k = problem.ranks[r];
    if (r + 1 < count) backwards[r] = std::max(backwards[r], backwards[r + 1] + problem.message + k.b);
    ends[r] = std::max(ends[r], backwards[r] + k.w);
    bound.span = std::max(bound.span, ends[r] - k.head);
    bound.makespan = std::max(bound.makespan, ends[r]);
  }
  return bound;
}

}  // namespace echelon::zb_auto_detail
