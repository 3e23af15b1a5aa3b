// Posting of collectives and messages, and the work that follows from it.
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "comm/thread_job.h"
#include "comm/whole_or_waited_for.h"

namespace echelon {

namespace {
// body() queues work on these streams, which runs after the events.
template <class Body>
std::vector<DeviceWork> queue_after(std::span<DeviceStream* const> streams,
                                    const std::vector<std::shared_ptr<DeviceEvent>>& events,
                                    const Body& body) {
  std::vector<DeviceWork> work;
  whole_or_waited_for(streams, [&] {
    for (const DeviceStream* stream : streams) {
      for (const auto& event : events)
        if (event) stream->wait_for(*event);
      work.push_back({.begin = stream->record()});
    }
    body();
    for (std::size_t i = 0; i < work.size(); ++i) work[i].end = streams[i]->record();
  });
  return work;
}
template <class Body>
std::vector<DeviceWork> queue_after(DeviceStream& stream,
                                    const std::vector<std::shared_ptr<DeviceEvent>>& events,
                                    const Body& body) {
  DeviceStream* const one = &stream;
  return queue_after(std::span(&one, 1), events, body);
}

void queue_copy(const DeviceStream& stream, std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (bytes > 0)
    stream.driver().copy({.to = to, .from = from, .row_bytes = static_cast<std::size_t>(bytes)},
                         stream.handle());
}

// How much a thread does between two checks of the abort flag, and takes over from a late rank at a time. A
// collective that is no larger than this in total is done by its last caller alone, which is faster than
// waking the others.
constexpr std::int64_t piece_bytes = 256 << 10;
}  // namespace

DeviceBuffer::DeviceBuffer(DeviceDriver& its_driver, int its_device, std::size_t bytes)
    : driver(its_driver), device(its_device), data(driver.allocate(device, bytes)) {
  if (data == nullptr) fail_out_of_memory(driver, device, bytes);
}

DeviceBuffer::~DeviceBuffer() {
  try {
    if (last_use) last_use->synchronize();
  } catch (const std::exception&) {  // the device is lost
  }
  last_use.reset();
  driver.free(device, data);
}

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
  std::span<const DeviceWork> on_devices() const override { return collective_->work; }
  DeviceStream& stream() const override { return in_.stream(); }

 private:
  ThreadJob& job_;
  std::shared_ptr<OpenCollective> collective_;
  int me_;
  Tensor in_, out_;  // kept alive
};

// A message in device memory: the sent tensor may be changed once the rank's stream runs after the copy. It
// may be freed at once, since its arena knows until when it is in use.
class SendTask final : public Task {
 public:
  SendTask(Group& group, DeviceStream& stream, std::vector<DeviceWork> work)
      : Task(group), stream_(stream), work_(std::move(work)) {}
  bool finished() const override { return true; }
  bool advance(bool) override { return false; }
  bool in_use() const override { return false; }
  std::string name() const override { return group().name + " message"; }
  std::vector<int> missing() const override { return {}; }
  std::span<const DeviceWork> on_devices() const override { return work_; }
  DeviceStream& stream() const override { return stream_; }

 private:
  DeviceStream& stream_;
  std::vector<DeviceWork> work_;
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
    if (!buffer) return false;
    if (buffer.on_device)
      take(*buffer.on_device);
    else if (x_.numel() > 0)
      std::memcpy(x_.host_bytes(), buffer.data.get(), static_cast<std::size_t>(x_.bytes()));
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
  std::span<const DeviceWork> on_devices() const override { return message_->work; }
  DeviceStream& stream() const override { return x_.stream(); }

