#include "comm/control_door.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <thread>

#include "base/error.h"

namespace echelon {
namespace {

using namespace std::chrono_literals;

constexpr std::array<char, 8> magic{'e', 'c', 'h', 'e', 'l', 'o', 'n', '1'};
// For a stranger to show the secret; for one try to reach a rank, and for its answer, which may be busy.
constexpr auto greeting_time = 5s, connect_time = 2s, answer_time = 10s;
// How many are let in from one listener before others are looked at.
constexpr int most_at_once = 64;

// Takes as long whichever byte differs.
bool is_same(const unsigned char* a, const unsigned char* b, std::size_t bytes) {
  volatile unsigned char different = 0;
  for (std::size_t i = 0; i < bytes; ++i) different = static_cast<unsigned char>(different | (a[i] ^ b[i]));
  return different == 0;
}

std::string as_hex(const unsigned char* data, std::size_t bytes) {
  std::string text;
  for (std::size_t i = 0; i < bytes; ++i) text += fmt::format("{:02x}", data[i]);
  return text;
}

bool read_hex(const std::string& text, unsigned char* data, std::size_t bytes) {
  if (text.size() != 2 * bytes || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    return false;
  for (std::size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  return true;
}

void set_blocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) & ~O_NONBLOCK); }

}  // namespace

ControlDoor::ControlDoor(int rank, int num_ranks, const std::vector<std::string>& addresses)
    : rank_(rank), admitted_(static_cast<std::size_t>(num_ranks)) {
  if (::getrandom(secret_.data(), secret_.size(), 0) != static_cast<ssize_t>(secret_.size()))
    fail("rank {}: no random bytes for the secret of the control network: {}", rank, std::strerror(errno));
  for (const std::string& address : addresses) {
    listeners_.push_back(listen_at(address));
    if (!listeners_.back())
      fail("rank {}: no socket for the control network at {}: {}", rank, address, std::strerror(errno));
  }
}

std::string ControlDoor::invitation() const {
  std::string text = as_hex(secret_.data(), secret_.size());
  for (const Descriptor& listener : listeners_) text += " " + name_of(listener.get());
  return text;
}

std::vector<int> ControlDoor::missing() const {
  std::vector<int> ranks;
  for (std::size_t r = static_cast<std::size_t>(rank_) + 1; r < admitted_.size(); ++r)
    if (!admitted_[r]) ranks.push_back(static_cast<int>(r));
  return ranks;
}

bool ControlDoor::is_all_in() const {
  return std::all_of(admitted_.begin() + rank_ + 1, admitted_.end(),
                     [](const Descriptor& d) { return bool(d); });
}

bool ControlDoor::hear(Stranger& stranger) {
  const ssize_t got = ::recv(stranger.socket.get(), stranger.said.data() + stranger.num_said,
                             stranger.said.size() - stranger.num_said, MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  if (got == 0) return false;
  stranger.num_said += static_cast<std::size_t>(got);
  if (stranger.num_said < stranger.said.size()) return true;
  Greeting greeting;
  std::memcpy(&greeting, stranger.said.data(), sizeof greeting);
  const bool knows = is_same(greeting.shown.data(), secret_.data(), half);
  const auto from = static_cast<std::size_t>(greeting.rank);
  if (!knows || greeting.magic != magic || greeting.rank <= rank_ || from >= admitted_.size()) return false;
  const int fd = stranger.socket.get();
  set_blocking(fd);
  set_timeouts(fd, connect_time);
  // One that calls again has given up its first call.
  if (send_all(fd, secret_.data() + half, half)) admitted_[from] = std::move(stranger.socket);
  return false;
}

void ControlDoor::accept_from(const Descriptor& listener) {
  for (int i = 0; i < most_at_once; ++i) {
    Descriptor socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket && (errno == EMFILE || errno == ENFILE) && !strangers_.empty()) {
      strangers_.pop_front();
      continue;
    }
    if (!socket) return;
    strangers_.push_back({std::move(socket), Clock::now() + greeting_time, {}, 0});
    // A rank's greeting comes with its call: it is let in before later strangers could push it out.
    if (!hear(strangers_.back())) strangers_.pop_back();
    if (strangers_.size() > most_strangers) strangers_.pop_front();
  }
}

void ControlDoor::admit(Clock::time_point until, const std::stop_token& stop) {
  while (!is_all_in() && !stop.stop_requested() && Clock::now() < until) {
    std::vector<pollfd> fds;
    for (const Descriptor& listener : listeners_) fds.push_back({listener.get(), POLLIN, 0});
    for (const Stranger& stranger : strangers_) fds.push_back({stranger.socket.get(), POLLIN, 0});
    ::poll(fds.data(), fds.size(), 50);
    auto stranger = strangers_.begin();
    for (std::size_t i = listeners_.size(); i < fds.size(); ++i) {
      const bool stays = fds[i].revents == 0 ? Clock::now() < stranger->until : hear(*stranger);
      stranger = stays ? std::next(stranger) : strangers_.erase(stranger);
    }
    for (std::size_t i = 0; i < listeners_.size(); ++i)
      if (fds[i].revents != 0) accept_from(listeners_[i]);
  }
  listeners_.clear();
  strangers_.clear();
}

Descriptor knock(const std::string& invitation, int own_rank, bool same_node, Clock::time_point until) {
  constexpr std::size_t half = ControlDoor::half;
  std::istringstream in(invitation);
  std::string secret_text;
  in >> secret_text;
  std::vector<std::string> places;
  for (std::string place; in >> place;)
    if (same_node == is_loopback(place)) places.push_back(place);
  std::array<unsigned char, 2 * half> secret{};
  errno = EADDRNOTAVAIL;
  if (!read_hex(secret_text, secret.data(), secret.size()) || places.empty()) return Descriptor();
  ControlDoor::Greeting greeting{magic, own_rank, {}};
  std::copy_n(secret.begin(), half, greeting.shown.begin());
  while (Clock::now() < until) {
    for (const std::string& place : places) {
      Descriptor socket = connect_to(place, connect_time);
      if (!socket || !send_all(socket.get(), &greeting, sizeof greeting)) continue;
      set_timeouts(socket.get(), answer_time);
      std::array<unsigned char, half> answer{};
      if (!receive_all(socket.get(), answer.data(), half)) continue;
      if (!is_same(answer.data(), secret.data() + half, half)) {
        errno = EACCES;
        continue;
      }
      set_timeouts(socket.get(), connect_time);
      return socket;
    }
    std::this_thread::sleep_for(10ms);
  }
  return Descriptor();
}

}  // namespace echelon
