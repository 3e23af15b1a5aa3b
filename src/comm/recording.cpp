#include "comm/recording.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"

namespace echelon {

void TraceRecorder::begin_step(std::int64_t step) {
  step_ = static_cast<std::int32_t>(step);
  marks_.push_back({forgotten_work_ + trace_.work.size(), forgotten_calls_ + trace_.calls.size(),
                    forgotten_events_ + events_.size()});
  if (marks_.size() > steps_) marks_.pop_front();
  const auto forget = [](auto& spans, std::uint64_t& forgotten, std::uint64_t until) {
    spans.erase(spans.begin(), spans.begin() + static_cast<std::ptrdiff_t>(until - forgotten));
    forgotten = until;
  };
  forget(trace_.work, forgotten_work_, marks_.front().work);
  forget(trace_.calls, forgotten_calls_, marks_.front().calls);
  forget(events_, forgotten_events_, marks_.front().events);
  works_.erase(works_.begin(), works_.lower_bound(forgotten_calls_));
}

// Of a device: the number of an event. Such times were before the run by centuries.
static constexpr TraceTime first_event = std::numeric_limits<TraceTime>::min() + 1;

TraceTime TraceRecorder::now() {
  if (device_ == nullptr) return at(time_.now());
  try {
    events_.push_back(device_->mark());
  } catch (const RunError&) {  // a failure is on its way, or the device is lost, which every later call says
    return at(time_.now());
  }
  return first_event + static_cast<TraceTime>(forgotten_events_ + events_.size() - 1);
}

std::int32_t TraceRecorder::add_group(const std::string& name) {
  trace_.groups.push_back(name);
  return static_cast<std::int32_t>(trace_.groups.size()) - 1;
}

TraceRecorder::CallNumber TraceRecorder::add(CallSpan call) {
  call.step = step_;
  trace_.calls.push_back(call);
  return forgotten_calls_ + trace_.calls.size() - 1;
}

// A caller that waits at once is there within this: nothing was done in between.
static constexpr TraceTime at_once = 5'000;

void TraceRecorder::finish(CallNumber number, TraceTime waited, TraceTime end, const DeviceWork& work) {
  if (number < forgotten_calls_) return;
  CallSpan& call = trace_.calls[number - forgotten_calls_];
  call.waited = waited;
  call.end = end;
  if (work.end) works_[number] = work;
}

Trace TraceRecorder::trace() {
  Trace trace = trace_;
  const TraceTime end = now();
  for (CallSpan& call : trace.calls)
    if (call.end == under_way) call.waited = call.end = end;
  if (device_ != nullptr) time_on_device(trace);
  for (CallSpan& call : trace.calls)
    if (call.waited - call.posted < at_once) call.waited = call.posted;
  return trace;
}

void TraceRecorder::time_on_device(Trace& trace) {
  const auto resolve = [&](TraceTime& time) {
    // Of a time of the host's, which is none: more than any.
    const std::uint64_t number = static_cast<std::uint64_t>(time) - static_cast<std::uint64_t>(first_event);
    if (number < forgotten_events_)  // of what began before the steps that are kept
      time = time_of(events_.front());
    else if (number < forgotten_events_ + events_.size())
      time = time_of(events_[number - forgotten_events_]);
  };
  for (WorkSpan& span : trace.work) resolve(span.begin), resolve(span.end);
  for (std::size_t i = 0; i < trace.calls.size(); ++i) {
    CallSpan& call = trace.calls[i];
    for (TraceTime* const time : {&call.begin, &call.posted, &call.waited, &call.end}) resolve(*time);
    const auto work = works_.find(forgotten_calls_ + i);
    if (work == works_.end()) continue;
    // The kernels came to the wait for it at `waited`; before it began it stood behind the other ranks.
    const TraceTime begin = time_of(work->second.begin), end = time_of(work->second.end);
    call.begin = call.posted = std::min(begin, call.waited);
    call.waited = std::min(call.waited, end);
    call.end = end;
  }
}

namespace {

// Tells the recorder when the caller learnt that the call was done.
class TracedOperation final : public Operation {
 public:
  TracedOperation(Pending inner, TraceRecorder& recorder, TraceRecorder::CallNumber number)
      : inner_(std::move(inner)), recorder_(recorder), number_(number) {}

  bool progress() override {
    DeviceWork work;
    if (!inner_.progress(work)) return false;
    const TraceTime now = recorder_.now();
    recorder_.finish(number_, now, now, work);
    return true;
  }
  void wait() override {
    DeviceWork work;
    const TraceTime begin = recorder_.now();
    inner_.wait(work);
    recorder_.finish(number_, begin, recorder_.now(), work);
  }

