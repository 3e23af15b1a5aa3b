#include "comm/device_groups.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/start_thread.h"
#include "comm/call.h"
#include "tensor/device_stream.h"

namespace echelon {

using namespace std::chrono_literals;

namespace {

// How often the library is asked for errors. Its error is often only a consequence of a rank that ended,
// about which the world then reports more: it has this long to do so.
constexpr std::chrono::milliseconds library_period = 5ms, library_grace = 2s;

struct LaunchedWork {
  std::string what;  // "dp collective 3 (all_reduce of 8 f32)"
  std::shared_ptr<DeviceEvent> arrived, done;
  std::optional<Clock::time_point> begun{};  // seen to wait for nothing but the other ranks
};

struct WatchedMember {
  WatchedMember(std::string its_name, std::vector<int> its_ranks)
      : name(std::move(its_name)), ranks(std::move(its_ranks)) {}
  const std::string name;
  const std::vector<int> ranks;
  std::mutex mutex;
  std::optional<DeviceCollectives::Member> member;  // from the first collective until it ends
  std::deque<LaunchedWork> launched;                // on one stream, so that they end in order
  std::optional<Clock::time_point> wrong_since;
};

}  // namespace

struct DeviceGroups::State {
  State(World& its_world, int its_rank, DeviceCollectives& its_library)
      : world(its_world), rank(its_rank), library(its_library) {}

  World& world;
  const int rank;
  DeviceCollectives& library;
  std::mutex mutex;
  std::condition_variable changed;
  std::list<std::shared_ptr<WatchedMember>> members;
  bool stopping = false;
  std::thread thread;

  // Under the member's lock.
  void abort(WatchedMember& watched) noexcept {
    if (watched.member) library.abort(*watched.member);
    watched.member.reset();
  }

  // What is wrong with a member that the world does not know of yet. Under its lock.
  std::string wrong_with(WatchedMember& watched) {
    const std::string error = library.error(*watched.member);
    const Clock::time_point now = world.time().now();
    if (!error.empty()) {
      if (!watched.wrong_since) watched.wrong_since = now;
      if (now < *watched.wrong_since + library_grace) return "";
      return fmt::format("{} [{}]: {} on rank {}: {}", watched.name, fmt::join(watched.ranks, ", "),
                         library.name(), rank, error);
    }
    while (!watched.launched.empty() && watched.launched.front().done->has_happened())
      watched.launched.pop_front();
    if (watched.launched.empty()) return "";
    LaunchedWork& first = watched.launched.front();
    if (!first.begun && first.arrived->has_happened()) first.begun = now;
    if (!first.begun || now < *first.begun + world.timeout()) return "";
    return fmt::format("{}: called by ranks {}, and not done on rank {} after {:.1f} s", first.what,
                       fmt::join(watched.ranks, ", "), rank,
                       std::chrono::duration<double>(now - *first.begun).count());
  }

  void look() {
    std::vector<std::shared_ptr<WatchedMember>> all;
    {
      const std::lock_guard lock(mutex);
      all.assign(members.begin(), members.end());
    }
    for (const auto& watched : all) {
      std::string wrong;
      {
        const std::lock_guard lock(watched->mutex);
        if (!watched->member) continue;
        if (world.failed()) {
          abort(*watched);
          continue;
        }
        try {
          wrong = wrong_with(*watched);
        } catch (const RunError&) {  // the device is lost, which the rank says itself
        }
      }
      if (!wrong.empty()) world.abort(wrong);
    }
  }

  void run() {
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, library_period, [&] { return stopping; })) {
      lock.unlock();
      look();
      lock.lock();
    }
  }
};

namespace {

using Groups = DeviceGroups::State;

// Of all groups of a rank: what NCCL runs at once for two groups may each hold what the other needs to begin.
constexpr const char* one_stream = "library";

// Its work is queued: the rank's stream goes on after it from where it is waited for.
class QueuedCollective final : public Operation {
 public:
  QueuedCollective(DeviceWork work, Tensor in, Tensor out)
      : work_(std::move(work)), in_(std::move(in)), out_(std::move(out)) {}
  ~QueuedCollective() override {
    if (ordered_) return;
    in_.in_use_until(work_.end);
    out_.in_use_until(work_.end);
  }
  // What the device has still to do is no reason for the rank's stream to stand still.
  bool progress() override {
    if (!ordered_) ordered_ = work_.end->has_happened();
    return ordered_;
  }
  void wait() override {
    if (!std::exchange(ordered_, true)) in_.stream().wait_for(*work_.end);
  }
  DeviceWork on_device() const override { return work_; }

