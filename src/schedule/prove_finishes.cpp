// Simulates the message model of lower.h.
#include <algorithm>
#include <map>

#include "base/error.h"
#include "schedule/lower.h"
#include "schedule/per_peer.h"

namespace echelon {
namespace {

using std::size_t;

class Proof {
 public:
  explicit Proof(const Schedule& program)
      : program_(program),
        num_ranks_(program.ranks.size()),
        next_(num_ranks_),
        is_waiting_(num_ranks_),
        channels_(num_ranks_),
        newest_(num_ranks_) {
    cells_ = static_cast<size_t>(value_rows(program)) * static_cast<size_t>(program.num_microbatches);
    holdings_.resize(2 * cells_);
    sent_.resize(2 * cells_);
    saved_.resize(cells_);
  }

  void run() {
    for (size_t r = 0; r < num_ranks_; ++r) ready_.push_back(num_ranks_ - 1 - r);
    while (!ready_.empty()) {
      const size_t r = ready_.back();
      ready_.pop_back();
      while (advance(r)) {
      }
    }
    for (size_t r = 0; r < num_ranks_; ++r)
      if (next_[r] < program_.ranks[r].size()) refuse_stuck(r);
    check_all_used();
  }

 private:
  // The ranks that hold a travelling value: the one that made it and the one that received it.
  struct Holding {
    int maker = -1, receiver = -1;
    bool is_used = false;  // by the receiver
  };
  // What F keeps, and then what B keeps.
  struct Saved {
    int rank = -1;
    bool has_weight_input = false;
  };
  struct Channel {
    std::vector<size_t> sent;  // values, as indices into holdings_
    size_t received = 0;
  };

  size_t cell(const Value& v) const {
    return static_cast<size_t>(value_place(program_, v).row) *
               static_cast<size_t>(program_.num_microbatches) +
           static_cast<size_t>(v.microbatch);
  }
  size_t index(const Value& v) const { return cell(v) + (value_place(program_, v).column == 1 ? cells_ : 0); }
  static Value carried(const Instruction& i) { return {i.carries, i.stage, i.microbatch, 0}; }

  // "rank 2, instruction 7 (1B3)", counted without messages.
  std::string name(size_t r, size_t k) const {
    const auto& list = program_.ranks[r];
    size_t number = 0;
    for (size_t j = 0; j < k; ++j) number += is_compute(list[j].op) || list[j].op == Op::step;
    while (k < list.size() && list[k].op == Op::recv) ++k;
    if (k == list.size()) return fmt::format("rank {}, at its end", r);
    if (list[k].op == Op::send)
      return fmt::format("rank {}, after instruction {} ({})", r, number, to_string(list[k]));
    return fmt::format("rank {}, instruction {} ({})", r, number, to_string(list[k]));
  }

  bool has(size_t r, const Value& v) {
    const int rank = static_cast<int>(r);
    if (v.kind == ValueKind::weights) return v.version == 0 || v.version <= newest_[r][v.stage];
    if (!travels(v)) {
      const Saved& s = saved_[cell(v)];
      return s.rank == rank && (v.kind != ValueKind::weight_input || s.has_weight_input);
    }
    Holding& h = holdings_[index(v)];
    if (h.receiver == rank) h.is_used = true;
    return h.receiver == rank || h.maker == rank;
  }

  void make(size_t r, const Value& v) {
    const int rank = static_cast<int>(r);
    if (v.kind == ValueKind::saved || v.kind == ValueKind::head_saved) saved_[cell(v)] = {rank, false};
    if (v.kind == ValueKind::weight_input) saved_[cell(v)].has_weight_input = true;
    if (v.kind == ValueKind::weights) newest_[r][v.stage] = v.version;
    if (travels(v)) holdings_[index(v)].maker = rank;
  }

  Channel& channel(int from, int to) { return channels_[static_cast<size_t>(from)][to]; }

  // Runs the rank's next instruction; false if it waits or has ended.
  bool advance(size_t r) {
    const auto& list = program_.ranks[r];
    const size_t k = next_[r];
    if (k == list.size()) return false;
    const Instruction& i = list[k];
    if (i.op == Op::recv) {
      if (!receive(r, i)) return false;
    } else if (i.op != Op::send) {
      check_reads(r, k);
    }
    ++next_[r];
    if (i.overlaps_next && next_[r] < list.size()) return true;
    size_t first = k;
    while (first > 0 && list[first - 1].overlaps_next) --first;
    for (size_t part = first; part <= k; ++part) finish(r, part);
    return true;
  }

