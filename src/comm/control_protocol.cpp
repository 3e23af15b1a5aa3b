#include "comm/control_protocol.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "comm/diagnosis.h"

namespace echelon {
namespace {

using nlohmann::json;

std::string text_of(const json& object) {
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

RankState decode_state(int rank, const json& j) {
  RankState s;
  s.rank = rank;
  if (!j.is_object()) return s;
  s.instruction = j.value("at", "");
  s.last_finished = j.value("finished", "");
  s.waits_in = j.value("in", "");
  s.waits_for = j.value("for", std::vector<int>{});
  s.to_take = j.value("to_take", false);
  s.seconds = j.value("seconds", 0.0);
  return s;
}

Failure decode_failure(const json& j) {
  return {j.value("origin", -1), j.value("why", ""), j.value("refused", false), j.value("late", false),
          j.value("found_by", -1)};
}

// Of failures that were found at one time every process keeps the same: one whose cause is known, then the
// one that the lowest rank found.
bool goes_before(const Failure& a, const Failure& b) {
  return std::tuple(a.late, a.found_by) < std::tuple(b.late, b.found_by);
}

}  // namespace

std::string ControlProtocol::encode(const RankState& s) {
  return text_of({{"at", s.instruction},
                  {"finished", s.last_finished},
                  {"in", s.waits_in},
                  {"for", s.waits_for},
                  {"to_take", s.to_take},
                  {"seconds", s.seconds}});
}

std::string ControlProtocol::encode(const Failure& f) {
  return text_of({{"origin", f.origin},
                  {"why", f.why},
                  {"refused", f.refused},
                  {"late", f.late},
                  {"found_by", f.found_by}});
}

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
  failure_ = std::move(failure);
  failed_at_ = now;
}

void ControlProtocol::take(int from, Frame type, const std::string& text, Clock::time_point now) {
  Peer& p = peer(from);
  p.heard_at = now;
  const json j = json::parse(text, nullptr, false);
  switch (type) {
    case Frame::state:
    case Frame::last_words:
      p.state = decode_state(from, j);
      p.stood_at = now;
      p.said_last_words = type == Frame::last_words;
      break;
    case Frame::failure: {
      if (!j.is_object() || reported_) break;
      const Failure heard = decode_failure(j);
      if (!failed()) failed_at_ = now;
      if (!failed() || goes_before(heard, *failure_)) failure_ = heard;
      break;
    }
    case Frame::report:
      if (!j.is_object() || reported_) break;
      failure_ = decode_failure(j);
      reported_ = true;
      break;
    case Frame::done:
      ++p.rounds;
      break;
    case Frame::goodbye:
      p.said_goodbye = true;
      break;
  }
}

void ControlProtocol::lose(int from, Clock::time_point now) {
  Peer& p = peer(from);
  p.gone = true;
  p.heard_at = now;
  if (!p.said_goodbye)
    fail({.origin = from, .why = fmt::format("rank {} is gone: its process ended", from)}, now);
}

void ControlProtocol::say_last_words(const RankState& own, Clock::time_point now) {
  Peer& p = peer(rank_);
  p.state = own;
  p.state.rank = rank_;
  p.heard_at = p.stood_at = now;
  p.said_last_words = true;
}

bool ControlProtocol::waits_for_words(Clock::time_point now) const {
  for (int r = 0; r < num_ranks(); ++r)
    if (!peer(r).gone && !peer(r).said_last_words && (r == rank_ || now - peer(r).heard_at <= silence))
      return true;
  return false;
}

// Where the one that found the failure cannot speak, the lowest of those that can.
int ControlProtocol::speaker(Clock::time_point now) const {
  const auto passed = now - failed_at_;
  if (passed <= 2 * silence) return failure_->found_by;
  if (passed > 3 * silence) return -1;
  int lowest = 0;
  while (peer(lowest).gone || !peer(lowest).said_last_words) ++lowest;  // this rank has said them
  return lowest;
}

std::optional<ControlProtocol::Report> ControlProtocol::report_when_due(Clock::time_point now) {
  if (!failed() || reported_ || waits_for_words(now)) return {};
  const int speaks = speaker(now);
  if (speaks < 0) reported_ = true;
  if (speaks != rank_) return {};
  reported_ = true;
  Report report{*failure_, {}};
  for (int r = 0; r < num_ranks(); ++r) report.states.push_back(last_heard(r, now));
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
