// The second network of a job of processes: a TCP connection between each pair, and a listening thread in
// each. MPI does not report that a process died, was stopped or waits; this network does, even while the rank
// computes or MPI is stuck. control_protocol.h defines what is sent and what follows from it.
//
// Every process reports the state of its rank to the others every quarter of a second. A connection that ends
// without a goodbye means that its process died. control_door.h decides who is admitted.
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
    // Once, when the job has failed.
    std::function<void(const Failure& failure)> on_failure;
    // Once, on the rank that speaks for all: how each rank stood at the failure. Throws if it cannot report.
    std::function<void(const ControlProtocol::Report& report)> on_report;
    // Every quarter of a second.
    std::function<void()> on_tick;
  };

  // The silence of ranks is measured by the clock of `time`.
  ControlNetwork(int rank, int size, Hooks hooks, const Time& time);
  ~ControlNetwork();
  // Says goodbye to the others and ends the thread that calls the hooks. The destructor does so too, but
  // whatever the hooks use must live until then. Called by the thread that constructed this.
  void stop();
  // Listens on addresses that the other ranks can reach, given everyone's addresses and machines by rank, and
  // returns this rank's invitation. Every rank's invitation goes to connect(), and to nobody else. RunError
  // if it cannot.
  std::string open(const std::vector<std::vector<std::string>>& addresses,
                   const std::vector<std::string>& nodes);
  // Connects all ranks; afterwards nothing listens any more. RunError if a rank cannot be reached within
  // `patience`.
  void connect(const std::vector<std::string>& invitations, const std::vector<std::string>& nodes,
               std::chrono::milliseconds patience);

  // Reports a failure to all ranks. Any thread; the first failure wins.
  void fail(const Failure& failure);
  // After a failure: the rank's thread has left its operation, for a cause of its own or (empty) because of
  // the failure.
  void come_back(const std::string& cause);
  bool failed() const;
  Failure failure() const;
  // Whether some rank has spoken for all.
  bool reported() const;
  // A rank's last known state, and for how long nothing has been heard of it.
  RankState last_heard(int rank) const;
  double unheard_seconds(int rank) const;

  // After a failure: returns when reported().
  void wait_for_report();
  // Called when the rank has done its part: returns when every other rank has too. CommError if the job fails
  // instead.
  void finish_together();
  // The ranks that finish_together() waits for.
  std::vector<int> unfinished() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
