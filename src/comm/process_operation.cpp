// One collective or message of a process, as a state machine of at most two steps.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/error.h"
#include "base/split.h"
#include "comm/exchange.h"
#include "comm/process_engine.h"
#include "comm/reduce.h"

namespace echelon {
namespace {

// What travels in the envelope. A message this small is sent at once by every MPI.
constexpr std::int64_t largest_inline = 1024;
constexpr std::int64_t stage_bytes = static_cast<std::int64_t>(sizeof(Envelope)) + largest_inline;
// An all_reduce up to this size is sent whole to every rank: one step, where cutting it takes two.
constexpr std::int64_t largest_whole = 8 * 1024;

// Collective k of a group uses three tags; the others are those of messages between two ranks: one for all
// envelopes, which come in their order, and one for what follows message k, which may be received in any.
constexpr int tags_of_collectives = num_message_tags / 4;
constexpr int message_tag = tags_of_collectives * 3;
constexpr int tags_of_bulk_messages = num_message_tags - message_tag - 1;

int modulo(std::uint64_t number, int tags) {
  return static_cast<int>(number % static_cast<std::uint64_t>(tags));
}

std::uint64_t hash(const std::vector<std::int64_t>& counts) {
  std::uint64_t h = 1469598103934665603u;  // FNV-1a over the counts
  for (std::int64_t count : counts) h = (h ^ static_cast<std::uint64_t>(count)) * 1099511628211u;
  return h;
}

bool is_message(Verb verb) { return verb == Verb::send || verb == Verb::recv; }

}  // namespace

ProcessOperation::ProcessOperation(ProcessGroup& group, std::uint64_t number, Call call)
    : group_(group), number_(number), call_(std::move(call)) {
  const auto n = static_cast<std::size_t>(group_.size());
  parts_.resize(n);
  heard_.assign(n, false);
  offsets_.assign(n + 1, 0);
  std::vector<std::int64_t> counts = call_.counts;
  if (call_.verb == Verb::all_reduce) counts = even_counts(call_.counts[0], group_.size());
  if (call_.verb == Verb::all_to_all) counts = call_.recv_counts;
  if (counts.size() == n) std::partial_sum(counts.begin(), counts.end(), offsets_.begin() + 1);
  plan();
  stage_ = std::make_unique_for_overwrite<std::byte[]>(2 * n * static_cast<std::size_t>(stage_bytes));
  for (int peer = 0; peer < group_.size(); ++peer) {
    out_stage_.push_back(stage_.get() + 2 * peer * stage_bytes);
    in_stage_.push_back(out_stage_.back() + stage_bytes);
    if (peer == group_.me) continue;
    const Part& part = parts_[static_cast<std::size_t>(peer)];
    const bool only_peer = peer == call_.root;
    const bool sends = call_.verb == Verb::send ? only_peer : call_.verb != Verb::recv;
    const bool receives = call_.verb == Verb::recv ? only_peer : call_.verb != Verb::send;
    if (receives) {
      envelopes_.receive(group_.space, peer, envelope_tag(), in_stage_.back(),
                         static_cast<std::size_t>(stage_bytes));
    } else {
      heard_[static_cast<std::size_t>(peer)] = true;
    }
    if (!sends) continue;
    Envelope envelope = envelope_for(peer);
    const std::int64_t bytes = part.out_count * width();
    if (bytes <= largest_inline) envelope.inline_bytes = static_cast<std::uint64_t>(bytes);
    std::memcpy(out_stage_.back(), &envelope, sizeof envelope);
    if (envelope.inline_bytes > 0)
      std::memcpy(out_stage_.back() + sizeof envelope, part.out, envelope.inline_bytes);
    envelopes_.send(group_.space, peer, envelope_tag(), out_stage_.back(),
                    sizeof envelope + envelope.inline_bytes);
    if (bytes <= largest_inline) continue;
    if (group_.on_half_sent && !is_message(call_.verb)) group_.on_half_sent();
    bulk_.send(group_.space, peer, bulk_tag(), part.out, static_cast<std::size_t>(bytes));
  }
  heard_[static_cast<std::size_t>(group_.me)] = true;
}

ProcessOperation::~ProcessOperation() {
  if (finished()) return;
  // The job failed: MPI may still write to these, so they are left to the process's end.
  (void)stage_.release();
  for (auto& room : rooms_) (void)room.release();
}

int ProcessOperation::envelope_tag() const {
  return is_message(call_.verb) ? message_tag : 3 * modulo(number_, tags_of_collectives);
}

int ProcessOperation::bulk_tag() const {
  return is_message(call_.verb) ? message_tag + 1 + modulo(number_, tags_of_bulk_messages)
                                : envelope_tag() + 1;
}

std::byte* ProcessOperation::room(std::int64_t bytes) {
  rooms_.push_back(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes)));
  return rooms_.back().get();
}

