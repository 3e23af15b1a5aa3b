// Posting of collectives and messages, and the work that follows.
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "comm/thread_job.h"

namespace echelon {

namespace {
// What a thread does between two looks at the abort flag, and takes over from a late rank at a time. A
// collective no larger than this in all is done by its last caller alone: that is faster than to wake the
// others.
constexpr std::int64_t piece_bytes = 256 << 10;
}  // namespace

class CollectiveTask final : public Task {
 public:
  CollectiveTask(ThreadJob& job, Group& group, std::shared_ptr<OpenCollective> collective, int me, Tensor in,
                 Tensor out)
      : Task(group),
        job_(job),
        collective_(std::move(collective)),
        me_(me),
        in_(std::move(in)),
        out_(std::move(out)) {}

  bool finished() const override { return collective_->finished.load(std::memory_order_acquire); }
  bool advance(bool all) override { return job_.work(group(), *collective_, me_, all); }
  bool in_use() const override { return collective_->active > 0; }
  std::string name() const override {
    return fmt::format("{} collective {} ({})", group().name, collective_->number,
                       describe(*collective_->calls[static_cast<std::size_t>(me_)]));
  }
  std::vector<int> missing() const override {
    std::vector<int> ranks;
    for (std::size_t i = 0; i < group().ranks.size(); ++i)
      if (!collective_->calls[i]) ranks.push_back(group().ranks[i]);
    return ranks;
  }

 private:
  ThreadJob& job_;
  std::shared_ptr<OpenCollective> collective_;
  int me_;
  Tensor in_, out_;  // kept alive
};

class ReceiveTask final : public Task {
 public:
  ReceiveTask(ThreadJob& job, Group& group, Channel& channel, std::shared_ptr<Message> message, int from,
              int to, Tensor x)
      : Task(group),
        job_(job),
        channel_(channel),
        message_(std::move(message)),
        from_(from),
        to_(to),
        x_(std::move(x)) {}

  bool finished() const override { return message_->delivered.load(std::memory_order_acquire); }

  // Takes the sender's copy. Without one the sender has written, or will write, to x itself.
  bool advance(bool) override {
    MessageBuffer buffer;
    {
      const std::lock_guard lock(job_.mutex_);
      buffer = std::exchange(message_->buffer, {});
    }
    if (!buffer.data) return false;
    if (x_.numel() > 0) std::memcpy(x_.host_bytes(), buffer.data.get(), static_cast<std::size_t>(x_.bytes()));
    const std::lock_guard lock(job_.mutex_);
    if (channel_.spare.size() < 8) channel_.spare.push_back(std::move(buffer));
    message_->delivered.store(true, std::memory_order_release);
    return true;
  }

  bool in_use() const override { return message_->active; }
  std::string name() const override {
    return fmt::format("{} message {} from rank {} to rank {} (recv of {} {})", group().name,
                       message_->number, world(from_), world(to_), message_->expected_count,
                       dtype_name(message_->expected_dtype));
  }
  std::vector<int> missing() const override {
    return message_->sent ? std::vector<int>{} : std::vector<int>{world(from_)};
  }

 private:
  int world(int group_rank) const { return group().ranks[static_cast<std::size_t>(group_rank)]; }

