#include "comm/flight_recorder.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <exception>

#include "base/split.h"

namespace echelon {

std::string describe(const RankState& s) {
  std::string text;
  if (s.gone)
    text = fmt::format("its process ended {:.1f} s ago; until then ", s.age_seconds);
  else if (s.silent)
    text = fmt::format("silent since {:.1f} s; until then ", s.age_seconds);
  if (!s.waits_in.empty()) {
    text += "waits in " + s.waits_in;
    if (!s.waits_for.empty())
      text += fmt::format(" for rank{} {}{}", s.waits_for.size() > 1 ? "s" : "", fmt::join(s.waits_for, ", "),
                          s.to_take ? " to take its part" : "");
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
  e.total = sum_of(call.counts);
  e.begin = changed_ = time_.now();
  e.finished = false;
  e.instruction = instruction_;
  return ticket;
}

void FlightRecorder::finish(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  if (next_ - ticket > num_kept) return;  // forgotten
  Entry& e = entry(ticket);
  e.finished = true;
  e.end = changed_ = time_.now();
  if (waits_in_ == ticket) waits_in_.reset();
  last_finished_ = ticket;
  any_finished_ = true;
}

void FlightRecorder::sleep(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  slept_at_ = time_.now();
  if (waits_in_ != ticket) wait_began_ = slept_at_;
  waits_in_ = ticket;
  asleep_ = true;
}

void FlightRecorder::wake() {
  const std::lock_guard lock(mutex_);
  if (asleep_) waited_seconds_ += seconds_between(slept_at_, time_.now());
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
  if (announced_) {
    s.waits_in = announced_->what;
    s.waits_for = announced_->ranks;
  } else if (asleep_) {
    s.waits_in = kept(*waits_in_) ? name(entry(*waits_in_)) : "an operation that it began long ago";
  }
  s.seconds = seconds_between(waits_since().value_or(changed_), time_.now());
  return s;
}

std::optional<Clock::time_point> FlightRecorder::waits_since() const {
  if (announced_) return announced_->since;
  if (asleep_) return wait_began_;
  return {};
}

double FlightRecorder::wait_seconds() const {
  const std::lock_guard lock(mutex_);
  const auto since = waits_since();
  return since ? seconds_between(*since, time_.now()) : 0;
}

std::string FlightRecorder::json_lines(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto now = time_.now();
  const auto ago = [&](Clock::time_point t) { return seconds_between(t, now); };
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

AnnouncedWait::AnnouncedWait(FlightRecorder& recorder, std::string what, std::vector<int> ranks)
    : recorder_(recorder) {
  const std::lock_guard lock(recorder_.mutex_);
  recorder_.announced_ = {std::move(what), std::move(ranks), recorder_.time_.now()};
}

// Where it ends by an exception the record stays: the rank was held up there.
AnnouncedWait::~AnnouncedWait() {
  if (std::uncaught_exceptions() > 0) return;
  const std::lock_guard lock(recorder_.mutex_);
  recorder_.waited_seconds_ += seconds_between(recorder_.announced_->since, recorder_.time_.now());
  recorder_.announced_.reset();
}

}  // namespace echelon
