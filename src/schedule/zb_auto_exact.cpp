// Branch and bound over active schedules (Giffler and Thompson 1960). The span is the largest of (end of rank
// r) - head(r) with head fixed, and the makespan the largest end, so no order gains from a later end, and
// some best schedule is active: no instruction fits into an earlier gap. Of all instructions whose inputs are
// scheduled, let x, on rank r, be the first that can end, at time C. Whatever is not schedulable yet starts
// at C or later, so in an active schedule the next instruction of r starts before C, or is x. Putting x
// earlier must keep the memory limit: B and W that add nothing can, and so can an F (between now and its
// later place there is no other F, and B and W only free) unless B adds memory; then "not x next" is a branch
// of its own.
#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "schedule/zb_auto_orders.h"

namespace echelon::zb_auto_detail {
namespace {

class Search {
 public:
  Search(const Problem& problem, const Bound& bound, Orders& best, std::int64_t most_nodes)
      : problem_(problem),
        bound_(bound),
        best_(best),
        best_cost_(cost_of(problem, best)),
        nodes_left_(most_nodes),
        states_(problem.ranks.size()),
        orders_(problem.ranks.size()) {
    for (State& s : states_)
      for (auto& list : s.arrival) list.reserve(static_cast<std::size_t>(problem.microbatches));
    states_[0].arrival[0].assign(static_cast<std::size_t>(problem.microbatches), 0);
  }

  bool run() {
    visit();
    return nodes_left_ > 0;
  }

 private:
  struct State {
    int done[3] = {0, 0, 0};  // F, B, W
    double free = 0, held = 0;
    bool deferred[3] = {false, false, false};  // not the next instruction; never W
    std::vector<double> arrival[2];            // of activations and gradients
  };
  static int index(Op op) { return op == Op::F ? 0 : op == Op::B ? 1 : 2; }
  bool is_last(std::size_t r) const { return r + 1 == states_.size(); }

  // When the rank could start it; never: not with what is scheduled so far.
  double start(std::size_t r, Op op) const {
    const State& s = states_[r];
    const Rank& k = problem_.ranks[r];
    const int done = s.done[index(op)];
    if (done == problem_.microbatches) return never;
    if (op == Op::W) return done < s.done[1] ? s.free : never;
    if (s.deferred[index(op)]) return never;
    const double adds = op == Op::F ? k.hold : std::max(0.0, k.keep - k.hold);
    if (s.held + adds > k.limit + slack(k)) return never;
    if (op == Op::F && s.done[0] - s.done[1] >= k.most_forwards) return never;
    if (op == Op::B && done >= s.done[0]) return never;
    if (op == Op::B && is_last(r)) return s.free;
    const auto& arrival = s.arrival[index(op)];
    return static_cast<std::size_t>(done) < arrival.size()
               ? std::max(s.free, arrival[static_cast<std::size_t>(done)])
               : never;
  }
  double length(std::size_t r, Op op) const {
    const Rank& k = problem_.ranks[r];
    return op == Op::F ? k.f : op == Op::B ? k.b : k.w;
  }

  // What the remaining work and its way through the pipeline cost at least.
  Bound bound() {
    const std::size_t count = states_.size();
    const double unknown = -never;
    forwards_.assign(count, unknown);
    for (std::size_t r = 0; r < count; ++r) {
      const int left = problem_.microbatches - states_[r].done[0];
      if (left == 0) continue;
      forwards_[r] = states_[r].free + left * problem_.ranks[r].f;
      if (r > 0)
        forwards_[r] = std::max(forwards_[r], forwards_[r - 1] + problem_.message + problem_.ranks[r].f);
    }
    double backward = unknown;
    Bound least;
    for (std::size_t r = count; r-- > 0;) {
      const State& s = states_[r];
      const Rank& k = problem_.ranks[r];
      const int left[3] = {problem_.microbatches - s.done[0], problem_.microbatches - s.done[1],
                           problem_.microbatches - s.done[2]};
      backward += problem_.message + k.b;
      if (left[1] == 0)
        backward = unknown;
      else
        backward =
            std::max({backward, s.free + left[0] * k.f + left[1] * k.b, forwards_[r] + k.round_trip + k.b});
      const double end = std::max(s.free + left[0] * k.f + left[1] * k.b + left[2] * k.w, backward + k.w);
      least.span = std::max(least.span, end - k.head);
      least.makespan = std::max(least.makespan, end);
    }
    return least;
  }
  // Whether something of at least this cost could beat the best: less span, or equal span and less time.
  bool could_win(const Bound& least) const {
    const Cost cheapest{least.span, least.makespan, best_cost_.ends};
    return cheapest < best_cost_;
  }