 private:
  Pending inner_;
  TraceRecorder& recorder_;
  TraceRecorder::CallNumber number_;
};

class RecordingCommunicator final : public Communicator {
 public:
  RecordingCommunicator(std::unique_ptr<Communicator> inner, Axis axis, Traffic& traffic, TraceOf trace)
      : inner_(std::move(inner)), axis_(axis), traffic_(traffic), trace_(std::move(trace)) {
    if (size() == 1) trace_.recorder = nullptr;
    if (trace_.recorder == nullptr) return;
    group_ = trace_.recorder->add_group(trace_.group);
    sent_.resize(static_cast<std::size_t>(size()));
    received_.resize(static_cast<std::size_t>(size()));
  }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }

  Pending all_reduce(const Tensor& x, ReduceOp op) override {
    return recorded(
        Verb::all_reduce, none, [&] { return inner_->all_reduce(x, op); },
        [&] { return all_reduce_bytes_sent(x.numel(), size(), rank(), element_bytes(x.dtype())); });
  }

  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    return recorded(
        Verb::all_gather, none, [&] { return inner_->all_gather(in, out, counts); },
        [&] { return bytes_sent(Verb::all_gather, counts, rank(), element_bytes(in.dtype())); });
  }

  Pending reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    return recorded(
        Verb::reduce_scatter, none, [&] { return inner_->reduce_scatter(in, out, counts); },
        [&] { return bytes_sent(Verb::reduce_scatter, counts, rank(), element_bytes(in.dtype())); });
  }

  Pending all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts, const Tensor& out,
                     std::span<const std::int64_t> recv_counts) override {
    return recorded(
        Verb::all_to_all, none, [&] { return inner_->all_to_all(in, send_counts, out, recv_counts); },
        [&] { return bytes_sent(Verb::all_to_all, send_counts, rank(), element_bytes(in.dtype())); });
  }

  Pending broadcast(const Tensor& x, int root) override {
    return recorded(
        Verb::broadcast, root, [&] { return inner_->broadcast(x, root); },
        [&] { return rank() == root ? (size() - 1) * x.bytes() : 0; });
  }

  Pending send(const Tensor& x, int to) override {
    return recorded(
        Verb::send, to, [&] { return inner_->send(x, to); }, [&] { return x.bytes(); });
  }

  Pending recv(const Tensor& x, int from) override {
    return recorded(
        Verb::recv, from, [&] { return inner_->recv(x, from); }, [] { return std::int64_t{0}; });
  }

  Pending barrier() override {
    return recorded(
        Verb::barrier, none, [&] { return inner_->barrier(); }, [] { return std::int64_t{0}; });
  }

 private:
  static constexpr int none = -1;

  // Every verb is called before it is counted: only accepted calls count, and their arguments are valid then.
  template <class Post, class Bytes>
  Pending recorded(Verb verb, int peer, const Post& post, const Bytes& bytes) {
    TraceRecorder* const recorder = trace_.recorder;
    const TraceTime begin = recorder != nullptr ? recorder->now() : 0;
    Pending pending = post();
    if (size() == 1) return pending;
    const std::int64_t sent = bytes();
    VerbTraffic& cell = traffic_.at(axis_, verb);
    cell.calls += 1;
    cell.bytes += sent;
    if (recorder == nullptr) return pending;
    CallSpan call;
    call.axis = axis_;
    call.verb = verb;
    call.is_part = trace_.is_part;
    call.group = group_;
    if (peer >= 0) call.peer = trace_.ranks.at(static_cast<std::size_t>(peer));
    if (verb == Verb::send) call.number = sent_[static_cast<std::size_t>(peer)]++;
    if (verb == Verb::recv) call.number = received_[static_cast<std::size_t>(peer)]++;
    call.bytes = sent;
    call.begin = begin;
    call.posted = recorder->now();
    const bool done = pending.finished();
    call.waited = call.end = done ? call.posted : TraceRecorder::under_way;
    const TraceRecorder::CallNumber number = recorder->add(call);
    if (done) return pending;
    return Pending(std::make_shared<TracedOperation>(std::move(pending), *recorder, number));
  }
  std::unique_ptr<Communicator> inner_;
  Axis axis_;
  Traffic& traffic_;
  TraceOf trace_;
  std::int32_t group_ = 0;
  std::vector<std::int32_t> sent_, received_;  // messages, by the other's group rank
};

}  // namespace

std::unique_ptr<Communicator> record_traffic(std::unique_ptr<Communicator> inner, Axis axis, Traffic& traffic,
                                             TraceOf trace) {
  return std::make_unique<RecordingCommunicator>(std::move(inner), axis, traffic, std::move(trace));
}

}  // namespace echelon