 private:
  void take(DeviceBuffer& buffer) {
    DeviceStream& transfers = x_.transfers(group().name);
    message_->work = queue_after(transfers, {buffer.last_use, message_->destination_free},
                                 [&] { queue_copy(transfers, x_.address(), buffer.data, x_.bytes()); });
    buffer.last_use = message_->work[0].end;
  }
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
  bool last = false, do_all = false;
  const bool on_device = call.device == Device::cuda;
  std::shared_ptr<DeviceEvent> arrived = on_device ? in.stream().record() : nullptr;
  DeviceStream* const transfers = on_device ? &in.transfers(group.name) : nullptr;
  {
    std::unique_lock lock(mutex_);
    // Ranks that have called it may have left since, and their tensors and streams with them.
    if (aborted()) fail_locked(lock, rank, abort_.why);
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
    if (on_device) {
      collective->arrived.push_back(std::move(arrived));
      collective->transfers.resize(group.ranks.size());
      collective->transfers[index] = transfers;
    }
    const auto name = [&] { return fmt::format("{} collective {}", group.name, number); };
    if (!agreed) fail_locked(lock, rank, fmt::format("{}: {}", name(), list_calls(group, *collective)));
    if (any_left_)
      for (std::size_t i = 0; i < collective->calls.size(); ++i)
        if (!collective->calls[i] && state(group.ranks[i]).left)
          fail_locked(lock, rank,
                      fmt::format("{}: rank {} has finished, but {}", name(), group.ranks[i],
                                  list_calls(group, *collective)));
    if (++collective->num_called == group.size()) {
      last = true;
      make_ready(group, *collective);
      group.open.pop_front();  // every rank has called all earlier ones before this
      do_all = collective->movement->bytes() <= piece_bytes;
      if (on_device)
        ++collective->active;
      else if (!do_all)
        wake(group);
    }
  }
  if (on_device && last)
    queue_on_devices(group, *collective);
  else if (do_all)
    work(group, *collective, me, true);
  if (!on_device && collective->finished.load(std::memory_order_acquire)) {
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
  if (c.movement->device() == Device::cuda) return;  // queued as a whole, by this rank
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

// Reductions are kernels, which need leave to use another device's memory; copies are faster with it.
static void let_devices_reach_each_other(std::span<DeviceStream* const> leads, bool needed) {
  for (const DeviceStream* from : leads)
    for (const DeviceStream* to : leads)
      if (!from->driver().reach(from->device(), to->device()) && needed)
        fail("device {} cannot reach the memory of device {}, which a sum over their ranks needs",
             from->device(), to->device());
}

// Called by the last rank of a collective, which counts as active. Each device does the parts of its ranks,
// on the first one's stream.
void ThreadJob::queue_on_devices(Group& group, OpenCollective& c) {
  std::vector<DeviceStream*> leads, of_ranks;
  for (DeviceStream* transfers : c.transfers) {
    const auto there = std::find_if(leads.begin(), leads.end(), [&](const DeviceStream* lead) {
      return lead->device() == transfers->device();
    });
    of_ranks.push_back(there != leads.end() ? *there : leads.emplace_back(transfers));
  }
  const auto let_go = [&] {
    const std::lock_guard lock(mutex_);
    --c.active;
    c.arrived.clear();
    wake(group);
    if (aborted()) wake_all();
  };
  try {
    if (leads.size() > 1) let_devices_reach_each_other(leads, c.movement->reduces());
    c.work = queue_after(leads, c.arrived, [&] { c.movement->queue_on(of_ranks); });
  } catch (...) {
    let_go();
    throw;
  }
  c.finished.store(true, std::memory_order_release);
  let_go();
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
  // First this rank's own part, which needs its buffers most and is nobody else's first choice. Then one
  // piece of another rank's, or everything.
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
  if (m.sent_dtype == m.expected_dtype && m.sent_count == m.expected_count &&
      m.sent_device == m.expected_device)
    return;
  const int sender = group.ranks[static_cast<std::size_t>(from)],
            receiver = group.ranks[static_cast<std::size_t>(to)];
  fail_locked(
      lock, rank,
      fmt::format("{} message {} from rank {} to rank {}: rank {} sent {} {}, rank {} called recv of {} {}",
                  group.name, m.number, sender, receiver, sender, m.sent_count, dtype_name(m.sent_dtype),
                  receiver, m.expected_count, dtype_name(m.expected_dtype)));
}

// Once what is sent is ready, on the sender's stream of such transfers.
void ThreadJob::send_to_device(Message& m, const Tensor& x, DeviceStream& transfers,
                               std::shared_ptr<DeviceEvent> ready) {
  try {
    m.work = queue_after(transfers, {std::move(ready), m.destination_free},
                         [&] { queue_copy(transfers, m.destination, x.address(), x.bytes()); });
    x.in_use_until(m.work[0].end);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    m.active = false;
    wake_all();
    throw;
  }
}

std::vector<DeviceWork> ThreadJob::fill_on_device(MessageBuffer& buffer, const Tensor& x,
                                                  DeviceStream& transfers,
                                                  std::shared_ptr<DeviceEvent> ready) {
  const std::int64_t bytes = std::max<std::int64_t>(x.bytes(), 1);
  if (!buffer)
    buffer = {nullptr, bytes,
              std::make_unique<DeviceBuffer>(transfers.driver(), transfers.device(),
                                             static_cast<std::size_t>(bytes))};
  DeviceBuffer& held = *buffer.on_device;
  std::vector<DeviceWork> work = queue_after(transfers, {std::move(ready), held.last_use}, [&] {
    queue_copy(transfers, held.data, x.address(), x.bytes());
  });
  held.last_use = work[0].end;
  x.in_use_until(work[0].end);
  return work;
}

// One copy when the receive is known already (straight into the receiver's tensor), otherwise two.
std::shared_ptr<Task> ThreadJob::send(Group& group, int me, int to, const Tensor& x) {
  const int rank = group.ranks[static_cast<std::size_t>(me)];
  const auto bytes = x.bytes();
  forget_finished(state(rank));
  throw_if_aborted(rank);
  const bool on_device = x.device() == Device::cuda;
  DeviceStream* const transfers = on_device ? &x.transfers(group.name) : nullptr;
  const std::shared_ptr<DeviceEvent> ready = on_device ? x.stream().record() : nullptr;
  std::unique_lock lock(mutex_);
  Channel& channel = group.channels[{me, to}];
  const std::shared_ptr<Message> m = message(channel, channel.next_sent++);
  FlightRecorder& recorder = state(rank).recorder;
  const FlightRecorder::Ticket ticket = recorder.begin(
      group.name, m->number, {.verb = Verb::send, .dtype = x.dtype(), .root = to, .counts = {x.numel()}});
  recorder.finish(ticket);
  const auto under_way = [&](std::vector<DeviceWork> work) {
    auto task = std::make_shared<SendTask>(group, x.stream(), std::move(work));
    task->ticket = ticket;
    return task;
  };
  ThreadState& receiver = state(group.ranks[static_cast<std::size_t>(to)]);
  m->sent_dtype = x.dtype();
  m->sent_count = x.numel();
  m->sent_device = x.device();
  if (m->expected) {
    check_message(lock, group, rank, me, to, *m);
    if (aborted()) fail_locked(lock, rank, abort_.why);
    m->sent = m->active = true;
    channel.open.pop_front();
    lock.unlock();
    if (on_device)
      send_to_device(*m, x, *transfers, ready);
    else if (x.numel() > 0)
      std::memcpy(m->destination, x.host_bytes(), static_cast<std::size_t>(bytes));
    const std::shared_ptr<Task> task = on_device ? under_way(m->work) : nullptr;
    lock.lock();
    m->active = false;
    m->delivered.store(true, std::memory_order_release);
    wake(receiver);
    return task;
  }
  MessageBuffer buffer;
  const auto fits = std::find_if(channel.spare.begin(), channel.spare.end(), [&](const MessageBuffer& spare) {
    return spare.capacity >= bytes && (spare.on_device != nullptr) == on_device;
  });
  if (fits != channel.spare.end()) {
    buffer = std::move(*fits);
    channel.spare.erase(fits);
  }
  lock.unlock();
  std::shared_ptr<Task> task;
  if (on_device) {
    task = under_way(fill_on_device(buffer, x, *transfers, ready));
  } else {
    if (!buffer)
      buffer = {std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes)), bytes, nullptr};
    if (x.numel() > 0) std::memcpy(buffer.data.get(), x.host_bytes(), static_cast<std::size_t>(bytes));
  }
  lock.lock();
  m->buffer = std::move(buffer);
  m->sent = true;
  if (!m->expected) return task;
  // The receive came while we copied.
  check_message(lock, group, rank, me, to, *m);
  channel.open.pop_front();
  wake(receiver);
  return task;
}

std::shared_ptr<Task> ThreadJob::receive(Group& group, int me, int from, const Tensor& x) {
  const int rank = group.ranks[static_cast<std::size_t>(me)];
  forget_finished(state(rank));
  throw_if_aborted(rank);
  std::shared_ptr<DeviceEvent> unused = x.device() == Device::cuda ? x.stream().record() : nullptr;
  std::unique_lock lock(mutex_);
  Channel& channel = group.channels[{from, me}];
  const std::shared_ptr<Message> m = message(channel, channel.next_expected++);
  FlightRecorder& recorder = state(rank).recorder;
  const FlightRecorder::Ticket ticket = recorder.begin(
      group.name, m->number, {.verb = Verb::recv, .dtype = x.dtype(), .root = from, .counts = {x.numel()}});
  m->expected = true;
  m->expected_dtype = x.dtype();
  m->expected_count = x.numel();
  m->destination = x.address();
  m->expected_device = x.device();
  m->destination_free = std::move(unused);
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
  if (task->advance(true) && task->ordered()) {
    recorder.finish(ticket);
    return nullptr;
  }
  task->ticket = ticket;
  state(rank).tasks.push_back(task);
  return task;
}

}  // namespace echelon
