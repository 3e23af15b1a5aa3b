// Private to zb_auto: its problem as plain arrays, an order of F, B and W for each rank, and the cost of an
// order.
//
// Microbatches are alike, so each rank may run them in sequence: call the k-th F of every rank microbatch k,
// and likewise the k-th B and W. This loses nothing. The k-th F of rank r needs k values from rank r-1, of
// which the k-th arrives last, so it can start no earlier than the k-th F there has arrived; the same holds
// for B. A k-th B needs k Fs before it on its rank, a k-th W needs k Bs. So renaming breaks no dependency and
// changes neither time nor memory, and an order is a string over F, B, W.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "schedule/schedule.h"

namespace echelon::zb_auto_detail {

constexpr double never = std::numeric_limits<double>::infinity();

struct Rank {
  double f = 1, b = 1, w = 1;
  double hold = 1;  // memory of a microbatch between F and B
  double keep = 1;  // memory of a microbatch between B and W
  double limit = never;
  double head = 0;  // start of its first F; every rank starts with an F, so it is the same in every order
  double round_trip = 0;  // least time from the end of an F to the start of its B
  // The most microbatches between F and B at once: the memory of B must fit too, after all Ws.
  int most_forwards = 1;
};

struct Problem {
  int microbatches = 1;
  double message = 0;
  std::vector<Rank> ranks;
};

using Order = std::vector<Op>;
using Orders = std::vector<Order>;

struct Cost {
  double span = never, makespan = never, ends = never;  // ends: sum over ranks of the last W
};
bool operator<(const Cost& a, const Cost& b);  // with a tolerance for rounding

// Runs every instruction as early as possible, as simulate() does. `never` if it cannot finish.
Cost cost_of(const Problem& problem, const Orders& orders);
double peak_memory(const Rank& rank, const Order& order);
bool keeps_limit(const Rank& rank, const Order& order);
double slack(const Rank& rank);  // tolerance for rounding in memory limits

struct Bound {
  double span = 0, makespan = 0;
};
Bound lower_bound(const Problem& problem);
// Whether the cost is optimal: neither span nor makespan can be less.
bool reaches(const Cost& cost, const Bound& bound);

// How a rank chooses its next instruction.
struct Policy {
  std::vector<int> warm_up;  // by rank: Fs before the first B
  bool alternate = true;     // then B and F alternate; otherwise whichever can start first, with at most...
  std::vector<int> cap;      // ...this many microbatches between F and B
  // A W fills a gap of at least this fraction of its time; never: only when memory is short.
  double gap = 1;
};

// The policies worth trying. If trying all would take more than `most_instructions`, those that do best with
// fewer microbatches.
std::vector<Policy> policies(const Problem& problem, std::int64_t most_instructions);
// The orders that a policy yields: all ranks run at once, and the instruction that can start first is always
// next. Empty if it gets stuck.
Orders orders_by(const Problem& problem, const Policy& policy);

// Branch and bound, starting from `best`, which it improves. true if the search was exhaustive, so that
// `best` has the least span, and among orders with that span the least makespan.
bool search_exactly(const Problem& problem, const Bound& bound, Orders& best, std::int64_t most_nodes);

}  // namespace echelon::zb_auto_detail