bool ProcessOperation::gathers_whole() const {
  return call_.verb == Verb::all_reduce && call_.counts[0] * width() <= largest_whole;
}

// What goes to and comes from each rank in the first step.
void ProcessOperation::plan() {
  const int n = group_.size();
  const auto me = static_cast<std::size_t>(group_.me);
  std::int64_t sent = 0;
  for (int peer = 0; peer < n; ++peer) {
    const auto p = static_cast<std::size_t>(peer);
    Part& part = parts_[p];
    const std::int64_t own = offsets_[me + 1] - offsets_[me], theirs = offsets_[p + 1] - offsets_[p];
    switch (call_.verb) {
      case Verb::all_reduce:
        if (gathers_whole())
          part = {call_.in, call_.counts[0], nullptr, call_.counts[0]};
        else
          part = {call_.in + offsets_[p] * width(), theirs, nullptr, own};
        if (peer != group_.me) part.in = room(part.in_count * width());
        break;
      case Verb::all_gather:
        part = {call_.in, own, call_.out + offsets_[p] * width(), theirs};
        break;
      case Verb::reduce_scatter:
        part = {call_.in + offsets_[p] * width(), theirs, nullptr, own};
        if (peer != group_.me) part.in = room(own * width());
        break;
      case Verb::all_to_all:
        part = {call_.in + sent * width(), call_.counts[p], call_.out + offsets_[p] * width(), theirs};
        sent += call_.counts[p];
        break;
      case Verb::broadcast:
        if (group_.me == call_.root) part = {call_.in, call_.counts[0], nullptr, 0};
        if (peer == call_.root && peer != group_.me) part = {nullptr, 0, call_.out, call_.counts[0]};
        break;
      case Verb::send:
        if (peer == call_.root) part = {call_.in, call_.counts[0], nullptr, 0};
        break;
      case Verb::recv:
        if (peer == call_.root) part = {nullptr, 0, call_.out, call_.counts[0]};
        break;
      case Verb::barrier:
        break;
    }
  }
}

Envelope ProcessOperation::envelope_for(int peer) const {
  Envelope e;
  e.number = number_;
  e.verb = static_cast<std::int32_t>(call_.verb);
  e.op = static_cast<std::int32_t>(call_.op);
  e.dtype = static_cast<std::int32_t>(call_.dtype);
  e.root = is_message(call_.verb) ? 0 : call_.root;
  if (call_.verb == Verb::all_to_all) {
    e.count = call_.counts[static_cast<std::size_t>(peer)];
    e.back = call_.recv_counts[static_cast<std::size_t>(peer)];
  } else if (call_.verb != Verb::barrier) {
    e.count = sum_of(call_.counts);
    e.counts_hash = hash(call_.counts);
  }
  return e;
}

void ProcessOperation::check_envelope(int peer, const Envelope& theirs) const {
  Envelope own = envelope_for(peer);
  if (call_.verb == Verb::all_to_all) std::swap(own.count, own.back);
  if (call_.verb == Verb::recv) own.verb = static_cast<std::int32_t>(Verb::send);
  if (theirs.verb == own.verb && theirs.op == own.op && theirs.dtype == own.dtype &&
      theirs.root == own.root && theirs.count == own.count && theirs.back == own.back &&
      theirs.counts_hash == own.counts_hash)
    return;
  const auto verb = static_cast<Verb>(theirs.verb);
  std::string their_call = verb_name(verb);
  if (theirs.op != 0) their_call += " (max)";
  if (verb == Verb::broadcast) their_call += fmt::format(" from {}", theirs.root);
  if (verb != Verb::barrier)
    their_call += fmt::format(
        " of {} {}{}", theirs.count, dtype_name(static_cast<DType>(theirs.dtype)),
        theirs.counts_hash != own.counts_hash && theirs.count == own.count ? ", cut in another way" : "");
  throw CommError(fmt::format("{} {} {}: rank {} called {}, rank {} called {}", group_.name,
                              is_message(call_.verb) ? "message" : "collective", number_,
                              group_.world(group_.me), describe(call_), group_.world(peer), their_call));
}

