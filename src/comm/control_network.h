// The second network of a job of processes: a TCP connection between each two of them, and a thread in each
// that listens. MPI says nothing of a process that died, was stopped or waits; this does, and goes on doing
// so while the rank computes or MPI is stuck. What is said on it, and what follows: control_protocol.h.
//
// Every process tells the others every quarter of a second how its rank stands. A connection that ends before
// its goodbye is a process that died. Who is let in: control_door.h.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/control_protocol.h"

namespace echelon {

class ControlNetwork {
 public:
  // Called by the listening thread.
  struct Hooks {
    std::function<RankState()> state;  // of the own rank
    // Once: the job has failed.
    std::function<void(const Failure& failure)> on_failure;
    // Once, on the one rank that speaks for all: how each rank stood when it failed. Throws where it cannot
    // speak.
    std::function<void(const ControlProtocol::Report& report)> on_report;
    // Every quarter of a second.
    std::function<void()> on_tick;
  };

  // The clock of `time` is the one by which ranks are silent.
  ControlNetwork(int rank, int size, Hooks hooks, const Time& time);
  ~ControlNetwork();
  // Says goodbye to the others and ends the thread that calls the hooks; so do destructors, but what the
  // hooks use must be there until then. By the thread that made this.
  void stop();
  // Listens where the other ranks are, from their addresses and machines by rank, and returns what lets them
  // in: bring every rank's to connect(), and to nobody else. RunError when it cannot.
  std::string open(const std::vector<std::vector<std::string>>& addresses,
                   const std::vector<std::string>& nodes);
  // Nothing listens any more when it returns. RunError when a rank cannot be reached within `patience`.
  void connect(const std::vector<std::string>& invitations, const std::vector<std::string>& nodes,
               std::chrono::milliseconds patience);

  // Any thread. The first failure wins; every rank learns of it.
  void fail(const Failure& failure);
  // After a failure: the rank's thread has left what it was at, for a cause of its own or (empty) for the
  // failure.
  void come_back(const std::string& cause);
  bool failed() const;
  Failure failure() const;
  // Somebody has spoken for all.
  bool reported() const;
  // How a rank stood when it was last heard of, and how long ago anything was heard of it.
  RankState last_heard(int rank) const;
  double unheard_seconds(int rank) const;

  // After a failure: returns when reported().
  void wait_for_report();
  // The rank has done its part: returns when every other rank has. CommError where the job fails instead.
  void finish_together();
  // Whom finish_together() waits for.
  std::vector<int> unfinished() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