 private:
  DeviceWork work_;
  Tensor in_, out_;
  bool ordered_ = false;  // what the rank's stream runs next, it runs after it
};

// A call as numbers, as many for all verbs.
std::vector<std::int64_t> numbers_of(const Call& call, std::size_t ranks) {
  std::vector<std::int64_t> numbers{static_cast<std::int64_t>(call.verb),
                                    static_cast<std::int64_t>(call.op),
                                    static_cast<std::int64_t>(call.dtype),
                                    call.root,
                                    std::ssize(call.counts),
                                    std::ssize(call.recv_counts)};
  numbers.insert(numbers.end(), call.counts.begin(), call.counts.end());
  numbers.insert(numbers.end(), call.recv_counts.begin(), call.recv_counts.end());
  numbers.resize(6 + 2 * ranks);
  return numbers;
}

Call call_of(std::span<const std::int64_t> numbers) {
  Call call{.verb = static_cast<Verb>(numbers[0]),
            .op = static_cast<ReduceOp>(numbers[1]),
            .dtype = static_cast<DType>(numbers[2]),
            .root = static_cast<int>(numbers[3]),
            .device = Device::cuda};
  const auto counts = numbers.subspan(6, static_cast<std::size_t>(numbers[4]));
  const auto received = numbers.subspan(6 + counts.size(), static_cast<std::size_t>(numbers[5]));
  call.counts.assign(counts.begin(), counts.end());
  call.recv_counts.assign(received.begin(), received.end());
  return call;
}

class DeviceCommunicator final : public Communicator {
 public:
  DeviceCommunicator(std::shared_ptr<Groups> groups, std::unique_ptr<Communicator> inner,
                     std::shared_ptr<WatchedMember> watched)
      : groups_(std::move(groups)), inner_(std::move(inner)), watched_(std::move(watched)) {}
  ~DeviceCommunicator() override { leave(); }

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }

  Pending all_reduce(const Tensor& x, ReduceOp op) override {
    if (x.device() != Device::cuda) return inner_->all_reduce(x, op);
    return collective({.verb = Verb::all_reduce, .op = op, .counts = {x.numel()}}, x, x);
  }
  Pending all_gather(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    if (out.device() != Device::cuda) return inner_->all_gather(in, out, counts);
    return collective({.verb = Verb::all_gather, .counts = {counts.begin(), counts.end()}}, in, out);
  }
  Pending reduce_scatter(const Tensor& in, const Tensor& out, std::span<const std::int64_t> counts) override {
    if (in.device() != Device::cuda) return inner_->reduce_scatter(in, out, counts);
    return collective({.verb = Verb::reduce_scatter, .counts = {counts.begin(), counts.end()}}, in, out);
  }
  Pending all_to_all(const Tensor& in, std::span<const std::int64_t> send_counts, const Tensor& out,
                     std::span<const std::int64_t> recv_counts) override {
    if (in.device() != Device::cuda) return inner_->all_to_all(in, send_counts, out, recv_counts);
    return collective({.verb = Verb::all_to_all,
                       .counts = {send_counts.begin(), send_counts.end()},
                       .recv_counts = {recv_counts.begin(), recv_counts.end()}},
                      in, out);
  }
  Pending broadcast(const Tensor& x, int root) override {
    if (x.device() != Device::cuda) return inner_->broadcast(x, root);
    return collective({.verb = Verb::broadcast, .root = root, .counts = {x.numel()}}, x, x);
  }
  Pending send(const Tensor& x, int to) override { return inner_->send(x, to); }
  Pending recv(const Tensor& x, int from) override { return inner_->recv(x, from); }
  Pending barrier() override { return inner_->barrier(); }