  // Whether a state with the same counts was seen that was later in nothing (dominance).
  bool dominated() {
    key_.clear();
    std::vector<double> times;
    for (std::size_t r = 0; r < states_.size(); ++r) {
      const State& s = states_[r];
      for (int done : s.done) key_.push_back(static_cast<char>(done));
      key_.push_back(static_cast<char>(s.deferred[0] + 2 * s.deferred[1]));
      times.push_back(s.free);
      for (int kind = 0; kind < 2; ++kind) {
        // The times of messages not yet read, and always the newest: the next message follows it.
        const auto& arrival = s.arrival[kind];
        for (std::size_t m = 0; m < arrival.size(); ++m)
          if (m >= static_cast<std::size_t>(s.done[kind]) || m + 1 == arrival.size())
            times.push_back(arrival[m]);
      }
    }
    auto& seen = seen_[key_];
    for (const auto& other : seen)
      if (std::equal(other.begin(), other.end(), times.begin(), [](double a, double b) { return a <= b; }))
        return true;
    if (seen.size() < 16) seen.push_back(std::move(times));
    return false;
  }

  void run_op(std::size_t r, Op op, double begin) {
    State& s = states_[r];
    const Rank& k = problem_.ranks[r];
    s.free = begin + length(r, op);
    s.held += op == Op::F ? k.hold : op == Op::B ? k.keep - k.hold : -k.keep;
    ++s.done[index(op)];
    // An instruction that was put off runs only after one that changes what may follow.
    if (op != Op::F) s.deferred[0] = false;
    if (op != Op::B) s.deferred[1] = false;
    orders_[r].push_back(op);
    if (op == Op::F && !is_last(r)) hand(r + 1, 0, s.free);
    if (op == Op::B && r > 0) hand(r - 1, 1, s.free);
  }
  void hand(std::size_t to, int kind, double end) {
    auto& arrival = states_[to].arrival[kind];
    arrival.push_back(std::max(end, arrival.empty() ? 0.0 : arrival.back()) + problem_.message);
  }
  void undo(std::size_t r, Op op) {
    orders_[r].pop_back();
    if (op == Op::F && !is_last(r)) states_[r + 1].arrival[0].pop_back();
    if (op == Op::B && r > 0) states_[r - 1].arrival[1].pop_back();
  }

  bool finished() const { return nodes_left_ <= 0 || reaches(best_cost_, bound_); }

  void visit() {
    if (finished() || --nodes_left_ <= 0) return;
    if (!could_win(bound()) || dominated()) return;
    std::size_t rank = states_.size();
    Op first = Op::F;
    double earliest = never;
    for (std::size_t r = 0; r < states_.size(); ++r)
      for (Op op : {Op::B, Op::F, Op::W}) {
        const double end = start(r, op) + length(r, op);
        if (end >= earliest) continue;
        earliest = end;
        rank = r;
        first = op;
      }
    if (rank == states_.size()) {
      // Everything is scheduled, or nothing more can be.
      const Cost cost = cost_of(problem_, orders_);
      for (const State& s : states_)
        if (s.done[2] < problem_.microbatches) return;
      if (!(cost < best_cost_)) return;
      best_cost_ = cost;
      best_ = orders_;
      return;
    }
    State& s = states_[rank];
    const auto with = [&](const auto& change) {
      const int done[3] = {s.done[0], s.done[1], s.done[2]};
      const double free = s.free, held = s.held;
      const bool deferred[3] = {s.deferred[0], s.deferred[1], false};
      change();
      visit();
      std::copy(done, done + 3, s.done);
      s.free = free;
      s.held = held;
      std::copy(deferred, deferred + 3, s.deferred);
    };
    for (Op op : {Op::B, Op::F, Op::W}) {
      const double begin = start(rank, op);
      if (begin == never || (op != first && begin >= earliest)) continue;
      with([&] { run_op(rank, op, begin); });
      undo(rank, op);
    }
    const Rank& k = problem_.ranks[rank];
    if (k.keep > k.hold && first != Op::W) with([&] { s.deferred[index(first)] = true; });
  }

  const Problem& problem_;
  Bound bound_;
  Orders& best_;
  Cost best_cost_;
  std::int64_t nodes_left_;
  std::vector<State> states_;
  Orders orders_;
  std::vector<double> forwards_;
  std::string key_;
  std::unordered_map<std::string, std::vector<std::vector<double>>> seen_;
};

}  // namespace

bool search_exactly(const Problem& problem, const Bound& bound, Orders& best, std::int64_t most_nodes) {
  return Search(problem, bound, best, most_nodes).run();
}

}  // namespace echelon::zb_auto_detail
