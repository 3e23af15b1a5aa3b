#include "comm/control_network.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "comm/control_sockets.h"

namespace echelon {
namespace {

using namespace std::chrono_literals;
using Frame = ControlProtocol::Frame;

constexpr auto beat = 250ms;

}  // namespace

struct ControlNetwork::State {
  struct Line {
    int fd = -1;
    std::string input;
  };

  const int rank, size;
  const Hooks hooks;
  const Time time;
  int listener = -1, waker = -1;
  std::vector<Line> lines;   // of the listening thread, once it runs
  mutable std::mutex mutex;  // of the protocol
  std::condition_variable changed;
  ControlProtocol protocol;
  bool told = false;  // of the failure
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
    (void)!::write(waker, &one, sizeof one);
  }

  // To every rank that is there. Not under the mutex.
  void send(Frame type, const std::string& text) {
    const auto length = static_cast<std::uint32_t>(text.size() + 1);
    std::string frame(sizeof length, '\0');
    std::memcpy(frame.data(), &length, sizeof length);
    frame += static_cast<char>(type);
    frame += text;
    const std::lock_guard lock(send_mutex);
    for (const Line& to : lines)
      if (to.fd >= 0) send_all(to.fd, frame.data(), frame.size());
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
    if (std::exchange(told, true)) return;
    const RankState own = hooks.state();
    Failure failure;
    change([&](ControlProtocol& p) {
      p.say_last_words(own, time.now());
      failure = p.failure();
    });
    send(Frame::failure, ControlProtocol::encode(failure));
    send(Frame::last_words, ControlProtocol::encode(own));
    if (hooks.on_failure) hooks.on_failure(failure);
  }

  void report_when_due() {
    std::optional<ControlProtocol::Report> report;
    change([&](ControlProtocol& p) { report = p.report_when_due(time.now()); });
    if (!report) return;
    if (hooks.on_report) hooks.on_report(report->failure, report->states);
    send(Frame::report, ControlProtocol::encode(report->failure));
  }

  void lose(int from) {
    {
      const std::lock_guard sending(send_mutex);
      ::close(std::exchange(line(from).fd, -1));
    }
    change([&](ControlProtocol& p) { p.lose(from, time.now()); });
  }

  void read_from(int from) {
    Line& in = line(from);
    std::array<char, 4096> room{};
    const ssize_t got = ::recv(in.fd, room.data(), room.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (got <= 0) return lose(from);
    in.input.append(room.data(), static_cast<std::size_t>(got));
    std::uint32_t length = 0;
    while (in.input.size() >= sizeof length) {
      std::memcpy(&length, in.input.data(), sizeof length);
      if (in.input.size() < sizeof length + length) break;
      const auto type = static_cast<Frame>(in.input[sizeof length]);
      const std::string text = in.input.substr(sizeof length + 1, length - 1);
      in.input.erase(0, sizeof length + length);
      change([&](ControlProtocol& p) { p.take(from, type, text, time.now()); });
    }
  }

  void listen() {
    auto next_beat = Clock::now();
    while (!stopping.load(std::memory_order_acquire)) {
      std::vector<pollfd> fds{{waker, POLLIN, 0}};
      std::vector<int> ranks{-1};
      for (int r = 0; r < size; ++r)
        if (const int fd = line(r).fd; fd >= 0) {
          fds.push_back({fd, POLLIN, 0});
          ranks.push_back(r);
        }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(next_beat - Clock::now());
      int wait = static_cast<int>(std::max<std::int64_t>(left.count(), 0));
      if (failed_flag.load()) wait = std::min(wait, 20);
      ::poll(fds.data(), fds.size(), wait);
      std::uint64_t count = 0;
      if (fds[0].revents != 0) (void)!::read(waker, &count, sizeof count);
      for (std::size_t i = 1; i < fds.size(); ++i)
        if (fds[i].revents != 0) read_from(ranks[i]);
      if (failed_flag.load()) {
        tell_of_failure();
        report_when_due();
      }
      if (Clock::now() < next_beat) continue;
      next_beat = Clock::now() + beat;
      if (!failed_flag.load()) send(Frame::state, ControlProtocol::encode(hooks.state()));
      if (hooks.on_tick) hooks.on_tick();
    }
  }
};

ControlNetwork::ControlNetwork(int rank, int size, Hooks hooks, const Time& time)
    : state_(std::make_unique<State>(rank, size, std::move(hooks), time)) {
  State& s = *state_;
  s.waker = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  s.listener = listen_anywhere(size);
  if (s.waker < 0 || s.listener < 0)
    echelon::fail("rank {}: no socket for the control network: {}", rank, std::strerror(errno));
}

void ControlNetwork::stop() {
  State& s = *state_;
  if (s.stopping.load(std::memory_order_acquire)) return;
  if (!failed()) s.send(Frame::goodbye, "");
  s.stopping.store(true, std::memory_order_release);
  s.wake();
  if (s.thread.joinable()) s.thread.join();
}

ControlNetwork::~ControlNetwork() {
  stop();
  State& s = *state_;
  for (const State::Line& line : s.lines)
    if (line.fd >= 0) ::close(line.fd);
  ::close(s.listener);
  ::close(s.waker);
}

std::string ControlNetwork::address() const { return reachable_at(state_->listener); }

void ControlNetwork::connect(const std::vector<std::string>& addresses, const std::vector<std::string>& nodes,
                             std::chrono::milliseconds patience) {
  State& s = *state_;
  const auto until = Clock::now() + patience;
  const auto me = static_cast<std::size_t>(s.rank);
  for (std::size_t r = 0; r < me; ++r) {
    s.lines[r].fd = connect_to(addresses[r], nodes[r] == nodes[me], s.rank, until);
    if (s.lines[r].fd < 0)
      echelon::fail("rank {} cannot reach rank {} on {} ({}): {}", s.rank, r, nodes[r], addresses[r],
                    std::strerror(errno));
  }
  for (int missing = s.size - 1 - s.rank; missing > 0;) {
    pollfd waiting{s.listener, POLLIN, 0};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    if (left <= 0 || ::poll(&waiting, 1, static_cast<int>(left)) <= 0)
      echelon::fail("rank {}: {} ranks did not reach its control network in time", s.rank, missing);
    const int fd = ::accept4(s.listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    set_timeouts(fd, 10s);
    std::int32_t from = -1;
    if (!receive_all(fd, &from, sizeof from) || from <= s.rank || from >= s.size || s.line(from).fd >= 0) {
      ::close(fd);  // a stranger
      continue;
    }
    set_timeouts(fd, 2000ms);
    s.line(from).fd = fd;
    --missing;
  }
  s.protocol = ControlProtocol(s.rank, s.size, s.time.now());
  s.thread = std::thread([&s] { s.listen(); });
}

void ControlNetwork::fail(const Failure& failure) {
  State& s = *state_;
  s.change([&](ControlProtocol& p) { p.fail(failure, s.time.now()); });
  s.wake();
}

bool ControlNetwork::failed() const { return state_->failed_flag.load(std::memory_order_acquire); }

Failure ControlNetwork::failure() const {
  const std::lock_guard lock(state_->mutex);
  return state_->protocol.failure();
}

bool ControlNetwork::reported() const {
  const std::lock_guard lock(state_->mutex);
  return state_->protocol.reported();
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
  state_->changed.wait(lock, [&] { return state_->protocol.reported(); });
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
