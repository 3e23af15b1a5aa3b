// The second network of a job of processes: a TCP connection between each two of them, and a thread in each
// that listens. MPI says nothing of a process that died, was stopped or waits; this does, and goes on doing
// so while the rank computes or MPI is stuck.
//
// Every process tells the others every quarter of a second how its rank stands. A connection that ends before
// its goodbye is a process that died.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/flight_recorder.h"

namespace echelon {

// Why a job ends.
struct Failure {
  int origin = -1;  // the rank at fault; -1: none, or not known
  std::string why;
  bool refused = false;  // the request is wrong, and nothing else
};

class ControlNetwork {
 public:
  using Clock = std::chrono::steady_clock;
  // Called by the listening thread.
  struct Hooks {
    std::function<RankState()> state;  // of the own rank
    // Once: the job has failed. `origin`: the rank at fault, or -1.
    std::function<void(const Failure& failure)> on_failure;
    // Once, on the one rank that speaks for all: how each rank stood when it failed.
    std::function<void(const Failure& failure, const std::vector<RankState>& states)> on_report;
    // Every quarter of a second.
    std::function<void()> on_tick;
  };

  // Where others reach this process; bring every rank's to connect().
  ControlNetwork(int rank, int size, Hooks hooks);
  ~ControlNetwork();
  std::string address() const;
  // `nodes`: the machine of each rank. RunError when one cannot be reached within `patience`.
  void connect(const std::vector<std::string>& addresses, const std::vector<std::string>& nodes,
               std::chrono::milliseconds patience);

  // Any thread. The first failure wins; every rank learns of it.
  void fail(const Failure& failure);
  bool failed() const;
  Failure failure() const;
  // How a rank stood when it was last heard of, and how long ago.
  RankState last_heard(int rank) const;
  double seconds_since_heard(int rank) const;
  bool gone(int rank) const;

  // After a failure: returns when the one that speaks has spoken, or after `patience`.
  void wait_for_report(std::chrono::milliseconds patience);
  // The rank has done its part: returns when every other rank has. CommError where one fails instead, or does
  // not in time.
  void finish_together(std::chrono::milliseconds patience);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
