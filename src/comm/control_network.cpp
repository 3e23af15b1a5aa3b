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
#include <nlohmann/json.hpp>
#include <thread>

#include "base/error.h"
#include "comm/control_sockets.h"

namespace echelon {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;

constexpr auto beat = 250ms;
// What the rank that speaks grants the others to say how they stood.
constexpr auto last_words = 1000ms;

enum class Frame : std::uint8_t { state, failure, final_state, reported, done, goodbye };

std::string encode(const RankState& s) {
  return json{{"at", s.instruction},
              {"finished", s.last_finished},
              {"in", s.waits_in},
              {"for", s.waits_for},
              {"seconds", s.seconds}}
      .dump(-1, ' ', false, json::error_handler_t::replace);
}

RankState decode(int rank, const std::string& text) {
  RankState s;
  s.rank = rank;
  const json j = json::parse(text, nullptr, false);
  if (!j.is_object()) return s;
  s.instruction = j.value("at", "");
  s.last_finished = j.value("finished", "");
  s.waits_in = j.value("in", "");
  s.waits_for = j.value("for", std::vector<int>{});
  s.seconds = j.value("seconds", 0.0);
  return s;
}

}  // namespace

struct ControlNetwork::State {
  struct Peer {
    int fd = -1;
    std::string input;
    RankState heard;
    Clock::time_point heard_at = Clock::now();
    bool gone = false, said_goodbye = false, final_words = false;
    int rounds = 0;  // that the rank has finished
  };

  const int rank, size;
  const Hooks hooks;
  int listener = -1, waker = -1;
  mutable std::mutex mutex;  // of all below
  std::condition_variable changed;
  std::vector<Peer> peers;
  bool failed = false, handled = false, reported = false, spoke = false;
  Failure failure;
  int rounds = 0;  // that this rank has finished
  std::atomic<bool> failed_flag{false}, stopping{false};
  std::optional<Clock::time_point> speak_until;
  std::mutex send_mutex;
  std::thread thread;

