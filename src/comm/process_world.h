// Ranks as processes that a launcher (mpirun, srun) started, connected by MPI (message_passing.h); what fails
// is noticed by a network beside it (control_network.h).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/flight_recorder.h"
#include "comm/world.h"

namespace echelon {

// What the program does when a job of processes fails. Called by threads that are not the rank's.
struct FailureHooks {
  // On the one rank that speaks for all.
  std::function<void(const std::string& report)> report;
  // The rank's flight record, on every rank.
  std::function<void(int rank, const std::string& json_lines)> record;
  // The rank's thread has not come back: the process must end without it.
  std::function<void()> last_resort;
};

class ProcessWorld final : public World {
 public:
  // Collective over all processes; one in a process. `timeout`: how long any wait may last. RequestError in a
  // build without MPI.
  ProcessWorld(std::chrono::milliseconds timeout, FailureHooks hooks);
  ~ProcessWorld() override;

  int rank() const;
  int num_ranks() const override;
  const std::vector<std::string>& nodes() const;  // by rank
  bool failed() const;

  std::unique_ptr<Communicator> join(int rank, const std::vector<int>& ranks,
                                     const std::string& name) override;
  void run(const std::function<void(int rank)>& body) override;
  void abort(const std::string& why) override;
  FlightRecorder& recorder(int rank) override;

  // Every process's text, by rank: for what they must agree on before the ranks run.
  std::vector<std::string> gather(const std::string& text);

  struct State;

 private:
  std::unique_ptr<State> state_;
};

// "2 nodes: a has ranks 0-3, b ranks 4-7"
std::string describe_nodes(const std::vector<std::string>& nodes);

}  // namespace echelon
