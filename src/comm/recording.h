// Records what a rank sends: calls and bytes by verb, always. With a TraceRecorder, also when each call
// began, whether the rank waited for it, and what the rank did otherwise.
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

// Records the trace of one rank, from its own thread. Keeps only the last steps.
class TraceRecorder {
 public:
  // Keeps `steps` steps, and what follows each of them, in times of the job's clock since `zero`.
  TraceRecorder(const Time& time, Clock::time_point zero, int steps)
      : time_(time), zero_(zero), steps_(static_cast<std::size_t>(steps)) {}
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  // From now on `device`, which outlives the recorder's use, times the rank's work.
  void time_by(DeviceClock& device) { device_ = &device; }

  // A time to put into spans. With a device it is only a handle, which trace() turns into a time.
  TraceTime now();
  TraceTime at(Clock::time_point time) const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time - zero_).count();
  }

  // Forgets steps before the last ones. Calls belong to this step until end_step().
  void begin_step(std::int64_t step);
  void end_step() { step_ = 0; }

  void add(const WorkSpan& span) { trace_.work.push_back(span); }
  // Stops or resumes recording: inside a graph nothing can be marked.
  void pause(bool paused) { is_paused_ = paused; }
  bool is_paused() const { return is_paused_; }
  std::int32_t add_group(const std::string& name);
  // Numbered from the recorder's start, so that a call may finish after it was forgotten.
  using CallNumber = std::uint64_t;
  static constexpr TraceTime under_way =
      std::numeric_limits<TraceTime>::min();  // a call's end until finish()
  CallNumber add(CallSpan call);
  void finish(CallNumber number, TraceTime waited, TraceTime end, const DeviceWork& work = {});

  // The steps kept; calls in progress end now. The host waits for the device's times.
  Trace trace();

 private:
  struct Mark {
    std::uint64_t work, calls, events;  // recorded before the step
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
  std::deque<std::shared_ptr<DeviceEvent>> events_;  // from now()
  std::map<CallNumber, DeviceWork> works_;           // of finished calls
};

// Records an activity until the end of the scope; does nothing without a recorder.
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

// Where the calls of one communicator are traced, besides its Traffic. Nowhere without a recorder.
struct TraceOf {
  TraceRecorder* recorder = nullptr;
  std::string group{};
  std::vector<int> ranks{};  // of the job, by group rank
  bool is_part = false;      // see CallSpan
};

// Wraps `inner`. In a group of one rank calls do not count, as nothing travels. `traffic` and the recorder
// outlive the result.
std::unique_ptr<Communicator> record_traffic(std::unique_ptr<Communicator> inner, Axis axis, Traffic& traffic,
                                             TraceOf trace = {});

}  // namespace echelon
