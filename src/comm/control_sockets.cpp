#include "comm/control_sockets.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdint>

#include "base/error.h"

namespace echelon {
namespace {

// False where it is no address.
bool read_address(const std::string& address, std::uint16_t port, sockaddr_in& out) {
  out = {};
  out.sin_family = AF_INET;
  out.sin_port = htons(port);
  return ::inet_pton(AF_INET, address.c_str(), &out.sin_addr) == 1;
}

std::string text_of(const sockaddr_in& address) {
  std::array<char, INET_ADDRSTRLEN> text{};
  ::inet_ntop(AF_INET, &address.sin_addr, text.data(), text.size());
  return text.data();
}

const sockaddr* general(const sockaddr_in& address) { return reinterpret_cast<const sockaddr*>(&address); }

sockaddr_in own_end(int socket) {
  sockaddr_in end{};
  socklen_t length = sizeof end;
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&end), &length);
  return end;
}

void add_once(std::vector<std::string>& all, const std::string& one) {
  if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
}

}  // namespace

void Descriptor::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

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

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return addresses;
  for (const ifaddrs* a = all; a != nullptr; a = a->ifa_next)
    if (a->ifa_addr != nullptr && a->ifa_addr->sa_family == AF_INET && (a->ifa_flags & IFF_UP) != 0 &&
        (a->ifa_flags & IFF_LOOPBACK) == 0)
      add_once(addresses, text_of(*reinterpret_cast<const sockaddr_in*>(a->ifa_addr)));
  ::freeifaddrs(all);
  return addresses;
}

// The way of a datagram socket is chosen when it is connected; nothing is sent.
std::string source_towards(const std::string& there) {
  sockaddr_in to{};
  if (!read_address(there, 9, to)) return "";
  const Descriptor fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd || ::connect(fd.get(), general(to), sizeof to) != 0) return "";
  return text_of(own_end(fd.get()));
}

std::vector<std::string> where_to_listen(
    int rank, const std::vector<std::vector<std::string>>& addresses, const std::vector<std::string>& nodes,
    const std::function<std::string(const std::string& there)>& towards) {
  std::vector<std::string> places, seen;
  const auto me = static_cast<std::size_t>(rank);
  for (std::size_t r = me + 1; r < nodes.size(); ++r) {
    if (std::find(seen.begin(), seen.end(), nodes[r]) != seen.end()) continue;
    seen.push_back(nodes[r]);
    if (nodes[r] == nodes[me]) {
      add_once(places, "127.0.0.1");
      continue;
    }
    bool any = false;
    for (const std::string& there : addresses[r]) {
      // An address that both machines have, as of a bridge for containers, leads from neither to the other.
      if (std::find(addresses[me].begin(), addresses[me].end(), there) != addresses[me].end()) continue;
      const std::string source = towards(there);
      if (source.empty() || is_loopback(source)) continue;
      any = true;
      add_once(places, source);
    }
    if (!any)
      fail("rank {} on {} finds no way to rank {} on {} (IPv4 addresses there: {})", rank, nodes[me], r,
           nodes[r], addresses[r].empty() ? "none" : fmt::format("{}", fmt::join(addresses[r], ", ")));
  }
  return places;
}

Descriptor listen_at(const std::string& address) {
  sockaddr_in at{};
  if (!read_address(address, 0, at)) {
    errno = EADDRNOTAVAIL;
    return Descriptor();
  }
  Descriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (fd && ::bind(fd.get(), general(at), sizeof at) == 0 && ::listen(fd.get(), SOMAXCONN) == 0) return fd;
  return Descriptor();
}

std::string name_of(int socket) {
  const sockaddr_in end = own_end(socket);
  return fmt::format("{}:{}", text_of(end), ntohs(end.sin_port));
}

Descriptor connect_to(const std::string& name, std::chrono::milliseconds patience) {
  const std::size_t colon = name.rfind(':');
  std::uint16_t port = 0;
  sockaddr_in to{};
  if (colon != std::string::npos) std::from_chars(name.data() + colon + 1, name.data() + name.size(), port);
  if (port == 0 || !read_address(name.substr(0, colon), port, to)) {
    errno = EADDRNOTAVAIL;
    return Descriptor();
  }
  Descriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return fd;
  set_timeouts(fd.get(), patience);
  if (::connect(fd.get(), general(to), sizeof to) != 0) return Descriptor();
  return fd;
}

}  // namespace echelon
