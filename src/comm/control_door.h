// How the ranks of a job let each other in to the control network, and nobody else. Every rank draws a secret
// for its own door, which MPI brings to the others with its addresses: the invitation. Who calls shows the
// first half of it with its rank, and the door answers with the second, so that each knows the other. Until
// then a caller is a stranger: strangers are read without waiting, and only so many are kept; of more the
// oldest goes.
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

  // Listens at these addresses for the ranks above `rank`. RunError when it cannot.
  ControlDoor(int rank, int num_ranks, const std::vector<std::string>& addresses);

  // Words apart: the secret, and where this listens.
  std::string invitation() const;
  // Returns when all ranks above have come in, `until` is over, or it is told to stop; and closes the door.
  void admit(Clock::time_point until, const std::stop_token& stop);
  // By rank; none of those that have not come in, nor of the ranks below.
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
  // False: it need not be kept, let in or not.
  bool hear(Stranger& stranger);
  bool is_all_in() const;

  int rank_;
  std::array<unsigned char, 2 * half> secret_{};
  std::vector<Descriptor> listeners_, admitted_;
  std::list<Stranger> strangers_;  // the oldest first
};

// By a rank: calls at the door that this invitation leads to until it is let in. None and errno when the time
// is over.
Descriptor knock(const std::string& invitation, int own_rank, bool same_node, Clock::time_point until);

}  // namespace echelon
