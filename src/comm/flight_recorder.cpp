#include "comm/flight_recorder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <numeric>

namespace echelon {

std::string describe(const RankState& s) {
  std::string text;
  if (s.silent_seconds > 0) text = fmt::format("silent since {:.1f} s; until then ", s.silent_seconds);
  if (!s.waits_in.empty()) {
    text += "waits in " + s.waits_in;
    if (!s.waits_for.empty())
      text += fmt::format(" for rank{} {}", s.waits_for.size() > 1 ? "s" : "", fmt::join(s.waits_for, ", "));
    text += fmt::format(", for {:.1f} s", s.seconds);
  } else {
    text += fmt::format("does not wait, since {:.1f} s", s.seconds);
  }
  if (!s.instruction.empty()) text += ", at " + s.instruction;
  text += s.last_finished.empty() ? "; has finished nothing yet" : "; last finished " + s.last_finished;
  return text;
}

FlightRecorder::Ticket FlightRecorder::begin(const std::string& group, std::uint64_t number,
                                             const Call& call) {
  const std::lock_guard lock(mutex_);
  const Ticket ticket = next_++;
  Entry& e = entry(ticket);
  e.group = &group;
  e.number = number;
  e.verb = call.verb;
  e.op = call.op;
  e.dtype = call.dtype;
  e.root = call.root;
  e.num_counts = call.counts.size();
  std::copy_n(call.counts.begin(), std::min(e.counts.size(), call.counts.size()), e.counts.begin());
  e.total = std::accumulate(call.counts.begin(), call.counts.end(), std::int64_t{0});
  e.begin = changed_ = Clock::now();
  e.finished = false;
  e.instruction = instruction_;
  return ticket;
}

void FlightRecorder::finish(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  if (next_ - ticket > num_kept) return;  // forgotten
  Entry& e = entry(ticket);
  e.finished = true;
  e.end = changed_ = Clock::now();
  last_finished_ = ticket;
  any_finished_ = true;
}

void FlightRecorder::sleep(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  if (!asleep_ || asleep_in_ != ticket) slept_at_ = Clock::now();
  asleep_in_ = ticket;
  asleep_ = true;
}

void FlightRecorder::wake() {
  const std::lock_guard lock(mutex_);
  if (asleep_) waited_seconds_ += std::chrono::duration<double>(Clock::now() - slept_at_).count();
  asleep_ = false;
}

double FlightRecorder::waited_seconds() const {
  const std::lock_guard lock(mutex_);
  return waited_seconds_;
}

void FlightRecorder::at(std::string_view instruction) {
  const std::lock_guard lock(mutex_);
  instruction_ = {};
  std::copy_n(instruction.begin(), std::min(instruction.size(), instruction_.size() - 1),
              instruction_.begin());
}

std::string FlightRecorder::name(const Entry& e) {
  const bool message = e.verb == Verb::send || e.verb == Verb::recv;
  std::string what = verb_name(e.verb);
  if (e.op == ReduceOp::max) what += " (max)";
  if (message)
    what += fmt::format(" {} group rank {}", e.verb == Verb::send ? "to" : "from", e.root);
  else if (e.verb == Verb::broadcast)
    what += fmt::format(" from group rank {}", e.root);
  if (e.num_counts == 1)
    what += fmt::format(" of {} {}", e.counts[0], dtype_name(e.dtype));
  else if (e.num_counts > 1)
    what += fmt::format(
        " of [{}{}] {}",
        fmt::join(e.counts.begin(),
                  e.counts.begin() + static_cast<std::ptrdiff_t>(std::min(e.counts.size(), e.num_counts)),
                  ", "),
        e.num_counts > e.counts.size() ? ", ..." : "", dtype_name(e.dtype));
  return fmt::format("{} {} {} ({})", *e.group, message ? "message" : "collective", e.number, what);
}

RankState FlightRecorder::state() const {
  const std::lock_guard lock(mutex_);
  RankState s;
  s.instruction = instruction_.data();
  const auto kept = [&](Ticket ticket) { return next_ - ticket <= num_kept; };
  if (any_finished_ && kept(last_finished_)) s.last_finished = name(entry(last_finished_));
  if (asleep_ && kept(asleep_in_)) s.waits_in = name(entry(asleep_in_));
  s.seconds = std::chrono::duration<double>(Clock::now() - (asleep_ ? slept_at_ : changed_)).count();
  return s;
}

std::string FlightRecorder::json_lines(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  const auto ago = [&](Clock::time_point t) { return std::chrono::duration<double>(now - t).count(); };
  std::string lines;
  for (Ticket t = next_ > num_kept ? next_ - num_kept : 0; t < next_; ++t) {
    const Entry& e = entry(t);
    // No name of a group or an instruction holds a quote.
    lines += fmt::format(
        R"({{"rank": {}, "operation": "{}", "elements": {}, "at": "{}", "began_seconds_ago": {:.6f}, "finished_seconds_ago": {}}})"
        "\n",
        rank, name(e), e.total, e.instruction.data(), ago(e.begin),
        e.finished ? fmt::format("{:.6f}", ago(e.end)) : "null");
  }
  return lines;
}

}  // namespace echelon
