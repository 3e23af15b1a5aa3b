#include "comm/control_protocol.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/utf8.h"
#include "comm/diagnosis.h"

namespace echelon {
namespace {

// Which of two simultaneous failures every process keeps: a known cause before a connection that ended, that
// before a wait that was given up; then the one that the lowest rank found.
auto order_of(const Failure& f) { return std::tuple(f.late, f.lost, f.found_by); }

}  // namespace

ControlProtocol::ControlProtocol(int rank, int size, Clock::time_point now)
    : rank_(rank), peers_(static_cast<std::size_t>(size)) {
  for (int r = 0; r < size; ++r) {
    peer(r).state.rank = r;
    peer(r).heard_at = peer(r).stood_at = now;
  }
}

void ControlProtocol::fail(Failure failure, Clock::time_point now) {
  if (failed()) return;
  failure.found_by = rank_;
  failure.why = printable(failure.why);
  failure_ = std::move(failure);
  failed_at_ = now;
}

void ControlProtocol::take(int from, Frame type, const std::string& text, Clock::time_point now) {
  Peer& p = peer(from);
  p.heard_at = now;
  switch (type) {
    case Frame::state:
    case Frame::last_words:
      if (const auto said = decode_state(from, num_ranks(), text)) {
        p.state = *said;
        p.stood_at = now;
      }
      if (type == Frame::last_words) p.said_last_words = true;
      break;
    case Frame::failure: {
      const auto heard = decode_failure(from, num_ranks(), text);
      if (!heard || reported_) break;
      if (!failed()) failed_at_ = now;
      if (!failed() || order_of(*heard) < order_of(*failure_)) failure_ = heard;
      break;
    }
    case Frame::report: {
      const auto heard = decode_failure(from, num_ranks(), text);
      if (!heard || reported_) break;
      if (!failed()) failed_at_ = now;
      failure_ = heard;
      reported_ = true;
      break;
    }
    case Frame::done:
      ++p.rounds;
      break;
    case Frame::goodbye:
      p.said_goodbye = true;
      break;
    case Frame::back:
      p.is_back = true;
      p.cause = printable(text);
      break;
  }
}

void ControlProtocol::lose(int from, Clock::time_point now, const std::string& why) {
  Peer& p = peer(from);
  p.gone = true;
  p.heard_at = now;
  if (!p.said_goodbye)
    fail({.origin = from,
          .why = fmt::format("rank {} is gone: {}", from, why.empty() ? "its process ended" : why),
          .lost = true},
         now);
}

void ControlProtocol::say_last_words(const RankState& own, Clock::time_point now) {
  Peer& p = peer(rank_);
  p.state = own;
  p.state.rank = rank_;
  p.heard_at = p.stood_at = now;
  p.said_last_words = true;
}

void ControlProtocol::come_back(const std::string& cause) {
  peer(rank_).is_back = true;
  peer(rank_).cause = printable(cause);
}

std::optional<Failure> ControlProtocol::failure_to_tell() {
  if (!failed() || reported_ || (told_ && order_of(*told_) == order_of(*failure_))) return {};
  return told_ = failure_;
}

// For so long at most: a rank that has not heard of the failure goes on saying where it is.
bool ControlProtocol::waits_for_words(Clock::time_point now) const {
  if (now - failed_at_ > silence * 3 / 2) return false;
  for (int r = 0; r < num_ranks(); ++r)
    if (!peer(r).gone && !peer(r).said_last_words && (r == rank_ || now - peer(r).heard_at <= silence))
      return true;
  return false;
}

// Ranks leave their operations as soon as they know. If one is gone, or a wait was given up, some never will.
bool ControlProtocol::waits_for_causes(Clock::time_point now) const {
  if (failure_->refused || failure_->late || failure_->lost || now - failed_at_ > settling) return false;
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const Peer& p) { return !p.gone && p.said_last_words && !p.is_back; });
}

// The rank that found the failure speaks; if it cannot, the lowest of those that can. A rank that has heard
// nobody by then speaks itself.
int ControlProtocol::speaker(Clock::time_point now) const {
  const auto passed = now - failed_at_;
  if (!peer(failure_->found_by).gone && passed <= 2 * silence) return failure_->found_by;
  if (passed > 3 * silence) return rank_;
  int lowest = 0;
  while (lowest != rank_ && (peer(lowest).gone || !peer(lowest).said_last_words)) ++lowest;
  return lowest;
}

std::optional<ControlProtocol::Report> ControlProtocol::report_when_due(Clock::time_point now) {
  if (!failed() || reported_ || waits_for_words(now) || waits_for_causes(now) || speaker(now) != rank_)
    return {};
  reported_ = true;
  Report report{*failure_, {}, {}};
  for (int r = 0; r < num_ranks(); ++r) {
    report.states.push_back(last_heard(r, now));
    if (!peer(r).cause.empty() && r != failure_->found_by)
      report.further.push_back(fmt::format("rank {} failed too: {}", r, peer(r).cause));
  }
  if (report.failure.late) {
    const Diagnosis diagnosis = diagnose(report.states, failure_->found_by, seconds_between(failed_at_, now));
    report.failure.origin = diagnosis.at_fault;
    report.failure.why += diagnosis.verdict;
  }
  failure_ = report.failure;
  return report;
}

RankState ControlProtocol::last_heard(int rank, Clock::time_point now) const {
  const Peer& p = peer(rank);
  RankState s = p.state;
  s.gone = p.gone;
  s.silent = failed() && !p.gone && !p.said_last_words;
  s.age_seconds = seconds_between(s.gone || s.silent ? p.heard_at : p.stood_at, now);
  return s;
}

double ControlProtocol::unheard_seconds(int rank, Clock::time_point now) const {
  return seconds_between(peer(rank).heard_at, now);
}

std::vector<int> ControlProtocol::unfinished() const {
  std::vector<int> ranks;
  for (int r = 0; r < num_ranks(); ++r)
    if (r != rank_ && peer(r).rounds < rounds_) ranks.push_back(r);
  return ranks;
}

}  // namespace echelon
