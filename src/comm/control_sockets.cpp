#include "comm/control_sockets.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <sstream>
#include <thread>
#include <vector>

namespace echelon {

using namespace std::chrono_literals;

bool send_all(int fd, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(fd, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
  return true;
}

bool receive_all(int fd, void* data, std::size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t got = ::recv(fd, at, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

void set_timeouts(int fd, std::chrono::milliseconds time) {
  const timeval t{.tv_sec = time.count() / 1000, .tv_usec = time.count() % 1000 * 1000};
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &t, sizeof t);
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t);
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

int listen_anywhere(int backlog) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_addr.s_addr = htonl(INADDR_ANY);
  if (fd >= 0 && ::bind(fd, reinterpret_cast<const sockaddr*>(&any), sizeof any) == 0 &&
      ::listen(fd, backlog) == 0)
    return fd;
  if (fd >= 0) ::close(fd);
  return -1;
}

std::string reachable_at(int listener) {
  sockaddr_in bound{};
  socklen_t length = sizeof bound;
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &length);
  std::string text = std::to_string(ntohs(bound.sin_port));
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return text;
  for (const ifaddrs* a = all; a != nullptr; a = a->ifa_next) {
    if (a->ifa_addr == nullptr || a->ifa_addr->sa_family != AF_INET || (a->ifa_flags & IFF_UP) == 0 ||
        (a->ifa_flags & IFF_LOOPBACK) != 0)
      continue;
    std::array<char, INET_ADDRSTRLEN> host{};
    ::inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(a->ifa_addr)->sin_addr, host.data(),
                host.size());
    text += fmt::format(" {}", host.data());
  }
  ::freeifaddrs(all);
  return text;
}

int connect_to(const std::string& address, bool same_node, int own_rank, Clock::time_point until) {
  std::istringstream in(address);
  int port = 0;
  in >> port;
  std::vector<std::string> hosts;
  if (same_node) hosts.emplace_back("127.0.0.1");
  for (std::string host; in >> host;) hosts.push_back(host);
  while (Clock::now() < until) {
    for (const std::string& host : hosts) {
      sockaddr_in to{};
      to.sin_family = AF_INET;
      to.sin_port = htons(static_cast<std::uint16_t>(port));
      ::inet_pton(AF_INET, host.c_str(), &to.sin_addr);
      const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      set_timeouts(fd, 2000ms);
      const std::int32_t me = own_rank;
      if (::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0 &&
          send_all(fd, &me, sizeof me))
        return fd;
      ::close(fd);
    }
    std::this_thread::sleep_for(10ms);
  }
  return -1;
}

}  // namespace echelon
