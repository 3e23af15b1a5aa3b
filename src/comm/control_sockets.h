// Sockets for the control network.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace echelon {

// Owns a file descriptor and closes it.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_;
};

// Transfer all bytes; false if the other end is gone or the timeout has passed.
bool send_all(int fd, const void* data, std::size_t bytes);
bool receive_all(int fd, void* data, std::size_t bytes);
// Sets the timeout of every later call, and sends small messages at once (TCP_NODELAY).
void set_timeouts(int fd, std::chrono::milliseconds time);

// The addresses at which other machines may reach this one.
std::vector<std::string> own_addresses();
// This machine's address from which packets to `there` leave; empty if there is no route.
std::string source_towards(const std::string& there);

// The addresses at which rank `rank` listens: only those that lead to higher ranks, which are the ones that
// call, and loopback for those on its own node. `addresses` and `nodes` are by rank. RunError if there is no
// route to a node.
std::vector<std::string> where_to_listen(
    int rank, const std::vector<std::vector<std::string>>& addresses, const std::vector<std::string>& nodes,
    const std::function<std::string(const std::string& there)>& towards = source_towards);

// Listens at this address without blocking, on a port that the system picks; invalid, with errno set, if it
// cannot.
Descriptor listen_at(const std::string& address);
// This end, as "ADDRESS:PORT".
std::string name_of(int socket);
// Connects to "ADDRESS:PORT"; invalid, with errno set, if that does not answer.
Descriptor connect_to(const std::string& name, std::chrono::milliseconds patience);

inline bool is_loopback(std::string_view name) { return name.starts_with("127."); }

}  // namespace echelon
