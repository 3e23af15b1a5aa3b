#include "comm/recording.h"

#include <limits>
#include <utility>

namespace echelon {

void TraceRecorder::begin_step(std::int64_t step) {
  step_ = static_cast<std::int32_t>(step);
  marks_.push_back({forgotten_work_ + trace_.work.size(), forgotten_calls_ + trace_.calls.size()});
  if (marks_.size() > steps_) marks_.pop_front();
  const auto forget = [](auto& spans, std::uint64_t& forgotten, std::uint64_t until) {
    spans.erase(spans.begin(), spans.begin() + static_cast<std::ptrdiff_t>(until - forgotten));
    forgotten = until;
  };
  forget(trace_.work, forgotten_work_, marks_.front().work);
  forget(trace_.calls, forgotten_calls_, marks_.front().calls);
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

void TraceRecorder::finish(CallNumber number, TraceTime waited, TraceTime end) {
  if (number < forgotten_calls_) return;
  CallSpan& call = trace_.calls[number - forgotten_calls_];
  call.waited = waited - call.posted < at_once ? call.posted : waited;
  call.end = end;
}

Trace TraceRecorder::trace() const {
  Trace trace = trace_;
  const TraceTime end = now();
  for (CallSpan& call : trace.calls)
    if (call.end < call.posted) call.waited = call.end = end;
  return trace;
}

namespace {

// Tells the recorder when the caller learnt that the call was done.
class TracedOperation final : public Operation {
 public:
  TracedOperation(Pending inner, TraceRecorder& recorder, TraceRecorder::CallNumber number)
      : inner_(std::move(inner)), recorder_(recorder), number_(number) {}

  bool progress() override {
    if (!inner_.progress()) return false;
    const TraceTime now = recorder_.now();
    recorder_.finish(number_, now, now);
    return true;
  }
  void wait() override {
    const TraceTime begin = recorder_.now();
    inner_.wait();
    recorder_.finish(number_, begin, recorder_.now());
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

  // Every verb is called before it is counted: only what was accepted counts, and its arguments are valid
  // then.
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
    call.waited = call.end = done ? call.posted : under_way;
    const TraceRecorder::CallNumber number = recorder->add(call);
    if (done) return pending;
    return Pending(std::make_shared<TracedOperation>(std::move(pending), *recorder, number));
  }
  static constexpr TraceTime under_way = std::numeric_limits<TraceTime>::min();

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
