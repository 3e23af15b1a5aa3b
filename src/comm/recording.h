// Records what a rank sends: calls and bytes by verb, always; and, where a TraceRecorder is given, when each
// call began, whether the rank waited for it, and what the rank did beside.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/communicator.h"
#include "spec/trace.h"

namespace echelon {

// The trace of one rank, by its own thread. Keeps the last steps only.
class TraceRecorder {
 public:
  // Times of the job's clock, counted from `zero`; of `steps` steps, and of what comes after each of them.
  TraceRecorder(const Time& time, Clock::time_point zero, int steps)
      : time_(time), zero_(zero), steps_(static_cast<std::size_t>(steps)) {}
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  TraceTime now() const { return at(time_.now()); }
  TraceTime at(Clock::time_point time) const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time - zero_).count();
  }

  // The steps before the last ones are forgotten. Calls belong to this one until end_step().
  void begin_step(std::int64_t step);
  void end_step() { step_ = 0; }

  void add(const WorkSpan& span) { trace_.work.push_back(span); }
  std::int32_t add_group(const std::string& name);
  // Counts from the beginning of the recorder, so that a call may end after it was forgotten.
  using CallNumber = std::uint64_t;
  CallNumber add(CallSpan call);
  void finish(CallNumber number, TraceTime waited, TraceTime end);

  // What is kept; calls under way end now.
  Trace trace() const;

 private:
  struct Mark {
    std::uint64_t work, calls;  // that were made before the step
  };
  Time time_;
  Clock::time_point zero_;
  std::size_t steps_;
  std::int32_t step_ = 0;
  Trace trace_;
  std::uint64_t forgotten_work_ = 0, forgotten_calls_ = 0;
  std::deque<Mark> marks_;
};

// Records an activity from here to the end of the block; nothing without a recorder.
class Doing {
 public:
  Doing(TraceRecorder* recorder, Activity activity, std::int32_t which = -1)
      : recorder_(recorder), span_{activity, which} {
    if (recorder_ != nullptr) span_.begin = recorder_->now();
  }
  ~Doing() {
    if (recorder_ == nullptr) return;
    span_.end = recorder_->now();
    recorder_->add(span_);
  }
  Doing(const Doing&) = delete;
  Doing& operator=(const Doing&) = delete;

 private:
  TraceRecorder* recorder_;
  WorkSpan span_;
};

// Where the calls of one communicator go, beside its Traffic. Without a recorder nowhere.
struct TraceOf {
  TraceRecorder* recorder = nullptr;
  std::string group{};
  std::vector<int> ranks{};  // of the job, by group rank
  bool is_part = false;      // see CallSpan
};

// Wraps `inner`. A group of one rank counts calls as zero: nothing travels. `traffic` and the recorder
// outlive the result.
std::unique_ptr<Communicator> record_traffic(std::unique_ptr<Communicator> inner, Axis axis, Traffic& traffic,
                                             TraceOf trace = {});

}  // namespace echelon
