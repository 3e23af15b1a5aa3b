// The sockets of the control network.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

#include "base/clock.h"

namespace echelon {

// All bytes, or false: the other end is gone, or the time set is over.
bool send_all(int fd, const void* data, std::size_t bytes);
bool receive_all(int fd, void* data, std::size_t bytes);
// For every later call; small messages leave at once.
void set_timeouts(int fd, std::chrono::milliseconds time);

// A socket that any address of this machine reaches; -1 and errno where there is none.
int listen_anywhere(int backlog);
// "PORT ADDRESS ...": where others reach it.
std::string reachable_at(int listener);
// Tries each address of a rank in turn until one answers, and says who calls; -1 when the time is over.
int connect_to(const std::string& address, bool same_node, int own_rank, Clock::time_point until);

}  // namespace echelon
