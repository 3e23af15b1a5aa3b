#include "comm/control_network.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/start_thread.h"
#include "comm/control_door.h"
#include "comm/control_frames.h"
#include "comm/control_sockets.h"

namespace echelon {
namespace {

using namespace std::chrono_literals;
using Frame = ControlProtocol::Frame;

constexpr auto beat = 250ms;

}  // namespace

struct ControlNetwork::State {
  struct Line {
    Descriptor socket{};
    FrameReader input{};
    bool is_broken = false;  // it took a part of a frame; under the send mutex
  };

  const int rank, size;
  const Hooks hooks;
  const Time time;
  const Descriptor waker{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::optional<ControlDoor> door{};  // until all ranks are in
  std::vector<Line> lines;            // of the listening thread, once it runs
  mutable std::mutex mutex;           // of the protocol
  std::condition_variable changed;
  ControlProtocol protocol;
  bool speaks = false;           // for all, just now
  bool said_last_words = false;  // of the listening thread
  std::atomic<bool> failed_flag{false}, stopping{false};
  std::mutex send_mutex;
  std::thread thread;

  State(int its_rank, int its_size, Hooks its_hooks, const Time& its_time)
      : rank(its_rank),
        size(its_size),
        hooks(std::move(its_hooks)),
        time(its_time),
        lines(static_cast<std::size_t>(its_size)),
        protocol(its_rank, its_size, time.now()) {}

  Line& line(int r) { return lines[static_cast<std::size_t>(r)]; }

  void wake() const {
    const std::uint64_t one = 1;
    (void)!::write(waker.get(), &one, sizeof one);
  }

  // To every rank that is there. Not under the mutex.
  void send(Frame type, const std::string& text) {
    const std::string frame = encode_frame(type, text);
    const std::lock_guard lock(send_mutex);
    for (Line& to : lines)
      if (to.socket && !to.is_broken) to.is_broken = !send_all(to.socket.get(), frame.data(), frame.size());
  }

  // Does something to the protocol.
  template <class Act>
  void change(const Act& act) {
    const std::lock_guard lock(mutex);
    act(protocol);
    failed_flag.store(protocol.failed(), std::memory_order_release);
    changed.notify_all();
  }

  void tell_of_failure() {
    std::optional<Failure> failure;
    change([&](ControlProtocol& p) { failure = p.failure_to_tell(); });
    if (failure) send(Frame::failure, encode(*failure));
    if (std::exchange(said_last_words, true)) return;
    const RankState own = hooks.state();
    change([&](ControlProtocol& p) {
      p.say_last_words(own, time.now());
      failure = p.failure();
    });
    send(Frame::last_words, encode(own));
    if (hooks.on_failure) hooks.on_failure(*failure);
  }

  // False if nobody can have heard it, as on a full standard error: this process then ends, and another one
  // speaks.
  bool say(const ControlProtocol::Report& report) const {
    try {
      if (hooks.on_report) hooks.on_report(report);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  // The rank does not go on before what there is to say has been said, and the others know.
  void report_when_due() {
    std::optional<ControlProtocol::Report> report;
    change([&](ControlProtocol& p) {
      report = p.report_when_due(time.now());
      speaks = report.has_value();
    });
    if (!report) return;
    if (say(*report)) send(Frame::report, encode(report->failure));
    change([&](ControlProtocol&) { speaks = false; });
  }
  bool reported() const { return protocol.reported() && !speaks; }  // under the mutex

  void lose(int from, const std::string& why = "") {
    {
      const std::lock_guard sending(send_mutex);
      line(from).socket.reset();
    }
    change([&](ControlProtocol& p) { p.lose(from, time.now(), why); });
  }

  void read_from(int from) {
    Line& in = line(from);
    std::array<char, 4096> room{};
    const ssize_t got = ::recv(in.socket.get(), room.data(), room.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (got <= 0) return lose(from);
    in.input.add({room.data(), static_cast<std::size_t>(got)});
    while (const auto frame = in.input.next())
      change([&](ControlProtocol& p) { p.take(from, frame->first, frame->second, time.now()); });
    if (!in.input.refusal().empty()) lose(from, in.input.refusal());
  }

  void turn(Clock::time_point& next_beat) {
    std::vector<pollfd> fds{{waker.get(), POLLIN, 0}};
    std::vector<int> ranks{-1};
    for (int r = 0; r < size; ++r)
      if (const Descriptor& socket = line(r).socket) {
        fds.push_back({socket.get(), POLLIN, 0});
        ranks.push_back(r);
      }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(next_beat - Clock::now());
    int wait = static_cast<int>(std::max<std::int64_t>(left.count(), 0));
    if (failed_flag.load()) wait = std::min(wait, 20);
    ::poll(fds.data(), fds.size(), wait);
    std::uint64_t count = 0;
    if (fds[0].revents != 0) (void)!::read(waker.get(), &count, sizeof count);
    for (std::size_t i = 1; i < fds.size(); ++i)
      if (fds[i].revents != 0) read_from(ranks[i]);
    if (failed_flag.load()) {
      tell_of_failure();
      report_when_due();
    }
    if (Clock::now() < next_beat) return;
    next_beat = Clock::now() + beat;
    if (!failed_flag.load()) send(Frame::state, encode(hooks.state()));
    if (hooks.on_tick) hooks.on_tick();
  }

  // A thread that an exception leaves would end the process without a word.
  void listen() {
    auto next_beat = Clock::now();
    while (!stopping.load(std::memory_order_acquire)) {
      try {
        turn(next_beat);
      } catch (const std::exception& error) {
        change([&](ControlProtocol& p) {
          p.fail({.origin = rank,
                  .why = fmt::format("rank {}: its control network failed: {}", rank, error.what())},
                 time.now());
        });
      }
    }
  }
};

ControlNetwork::ControlNetwork(int rank, int size, Hooks hooks, const Time& time)
    : state_(std::make_unique<State>(rank, size, std::move(hooks), time)) {
  if (!state_->waker)
    echelon::fail("rank {}: no descriptor for the control network: {}", rank, std::strerror(errno));
}

void ControlNetwork::stop() {
  State& s = *state_;
  if (s.stopping.load(std::memory_order_acquire)) return;
  if (!failed()) s.send(Frame::goodbye, "");
  s.stopping.store(true, std::memory_order_release);
  s.wake();
  if (s.thread.joinable()) s.thread.join();
}

ControlNetwork::~ControlNetwork() { stop(); }

std::string ControlNetwork::open(const std::vector<std::vector<std::string>>& addresses,
                                 const std::vector<std::string>& nodes) {
  State& s = *state_;
  return s.door.emplace(s.rank, s.size, where_to_listen(s.rank, addresses, nodes)).invitation();
}

void ControlNetwork::connect(const std::vector<std::string>& invitations,
                             const std::vector<std::string>& nodes, std::chrono::milliseconds patience) {
  State& s = *state_;
  check(s.door.has_value(), "the control network is opened before it connects");
  const auto until = Clock::now() + patience;
  const auto me = static_cast<std::size_t>(s.rank);
  // Both at once: a rank that waits to be let in keeps nobody out.
  auto admits = start_thread<std::jthread>("control network",
                                           [&](const std::stop_token& stop) { s.door->admit(until, stop); });
  for (std::size_t r = 0; r < me; ++r) {
    s.lines[r].socket = knock(invitations[r], s.rank, nodes[r] == nodes[me], until);
    if (!s.lines[r].socket)
      echelon::fail("rank {} cannot reach rank {} on {}: {}", s.rank, r, nodes[r], std::strerror(errno));
  }
  admits.join();
  if (const std::vector<int> missing = s.door->missing(); !missing.empty())
    echelon::fail("rank {}: the control network of {} {} did not reach it in {} s", s.rank,
                  missing.size() == 1 ? "rank" : "ranks", fmt::join(missing, ", "), patience.count() / 1000);
  std::vector<Descriptor> admitted = s.door->take_admitted();
  for (std::size_t r = me + 1; r < admitted.size(); ++r) s.lines[r].socket = std::move(admitted[r]);
  s.door.reset();
  s.protocol = ControlProtocol(s.rank, s.size, s.time.now());
  s.thread = start_thread("control network", [&s] { s.listen(); });
}

void ControlNetwork::fail(const Failure& failure) {
  State& s = *state_;
  s.change([&](ControlProtocol& p) { p.fail(failure, s.time.now()); });
  s.wake();
}

void ControlNetwork::come_back(const std::string& cause) {
  State& s = *state_;
  s.change([&](ControlProtocol& p) { p.come_back(cause); });
  s.send(Frame::back, cause.substr(0, 4096));
  s.wake();
}

bool ControlNetwork::failed() const { return state_->failed_flag.load(std::memory_order_acquire); }

Failure ControlNetwork::failure() const {
  const std::lock_guard lock(state_->mutex);
  return state_->protocol.failure();
}

bool ControlNetwork::reported() const {
  const std::lock_guard lock(state_->mutex);
  return state_->reported();
}

RankState ControlNetwork::last_heard(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return state_->protocol.last_heard(rank, state_->time.now());
}

double ControlNetwork::unheard_seconds(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return state_->protocol.unheard_seconds(rank, state_->time.now());
}

std::vector<int> ControlNetwork::unfinished() const {
  const std::lock_guard lock(state_->mutex);
  return state_->protocol.unfinished();
}

void ControlNetwork::wait_for_report() {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->reported(); });
}

void ControlNetwork::finish_together() {
  State& s = *state_;
  s.send(Frame::done, "");
  std::unique_lock lock(s.mutex);
  s.protocol.finish_round();
  s.changed.wait(lock, [&] { return s.protocol.failed() || s.protocol.unfinished().empty(); });
  if (s.protocol.failed()) throw CommError(s.protocol.failure().why);
}

}  // namespace echelon