  ThreadJob& job_;
  Channel& channel_;
  std::shared_ptr<Message> message_;
  int from_, to_;  // group ranks
  Tensor x_;
};

// ---- collectives

std::string ThreadJob::list_calls(const Group& group, const OpenCollective& collective) const {
  std::vector<std::string> calls;
  for (std::size_t i = 0; i < collective.calls.size(); ++i)
    if (collective.calls[i])
      calls.push_back(fmt::format("rank {} called {}", group.ranks[i], describe(*collective.calls[i])));
  return fmt::format("{}", fmt::join(calls, ", "));
}

std::shared_ptr<Task> ThreadJob::call(Group& group, int me, Call call, const Tensor& in, const Tensor& out) {
  const auto index = static_cast<std::size_t>(me);
  const int rank = group.ranks[index];
  forget_finished(state(rank));
  throw_if_aborted(rank);
  std::shared_ptr<OpenCollective> collective;
  FlightRecorder::Ticket ticket = 0;
  bool do_all = false;
  {
    std::unique_lock lock(mutex_);
    const std::uint64_t number = group.next[index]++;
    ticket = state(rank).recorder.begin(group.name, number, call);
    if (group.open.empty() || group.open.back()->number < number)
      group.open.push_back(std::make_shared<OpenCollective>(number, group.ranks.size()));
    collective = group.open[number - group.open.front()->number];

    bool agreed = true;
    for (std::size_t i = 0; i < collective->calls.size(); ++i)
      if (const auto& other = collective->calls[i]; other && !agree(call, me, *other, static_cast<int>(i)))
        agreed = false;
    collective->calls[index] = std::move(call);
    const auto name = [&] { return fmt::format("{} collective {}", group.name, number); };
    if (!agreed) fail_locked(lock, rank, fmt::format("{}: {}", name(), list_calls(group, *collective)));
    if (any_left_)
      for (std::size_t i = 0; i < collective->calls.size(); ++i)
        if (!collective->calls[i] && state(group.ranks[i]).left)
          fail_locked(lock, rank,
                      fmt::format("{}: rank {} has finished, but {}", name(), group.ranks[i],
                                  list_calls(group, *collective)));
    if (++collective->num_called == group.size()) {
      make_ready(group, *collective);
      group.open.pop_front();  // every rank has called all earlier ones before this
      do_all = collective->movement->bytes() <= piece_bytes;
      if (!do_all) wake(group);
    }
  }
  if (do_all) work(group, *collective, me, true);
  if (collective->finished.load(std::memory_order_acquire)) {
    state(rank).recorder.finish(ticket);
    return nullptr;
  }
  auto task = std::make_shared<CollectiveTask>(*this, group, std::move(collective), me, in, out);
  task->ticket = ticket;
  state(rank).tasks.push_back(task);
  return task;
}

void ThreadJob::make_ready(Group& group, OpenCollective& c) {
  std::vector<Call> calls;
  for (const auto& call : c.calls) calls.push_back(*call);
  c.movement.emplace(std::move(calls));
  c.piece_length = piece_bytes / element_bytes(c.movement->dtype());
  c.claimed = std::make_unique<std::atomic<std::int64_t>[]>(c.calls.size());
  for (int part = 0; part < c.movement->num_parts(); ++part) {
    c.num_pieces.push_back((c.movement->part_length(part) + c.piece_length - 1) / c.piece_length);
    c.unfinished_pieces += c.num_pieces.back();
  }
  c.ready.store(true, std::memory_order_release);
  if (c.unfinished_pieces > 0) return;
  c.finished.store(true, std::memory_order_release);
  wake(group);
}

bool ThreadJob::work(Group& group, OpenCollective& c, int own_part, bool all) {
  if (!c.ready.load(std::memory_order_acquire)) return false;
  const int n = c.movement->num_parts();
  const auto left = [&](int part) {
    const auto p = static_cast<std::size_t>(part);
    return c.claimed[p].load(std::memory_order_relaxed) < c.num_pieces[p];
  };
  bool any = false;
  for (int part = 0; part < n; ++part) any = any || left(part);
  if (!any) return false;
  {
    const std::lock_guard lock(mutex_);
    if (aborted()) return false;
    ++c.active;
  }
  // The own part first, which needs the own buffers most and is nobody else's first choice. After that one
  // piece of somebody else's, or everything.
  std::int64_t done = 0;
  for (int k = 0; k < n && (k == 0 || all || done == 0); ++k) {
    const int part = (own_part + k) % n;
    const auto p = static_cast<std::size_t>(part);
    while (left(part) && !aborted()) {
      const std::int64_t piece = c.claimed[p].fetch_add(1, std::memory_order_relaxed);
      if (piece >= c.num_pieces[p]) break;
      c.movement->run(part, piece * c.piece_length,
                      std::min((piece + 1) * c.piece_length, c.movement->part_length(part)));
      ++done;
      if (k > 0 && !all) break;
    }
  }
  const std::lock_guard lock(mutex_);
  --c.active;
  c.unfinished_pieces -= done;
  if (done > 0 && c.unfinished_pieces == 0) {
    c.finished.store(true, std::memory_order_release);
    wake(group);
  }
  if (aborted()) wake_all();  // somebody may wait for us to let go
  return done > 0;
}

// ---- messages

std::shared_ptr<Message> ThreadJob::message(Channel& channel, std::uint64_t number) {
  if (channel.open.empty() || channel.open.back()->number < number) {
    channel.open.push_back(std::make_shared<Message>());
    channel.open.back()->number = number;
  }
  return channel.open[number - channel.open.front()->number];
}

void ThreadJob::check_message(std::unique_lock<std::mutex>& lock, Group& group, int rank, int from, int to,
                              const Message& m) {
  if (m.sent_dtype == m.expected_dtype && m.sent_count == m.expected_count) return;
  const int sender = group.ranks[static_cast<std::size_t>(from)],
            receiver = group.ranks[static_cast<std::size_t>(to)];
  fail_locked(
      lock, rank,
      fmt::format("{} message {} from rank {} to rank {}: rank {} sent {} {}, rank {} called recv of {} {}",
                  group.name, m.number, sender, receiver, sender, m.sent_count, dtype_name(m.sent_dtype),
                  receiver, m.expected_count, dtype_name(m.expected_dtype)));
}

// One copy when the receive is known already (straight into the receiver's tensor), otherwise two.
void ThreadJob::send(Group& group, int me, int to, const Tensor& x) {
  const int rank = group.ranks[static_cast<std::size_t>(me)];
  const auto bytes = x.bytes();
  forget_finished(state(rank));
  throw_if_aborted(rank);
  std::unique_lock lock(mutex_);
  Channel& channel = group.channels[{me, to}];
  const std::shared_ptr<Message> m = message(channel, channel.next_sent++);
  FlightRecorder& recorder = state(rank).recorder;
  recorder.finish(recorder.begin(
      group.name, m->number, {.verb = Verb::send, .dtype = x.dtype(), .root = to, .counts = {x.numel()}}));
  ThreadState& receiver = state(group.ranks[static_cast<std::size_t>(to)]);
  m->sent_dtype = x.dtype();
  m->sent_count = x.numel();
  if (m->expected) {
    check_message(lock, group, rank, me, to, *m);
    if (aborted()) fail_locked(lock, rank, abort_.why);
    m->sent = m->active = true;
    channel.open.pop_front();
    lock.unlock();
    if (x.numel() > 0) std::memcpy(m->destination, x.host_bytes(), static_cast<std::size_t>(bytes));
    lock.lock();
    m->active = false;
    m->delivered.store(true, std::memory_order_release);
    wake(receiver);
    return;
  }
  MessageBuffer buffer;
  const auto fits = std::find_if(channel.spare.begin(), channel.spare.end(),
                                 [&](const MessageBuffer& spare) { return spare.capacity >= bytes; });
  if (fits != channel.spare.end()) {
    buffer = std::move(*fits);
    channel.spare.erase(fits);
  }
  lock.unlock();
  if (!buffer.data)
    buffer = {std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes)), bytes};
  if (x.numel() > 0) std::memcpy(buffer.data.get(), x.host_bytes(), static_cast<std::size_t>(bytes));
  lock.lock();
  m->buffer = std::move(buffer);
  m->sent = true;
  if (!m->expected) return;
  // The receive came while we copied.
  check_message(lock, group, rank, me, to, *m);
  channel.open.pop_front();
  wake(receiver);
}