  void check_reads(size_t r, size_t k) {
    each_read(program_, program_.ranks[r][k], [&](const Value& v) {
      if (!has(r, v))
        refuse("schedule {}: {} never gets {}: nothing before it makes or receives that", program_.name,
               name(r, k), to_string(v));
    });
  }

  void finish(size_t r, size_t k) {
    const Instruction& i = program_.ranks[r][k];
    if (i.op == Op::send) {
      check_reads(r, k);
      send(r, i);
    } else if (i.op != Op::recv) {
      each_write(program_, i, [&](const Value& v) { make(r, v); });
    }
  }

  void check_peer(size_t r, const Instruction& i) const {
    if (i.peer < 0 || static_cast<size_t>(i.peer) >= num_ranks_ || static_cast<size_t>(i.peer) == r)
      refuse("schedule {}: rank {}: {}: there is no such other rank", program_.name, r, to_string(i));
  }

  void send(size_t r, const Instruction& i) {
    check_peer(r, i);
    const size_t to = static_cast<size_t>(i.peer);
    channel(static_cast<int>(r), i.peer).sent.push_back(index(carried(i)));
    sent_[index(carried(i))] = carried(i);
    if (is_waiting_[to]) ready_.push_back(to);
    is_waiting_[to] = false;
  }

  bool receive(size_t r, const Instruction& i) {
    check_peer(r, i);
    Channel& from = channel(i.peer, static_cast<int>(r));
    if (from.received == from.sent.size()) {
      is_waiting_[r] = true;
      return false;
    }
    const size_t sent = from.sent[from.received++];
    if (sent != index(carried(i)))
      refuse("schedule {}: {} waits for {} from rank {}, but the next message of that channel is {}",
             program_.name, name(r, next_[r]), to_string(carried(i)), i.peer, to_string(sent_[sent]));
    holdings_[sent].receiver = static_cast<int>(r);
    return true;
  }

  // From a waiting rank to the one that it waits for, until the cycle closes.
  [[noreturn]] void refuse_stuck(size_t r) const {
    std::string chain;
    std::vector<bool> seen(num_ranks_);
    while (next_[r] < program_.ranks[r].size() && !seen[r]) {
      seen[r] = true;
      const Instruction& i = program_.ranks[r][next_[r]];
      chain += fmt::format("{}{} waits for {} from rank {}", chain.empty() ? "" : "; ", name(r, next_[r]),
                           to_string(carried(i)), i.peer);
      r = static_cast<size_t>(i.peer);
    }
    refuse("schedule {} never finishes: {}; {}", program_.name, chain,
           seen[r] ? fmt::format("so rank {} waits for itself", r)
                   : fmt::format("and rank {} ends without sending it", r));
  }

  void check_all_used() const {
    for (size_t from = 0; from < num_ranks_; ++from)
      for (const auto& [to, c] : channels_[from].all())
        if (c.received < c.sent.size())
          refuse("schedule {}: rank {} sends {} to rank {}, which never receives it", program_.name, from,
                 to_string(sent_[c.sent[c.received]]), to);
    for (size_t at = 0; at < holdings_.size(); ++at)
      if (holdings_[at].receiver >= 0 && !holdings_[at].is_used)
        refuse("schedule {}: rank {} receives {} and never uses it", program_.name, holdings_[at].receiver,
               to_string(sent_[at]));
  }

  const Schedule& program_;
  size_t num_ranks_, cells_ = 0;
  std::vector<size_t> next_;                // instruction of each rank
  std::vector<char> is_waiting_;            // for a message
  std::vector<size_t> ready_;               // ranks to look at
  std::vector<PerPeer<Channel>> channels_;  // by sender
  std::vector<Holding> holdings_;           // by value_place(): one column, then the other
  std::vector<Value> sent_;                 // in the same places
  std::vector<Saved> saved_;
  std::vector<std::map<int, int>> newest_;  // weights of each rank, by stage
};

}  // namespace

void prove_finishes(const Schedule& lowered) { Proof(lowered).run(); }

}  // namespace echelon