 private:
  Pending collective(Call call, const Tensor& in, const Tensor& out) {
    call.dtype = in.dtype();
    call.device = Device::cuda;
    check_arguments(call, *this, in, out);
    call.in = in.address();
    call.out = out.address();
    const std::string name = fmt::format("{} collective {}", watched_->name, next_++);
    agree_with_all(call, name);
    const std::lock_guard lock(watched_->mutex);
    if (!joined_) join(in.stream().device());
    if (!watched_->member) throw_failed();
    auto arrived = in.stream().record();
    DeviceStream& stream = in.transfers(one_stream);
    DeviceWork work;
    try {
      stream.wait_for(*arrived);
      work.begin = stream.record();
      queue_together(call, stream.handle());
      work.end = stream.record();
    } catch (...) {  // on memory that may be given back next
      groups_->abort(*watched_);
      try {
        stream.synchronize();
      } catch (const RunError&) {  // the device is lost
      }
      throw;
    }
    watched_->launched.push_back(
        {fmt::format("{} ({})", name, describe(call)), std::move(arrived), work.end});
    return Pending(std::make_shared<QueuedCollective>(std::move(work), in, out));
  }

  // The world says why.
  [[noreturn]] void throw_failed() {
    inner_->barrier().wait();
    throw EchoError(fmt::format("{}: the job failed", watched_->name));
  }

  void queue_together(const Call& call, StreamHandle stream) {
    groups_->library.begin_together();
    try {
      queue(call, stream);
    } catch (...) {
      try {
        groups_->library.end_together(*watched_->member);
      } catch (const RunError&) {  // as the first
      }
      throw;
    }
    groups_->library.end_together(*watched_->member);
  }

  // Throws on all ranks where two of them were called for different things.
  void agree_with_all(const Call& call, const std::string& name) {
    const auto n = static_cast<std::size_t>(size());
    const std::vector<std::int64_t> own = numbers_of(call, n);
    std::vector<std::int64_t> all(own.size() * n);
    const auto bytes = static_cast<std::int64_t>(own.size() * sizeof(std::int64_t));
    const auto view = [](const std::int64_t* numbers, std::int64_t count) {
      return Tensor::view_of(const_cast<std::int64_t*>(numbers), DType::u8, {count});
    };
    inner_
        ->all_gather(view(own.data(), bytes), view(all.data(), bytes * size()),
                     std::vector<std::int64_t>(n, bytes))
        .wait();
    std::vector<Call> calls;
    for (std::size_t r = 0; r < n; ++r)
      calls.push_back(call_of(std::span(all).subspan(r * own.size(), own.size())));
    bool agreed = true;
    for (std::size_t a = 0; a < n; ++a)
      for (std::size_t b = 0; b < a; ++b)
        agreed = agreed && agree(calls[a], static_cast<int>(a), calls[b], static_cast<int>(b));
    if (agreed) return;
    std::vector<std::string> called;
    for (std::size_t r = 0; r < n; ++r)
      called.push_back(fmt::format("rank {} called {}", watched_->ranks[r], describe(calls[r])));
    throw CommError(fmt::format("{}: {}", name, fmt::join(called, ", ")));
  }

  void join(int device) {
    DeviceCollectives::Id id{};
    if (rank() == 0) id = groups_->library.make_id();
    inner_->broadcast(Tensor::view_of(id.data(), DType::u8, {std::ssize(id)}), 0).wait();
    const auto given_up = [groups = groups_.get()] { return groups->world.failed(); };
    try {
      watched_->member = groups_->library.join(id, device, rank(), size(), given_up);
    } catch (const RunError&) {
      if (given_up()) throw_failed();
      throw;
    }
    joined_ = true;
  }