std::shared_ptr<Task> ThreadJob::receive(Group& group, int me, int from, const Tensor& x) {
  const int rank = group.ranks[static_cast<std::size_t>(me)];
  forget_finished(state(rank));
  throw_if_aborted(rank);
  std::unique_lock lock(mutex_);
  Channel& channel = group.channels[{from, me}];
  const std::shared_ptr<Message> m = message(channel, channel.next_expected++);
  FlightRecorder& recorder = state(rank).recorder;
  const FlightRecorder::Ticket ticket = recorder.begin(
      group.name, m->number, {.verb = Verb::recv, .dtype = x.dtype(), .root = from, .counts = {x.numel()}});
  m->expected = true;
  m->expected_dtype = x.dtype();
  m->expected_count = x.numel();
  m->destination = static_cast<std::byte*>(x.host_bytes());
  if (m->sent) {
    check_message(lock, group, rank, from, me, *m);
    channel.open.pop_front();
  } else if (const int sender = group.ranks[static_cast<std::size_t>(from)]; state(sender).left) {
    fail_locked(lock, rank,
                fmt::format("{} message {}: rank {} has finished, but rank {} waits for it", group.name,
                            m->number, sender, rank));
  }
  lock.unlock();
  auto task = std::make_shared<ReceiveTask>(*this, group, channel, m, from, me, x);
  if (task->advance(true)) {
    recorder.finish(ticket);
    return nullptr;
  }
  task->ticket = ticket;
  state(rank).tasks.push_back(task);
  return task;
}

}  // namespace echelon
