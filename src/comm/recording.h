// Records what a rank sends: calls and bytes by verb, always; and, where a TraceRecorder is given, when each
// call began, whether the rank waited for it, and what the rank did beside.
#pragma once

#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "comm/communicator.h"
#include "spec/trace.h"
#include "tensor/device_clock.h"

namespace echelon {

// The trace of one rank, by its own thread. Keeps the last steps only.
class TraceRecorder {
 public:
  // Times of the job's clock, counted from `zero`; of `steps` steps, and of what comes after each of them.
  TraceRecorder(const Time& time, Clock::time_point zero, int steps)
      : time_(time), zero_(zero), steps_(static_cast<std::size_t>(steps)) {}
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  // From now on what the rank does is timed by its device, which outlives the recorder's use.
  void time_by(DeviceClock& device) { device_ = &device; }

  // To be kept, and handed back: of a device it is a time in the result of trace() alone.
  TraceTime now();
  TraceTime at(Clock::time_point time) const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time - zero_).count();
  }

  // The steps before the last ones are forgotten. Calls belong to this one until end_step().
  void begin_step(std::int64_t step);
  void end_step() { step_ = 0; }

  void add(const WorkSpan& span) { trace_.work.push_back(span); }
  // Nothing is recorded from here on, or is again: a graph has no marks of what it does within.
  void pause(bool paused) { is_paused_ = paused; }
  bool is_paused() const { return is_paused_; }
  std::int32_t add_group(const std::string& name);
  // Counts from the beginning of the recorder, so that a call may end after it was forgotten.
  using CallNumber = std::uint64_t;
  static constexpr TraceTime under_way =
      std::numeric_limits<TraceTime>::min();  // a call's end until finish()
  CallNumber add(CallSpan call);
  void finish(CallNumber number, TraceTime waited, TraceTime end, const DeviceWork& work = {});

  // What is kept; calls under way end now. The host waits for what of it is a device's.
  Trace trace();

 private:
  struct Mark {
    std::uint64_t work, calls, events;  // that were made before the step
  };
  TraceTime time_of(const std::shared_ptr<DeviceEvent>& event) { return at(device_->time_of(event)); }
  void time_on_device(Trace& trace);
  Time time_;
  Clock::time_point zero_;
  std::size_t steps_;
  std::int32_t step_ = 0;
  bool is_paused_ = false;
  Trace trace_;
  std::uint64_t forgotten_work_ = 0, forgotten_calls_ = 0, forgotten_events_ = 0;
  std::deque<Mark> marks_;
  DeviceClock* device_ = nullptr;
  std::deque<std::shared_ptr<DeviceEvent>> events_;  // what now() has given
  std::map<CallNumber, DeviceWork> works_;           // of finished calls
};

// Records an activity from here to the end of the block; nothing without a recorder.
class Doing {
 public:
  Doing(TraceRecorder* recorder, Activity activity, std::int32_t which = -1)
      : recorder_(recorder != nullptr && recorder->is_paused() ? nullptr : recorder), span_{activity, which} {
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
