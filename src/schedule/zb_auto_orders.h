// Private to zb_auto: its problem in plain arrays, an order of F, B and W for each rank, and what one costs.
//
// Microbatches are alike, so each rank may take them in their order: call the k-th F of every rank microbatch
// k, the k-th B and the k-th W too. The k-th F of rank r needs k values from rank r-1, of which the k-th
// arrives last, so it can start no earlier than the k-th F there has arrived; likewise for B, and a k-th B
// needs k Fs before it on its rank, a k-th W k Bs. Hence renaming breaks no dependency and changes neither
// time nor memory, and an order is a string over F, B, W.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "schedule/schedule.h"

namespace echelon::zb_auto_detail {

constexpr double never = std::numeric_limits<double>::infinity();

struct Rank {
  double f = 1, b = 1, w = 1;
  double hold = 1;  // memory of a microbatch from F to B
  double keep = 1;  // and from B to W
  double limit = never;
  double head = 0;        // when its first F starts: F is always first, so this is the same in every order
  double round_trip = 0;  // least time from the end of an F to the start of its B
  int most_forwards = 1;  // microbatches between F and B at once: the B must fit too, after all Ws
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

// Every instruction as early as it can, as simulate() does; never: it cannot finish.
Cost cost_of(const Problem& problem, const Orders& orders);
double peak_memory(const Rank& rank, const Order& order);
bool keeps_limit(const Rank& rank, const Order& order);
double slack(const Rank& rank);  // what rounding may add to a memory limit

struct Bound {
  double span = 0, makespan = 0;
};
Bound lower_bound(const Problem& problem);
// Nothing is better: neither span nor makespan can be less.
bool reaches(const Cost& cost, const Bound& bound);

// How a rank chooses its next instruction.
struct Policy {
  std::vector<int> warm_up;  // Fs before the first B of each rank
  bool alternate = true;     // then one B, one F in turn; else whichever can start first, never more than...
  std::vector<int> cap;      // ...these between F and B
  double gap = 1;  // a W fills a gap of at least this part of its time; never: only when memory is short
};

// Those worth a try. Where trying all takes more than so many instructions: those that do best with fewer
// microbatches.
std::vector<Policy> policies(const Problem& problem, std::int64_t most_instructions);
// What a policy leads to: all ranks at once, always the instruction that starts first. Empty when it gets
// stuck.
Orders orders_by(const Problem& problem, const Policy& policy);

// Branch and bound from `best`, which it improves; true when it looked at everything, so that `best` has the
// least span, and of all orders with that span the least makespan.
bool search_exactly(const Problem& problem, const Bound& bound, Orders& best, std::int64_t most_nodes);

}  // namespace echelon::zb_auto_detail
