// The sockets of the control network.
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

// A socket, or another descriptor, that is closed with its owner.
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

// All bytes, or false: the other end is gone, or the time set is over.
bool send_all(int fd, const void* data, std::size_t bytes);
bool receive_all(int fd, void* data, std::size_t bytes);
// For every later call; small messages leave at once.
void set_timeouts(int fd, std::chrono::milliseconds time);

// The addresses at which other machines may reach this one.
std::vector<std::string> own_addresses();
// The own address that packets to `there` leave from; empty: there is no way to it.
std::string source_towards(const std::string& there);

// Where rank `rank` listens: on those of its addresses that lead to the higher ranks, which are the ones that
// call, and nowhere else; on loopback for those on its own node. `addresses` and `nodes` by rank. RunError
// where there is no way to a node.
std::vector<std::string> where_to_listen(
    int rank, const std::vector<std::vector<std::string>>& addresses, const std::vector<std::string>& nodes,
    const std::function<std::string(const std::string& there)>& towards = source_towards);

// Listens at this address on a port that the system picks, without blocking; none and errno where it cannot.
Descriptor listen_at(const std::string& address);
// "ADDRESS:PORT" of this end.
std::string name_of(int socket);
// None and errno where "ADDRESS:PORT" does not answer.
Descriptor connect_to(const std::string& name, std::chrono::milliseconds patience);

inline bool is_loopback(std::string_view name) { return name.starts_with("127."); }

}  // namespace echelon