// Data after an envelope are received only when both ranks are known to agree: Open MPI 4.1 writes past the
// end of a receive buffer that is shorter than the message.
void ProcessOperation::take_envelopes() {
  for (int peer : arrived_) {
    const auto p = static_cast<std::size_t>(peer);
    if (heard_[p]) continue;
    Envelope envelope;
    std::memcpy(&envelope, in_stage_[p], sizeof envelope);
    check_envelope(peer, envelope);
    heard_[p] = true;
    if (envelope.inline_bytes > 0)
      std::memcpy(parts_[p].in, in_stage_[p] + sizeof envelope, envelope.inline_bytes);
    const std::int64_t bytes = parts_[p].in_count * width();
    if (bytes > largest_inline)
      bulk_.receive(group_.space, peer, bulk_tag(), parts_[p].in, static_cast<std::size_t>(bytes));
  }
  arrived_.clear();
}

bool ProcessOperation::advance() {
  if (finished()) return true;
  if (step_ == 0) {
    const bool known = envelopes_.advance(arrived_);
    take_envelopes();
    std::vector<int> unused;
    const bool moved = bulk_.advance(unused);
    if (!known || !moved) return false;
    end_first_step();
  }
  if (step_ == 1) {
    std::vector<int> unused;
    if (!bulk_.advance(unused)) return false;
  }
  finished_.store(true, std::memory_order_release);
  return true;
}

void ProcessOperation::end_first_step() {
  step_ = 2;
  const auto me = static_cast<std::size_t>(group_.me);
  const Part& own = parts_[me];
  switch (call_.verb) {
    case Verb::all_reduce:
      reduce_own_part();
      if (!gathers_whole()) post_second_step();
      break;
    case Verb::reduce_scatter:
      reduce_own_part();
      break;
    case Verb::all_gather:
    case Verb::all_to_all:
      if (own.in != own.out && own.out_count > 0)
        std::memcpy(own.in, own.out, static_cast<std::size_t>(own.out_count * width()));
      break;
    default:
      break;
  }
}

// By halves of the group ranks, as every sum.
void ProcessOperation::reduce_own_part() {
  const auto me = static_cast<std::size_t>(group_.me);
  std::vector<const std::byte*> sources;
  for (std::size_t p = 0; p < parts_.size(); ++p) sources.push_back(p == me ? parts_[p].out : parts_[p].in);
  std::byte* const out = call_.verb == Verb::reduce_scatter ? call_.out
                         : gathers_whole()                  ? call_.out
                                                            : call_.out + offsets_[me] * width();
  const std::array<std::byte*, 1> destination{out};
  reduce_elements(call_.op, call_.dtype, sources, 0, destination, 0, parts_[me].out_count);
}

// Large all_reduce: each rank's finished part to every rank.
void ProcessOperation::post_second_step() {
  const int tag = envelope_tag() + 2;
  const auto bytes = [&](int rank) {
    return static_cast<std::size_t>(
        (offsets_[static_cast<std::size_t>(rank) + 1] - offsets_[static_cast<std::size_t>(rank)]) * width());
  };
  const auto at = [&](int rank) { return call_.out + offsets_[static_cast<std::size_t>(rank)] * width(); };
  bulk_ = Messages();
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.me) continue;
    if (bytes(peer) > 0) bulk_.receive(group_.space, peer, tag, at(peer), bytes(peer));
    if (bytes(group_.me) > 0) bulk_.send(group_.space, peer, tag, at(group_.me), bytes(group_.me));
  }
  step_ = 1;
}

std::vector<int> ProcessOperation::missing() const {
  std::vector<int> ranks = bulk_.missing();
  for (int peer = 0; peer < group_.size(); ++peer)
    if (!heard_[static_cast<std::size_t>(peer)] && std::find(ranks.begin(), ranks.end(), peer) == ranks.end())
      ranks.push_back(peer);
  std::sort(ranks.begin(), ranks.end());
  for (int& rank : ranks) rank = group_.world(rank);
  return ranks;
}

std::vector<int> ProcessOperation::leaving() const {
  std::vector<int> ranks = bulk_.leaving();
  for (int peer : envelopes_.leaving())
    if (std::find(ranks.begin(), ranks.end(), peer) == ranks.end()) ranks.push_back(peer);
  std::sort(ranks.begin(), ranks.end());
  for (int& rank : ranks) rank = group_.world(rank);
  return ranks;
}

std::string ProcessOperation::name() const {
  if (call_.verb == Verb::recv)
    return fmt::format("{} message {} from rank {} to rank {} ({})", group_.name, number_,
                       group_.world(call_.root), group_.world(group_.me), describe(call_));
  return fmt::format("{} collective {} ({})", group_.name, number_, describe(call_));
}

}  // namespace echelon