  // Sums and parts of uneven counts are as many pieces, to or from one rank each, of one piece of work.
  void queue(const Call& call, StreamHandle stream) {
    DeviceCollectives& library = groups_->library;
    const DeviceCollectives::Member member = *watched_->member;
    const std::int64_t width = element_bytes(call.dtype);
    const auto me = static_cast<std::size_t>(rank());
    const bool even =
        std::all_of(call.counts.begin(), call.counts.end(), [&](auto c) { return c == call.counts[0]; });
    std::int64_t at = 0;
    switch (call.verb) {
      case Verb::all_reduce:
        if (call.counts[0] > 0)
          library.all_reduce(call.in, call.out, call.counts[0], call.dtype, call.op, member, stream);
        return;
      case Verb::broadcast:
        if (call.counts[0] > 0)
          library.broadcast(call.in, call.out, call.counts[0], call.dtype, call.root, member, stream);
        return;
      case Verb::all_gather:
        if (even && call.counts[0] > 0)
          return library.all_gather(call.in, call.out, call.counts[0], call.dtype, member, stream);
        for (int root = 0; root < size(); ++root) {
          const std::int64_t count = call.counts[static_cast<std::size_t>(root)];
          std::byte* const there = call.out + at * width;
          if (count > 0)
            library.broadcast(root == rank() ? call.in : there, there, count, call.dtype, root, member,
                              stream);
          at += count;
        }
        return;
      case Verb::reduce_scatter:
        if (even && call.counts[0] > 0)
          return library.reduce_scatter(call.in, call.out, call.counts[0], call.dtype, member, stream);
        for (int root = 0; root < size(); ++root) {
          const std::int64_t count = call.counts[static_cast<std::size_t>(root)];
          if (count > 0)
            library.reduce(call.in + at * width, root == rank() ? call.out : nullptr, count, call.dtype, root,
                           member, stream);
          at += count;
        }
        return;
      case Verb::all_to_all: {
        std::int64_t to_at = 0, from_at = 0;
        for (std::size_t peer = 0; peer < call.counts.size(); ++peer) {
          const std::int64_t sent = call.counts[peer], received = call.recv_counts[peer];
          if (sent > 0)
            library.send(call.in + to_at * width, sent, call.dtype, static_cast<int>(peer), member, stream);
          if (received > 0)
            library.receive(call.out + from_at * width, received, call.dtype, static_cast<int>(peer), member,
                            stream);
          to_at += sent;
          from_at += received;
        }
        return;
      }
      default:
        check(me < call.counts.size(), "messages and barriers are the world's");
    }
  }

  // Where nobody fails, every rank has queued what this one has: it ends.
  void leave() noexcept {
    const bool failed = groups_->world.failed() || std::uncaught_exceptions() > 0;
    std::shared_ptr<DeviceEvent> last;
    {
      const std::lock_guard lock(watched_->mutex);
      if (!failed && !watched_->launched.empty()) last = watched_->launched.back().done;
    }
    try {
      if (last) last->synchronize();
    } catch (const std::exception&) {  // the device is lost
    }
    {
      const std::lock_guard lock(groups_->mutex);
      groups_->members.remove(watched_);
    }
    const std::lock_guard lock(watched_->mutex);
    watched_->launched.clear();
    if (!watched_->member) return;
    if (failed || groups_->world.failed()) return groups_->abort(*watched_);
    groups_->library.leave(*watched_->member);
    watched_->member.reset();
  }

  std::shared_ptr<Groups> groups_;
  std::unique_ptr<Communicator> inner_;
  std::shared_ptr<WatchedMember> watched_;
  std::uint64_t next_ = 1;
  bool joined_ = false;
};

}  // namespace

DeviceGroups::DeviceGroups(World& world, int rank, DeviceCollectives& library)
    : state_(std::make_shared<State>(world, rank, library)) {
  state_->thread =
      start_thread(fmt::format("the collectives of rank {}", rank), [state = state_.get()] { state->run(); });
}

DeviceGroups::~DeviceGroups() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_all();
  state_->thread.join();
}

std::unique_ptr<Communicator> DeviceGroups::join(std::unique_ptr<Communicator> inner, const std::string& name,
                                                 const std::vector<int>& ranks) {
  auto watched = std::make_shared<WatchedMember>(name, ranks);
  {
    const std::lock_guard lock(state_->mutex);
    state_->members.push_back(watched);
  }
  return std::make_unique<DeviceCommunicator>(state_, std::move(inner), std::move(watched));
}

}  // namespace echelon