  State(int its_rank, int its_size, Hooks its_hooks)
      : rank(its_rank),
        size(its_size),
        hooks(std::move(its_hooks)),
        peers(static_cast<std::size_t>(its_size)) {
    for (int r = 0; r < size; ++r) peers[static_cast<std::size_t>(r)].heard.rank = r;
  }

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
    for (const Peer& peer : peers)
      if (peer.fd >= 0) send_all(peer.fd, frame.data(), frame.size());
  }

  void fail(const Failure& first) {
    {
      const std::lock_guard lock(mutex);
      if (failed) return;
      failed = true;
      failure = first;
      changed.notify_all();
      failed_flag.store(true, std::memory_order_release);
    }
    wake();
  }

  // The lowest rank that is not at fault and not gone speaks. Under the mutex.
  bool speaks() const {
    for (int r = 0; r < size; ++r)
      if (r != failure.origin && !peers[static_cast<std::size_t>(r)].gone) return r == rank;
    return failure.origin == rank;  // all others are gone
  }

  bool all_have_spoken() const {
    for (int r = 0; r < size; ++r) {
      const Peer& peer = peers[static_cast<std::size_t>(r)];
      if (r != rank && !peer.gone && !peer.final_words) return false;
    }
    return true;
  }

  void handle_failure() {
    std::unique_lock lock(mutex);
    if (!failed || handled) return;
    handled = true;
    const Failure first = failure;
    speak_until = Clock::now() + last_words;
    lock.unlock();
    const RankState own = hooks.state();
    send(Frame::failure, json{{"origin", first.origin}, {"why", first.why}, {"refused", first.refused}}.dump(
                             -1, ' ', false, json::error_handler_t::replace));
    send(Frame::final_state, encode(own));
    lock.lock();
    peers[static_cast<std::size_t>(rank)].heard = own;
    peers[static_cast<std::size_t>(rank)].heard.rank = rank;
    lock.unlock();
    if (hooks.on_failure) hooks.on_failure(first);
  }

  void report_when_due() {
    std::unique_lock lock(mutex);
    if (!handled || reported || spoke) return;
    if (!all_have_spoken() && Clock::now() < *speak_until) return;
    if (!speaks()) {
      // Whoever should speak is given as long again; after that nobody will.
      if (Clock::now() > *speak_until + last_words) reported = true;
      changed.notify_all();
      return;
    }
    spoke = true;
    std::vector<RankState> states;
    for (int r = 0; r < size; ++r) {
      const Peer& peer = peers[static_cast<std::size_t>(r)];
      states.push_back(peer.heard);
      if (r != rank && !peer.final_words)
        states.back().silent_seconds = std::chrono::duration<double>(Clock::now() - peer.heard_at).count();
    }
    const Failure first = failure;
    lock.unlock();
    if (hooks.on_report) hooks.on_report(first, states);
    send(Frame::reported, "");
    lock.lock();
    reported = true;
    changed.notify_all();
  }

  void take(int from, Frame type, const std::string& text) {
    if (type == Frame::failure) {
      const json j = json::parse(text, nullptr, false);
      if (j.is_object()) fail({j.value("origin", -1), j.value("why", ""), j.value("refused", false)});
      return;
    }
    const std::lock_guard lock(mutex);
    Peer& peer = peers[static_cast<std::size_t>(from)];
    peer.heard_at = Clock::now();
    if (type == Frame::state || type == Frame::final_state) peer.heard = decode(from, text);
    if (type == Frame::final_state) peer.final_words = true;
    if (type == Frame::done) ++peer.rounds;
    if (type == Frame::goodbye) peer.said_goodbye = true;
    if (type == Frame::reported) reported = true;
    changed.notify_all();
  }

  void lose(int from) {
    {
      const std::lock_guard lock(mutex);
      Peer& peer = peers[static_cast<std::size_t>(from)];
      const std::lock_guard sending(send_mutex);
      ::close(std::exchange(peer.fd, -1));
      peer.gone = true;
      changed.notify_all();
      if (peer.said_goodbye) return;
    }
    fail({from, fmt::format("rank {} is gone: its process ended", from), false});
  }

  void read_from(int from) {
    Peer& peer = peers[static_cast<std::size_t>(from)];  // input and fd: of this thread
    std::array<char, 4096> room{};
    const ssize_t got = ::recv(peer.fd, room.data(), room.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (got <= 0) return lose(from);
    peer.input.append(room.data(), static_cast<std::size_t>(got));
    std::uint32_t length = 0;
    while (peer.input.size() >= sizeof length) {
      std::memcpy(&length, peer.input.data(), sizeof length);
      if (peer.input.size() < sizeof length + length) break;
      const auto type = static_cast<Frame>(peer.input[sizeof length]);
      const std::string text = peer.input.substr(sizeof length + 1, length - 1);
      peer.input.erase(0, sizeof length + length);
      take(from, type, text);
    }
  }

  void listen() {
    auto next_beat = Clock::now();
    while (!stopping.load(std::memory_order_acquire)) {
      std::vector<pollfd> fds{{waker, POLLIN, 0}};
      std::vector<int> ranks{-1};
      for (int r = 0; r < size; ++r)
        if (const int fd = peers[static_cast<std::size_t>(r)].fd; fd >= 0) {
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
      handle_failure();
      report_when_due();
      if (Clock::now() < next_beat) continue;
      next_beat = Clock::now() + beat;
      if (!failed_flag.load()) send(Frame::state, encode(hooks.state()));
      if (hooks.on_tick) hooks.on_tick();
    }
  }
};

ControlNetwork::ControlNetwork(int rank, int size, Hooks hooks)
    : state_(std::make_unique<State>(rank, size, std::move(hooks))) {
  State& s = *state_;
  s.waker = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  s.listener = listen_anywhere(size);
  if (s.waker < 0 || s.listener < 0)
    echelon::fail("rank {}: no socket for the control network: {}", rank, std::strerror(errno));
}

ControlNetwork::~ControlNetwork() {
  State& s = *state_;
  if (!failed()) s.send(Frame::goodbye, "");
  s.stopping.store(true, std::memory_order_release);
  s.wake();
  if (s.thread.joinable()) s.thread.join();
  for (const State::Peer& peer : s.peers)
    if (peer.fd >= 0) ::close(peer.fd);
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
    s.peers[r].fd = connect_to(addresses[r], nodes[r] == nodes[me], s.rank, until);
    if (s.peers[r].fd < 0)
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
    set_timeouts(fd, 2000ms);
    std::int32_t from = -1;
    if (!receive_all(fd, &from, sizeof from) || from <= s.rank || from >= s.size ||
        s.peers[static_cast<std::size_t>(from)].fd >= 0) {
      ::close(fd);  // a stranger
      continue;
    }
    s.peers[static_cast<std::size_t>(from)].fd = fd;
    --missing;
  }
  for (State::Peer& peer : s.peers) peer.heard_at = Clock::now();
  s.thread = std::thread([&s] { s.listen(); });
}

void ControlNetwork::fail(const Failure& failure) { state_->fail(failure); }
bool ControlNetwork::failed() const { return state_->failed_flag.load(std::memory_order_acquire); }

Failure ControlNetwork::failure() const {
  const std::lock_guard lock(state_->mutex);
  return state_->failure;
}

RankState ControlNetwork::last_heard(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return state_->peers[static_cast<std::size_t>(rank)].heard;
}

double ControlNetwork::seconds_since_heard(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return std::chrono::duration<double>(Clock::now() - state_->peers[static_cast<std::size_t>(rank)].heard_at)
      .count();
}

bool ControlNetwork::gone(int rank) const {
  const std::lock_guard lock(state_->mutex);
  return state_->peers[static_cast<std::size_t>(rank)].gone;
}

void ControlNetwork::wait_for_report(std::chrono::milliseconds patience) {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, patience, [&] { return state_->reported; });
}

void ControlNetwork::finish_together(std::chrono::milliseconds patience) {
  State& s = *state_;
  s.send(Frame::done, "");
  std::unique_lock lock(s.mutex);
  ++s.rounds;
  const auto missing = [&] {
    for (int r = 0; r < s.size; ++r)
      if (r != s.rank && s.peers[static_cast<std::size_t>(r)].rounds < s.rounds) return r;
    return -1;
  };
  const bool all = s.changed.wait_for(lock, patience, [&] { return s.failed || missing() < 0; });
  if (s.failed) throw CommError(s.failure.why);
  if (all) return;
  const int late = missing();
  const std::string why = fmt::format("rank {} has finished and waited {} ms for rank {} to finish too",
                                      s.rank, patience.count(), late);
  lock.unlock();
  s.fail({late, why, false});
  throw CommError(why);
}

}  // namespace echelon
