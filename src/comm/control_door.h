// How the ranks of a job admit each other to the control network, and nobody else. Every rank draws a secret
// for its own door; MPI brings it to the others with the rank's addresses, as the invitation. A caller shows
// the first half of the secret and its rank, and the door answers with the second half, so that each
// authenticates the other. Until then a caller is a stranger. Strangers are read without blocking, and only a
// limited number is kept; beyond it the oldest is dropped.
#pragma once

#include <array>
#include <chrono>
#include <list>
#include <stop_token>
#include <string>
#include <vector>

#include "comm/control_sockets.h"

namespace echelon {

class ControlDoor {
 public:
  static constexpr std::size_t most_strangers = 128;

  // Listens at these addresses for all ranks above `rank`. RunError if it cannot.
  ControlDoor(int rank, int num_ranks, const std::vector<std::string>& addresses);

  // The secret and the addresses where this listens, separated by spaces.
  std::string invitation() const;
  // Admits callers until all ranks above have come in, `until` has passed, or `stop` is requested; then
  // closes the door.
  void admit(Clock::time_point until, const std::stop_token& stop);
  // By rank; invalid for ranks that have not come in, and for those below.
  std::vector<Descriptor> take_admitted() { return std::move(admitted_); }
  std::vector<int> missing() const;

 private:
  static constexpr std::size_t half = 32;  // bytes of each half of the secret
  struct Greeting {
    std::array<char, 8> magic{};
    std::int32_t rank = -1;
    std::array<unsigned char, half> shown{};
  };
  struct Stranger {
    Descriptor socket;
    Clock::time_point until;
    std::array<char, sizeof(Greeting)> said{};
    std::size_t num_said = 0;
  };
  friend Descriptor knock(const std::string& invitation, int own_rank, bool same_node,
                          Clock::time_point until);

  void accept_from(const Descriptor& listener);
  // False if the stranger need not be kept, admitted or not.
  bool hear(Stranger& stranger);
  bool is_all_in() const;

  int rank_;
  std::array<unsigned char, 2 * half> secret_{};
  std::vector<Descriptor> listeners_, admitted_;
  std::list<Stranger> strangers_;  // the oldest first
};

// Called by a rank: tries the door of this invitation until it is admitted. Invalid, with errno set, if time
// runs out.
Descriptor knock(const std::string& invitation, int own_rank, bool same_node, Clock::time_point until);

}  // namespace echelon
