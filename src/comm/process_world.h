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

class ProcessWorld final : public World {
 public:
  // Collective over all processes; one in a process. `timeout`: how long any wait may last, on the clock of
  // `time`. RequestError in a build without MPI.
  ProcessWorld(std::chrono::milliseconds timeout, FailureHooks hooks, const Time& time = {});
  ~ProcessWorld() override;

  int rank() const;
  int num_ranks() const override;
  const std::vector<std::string>& nodes() const;  // by rank
  bool failed() const override;
  std::chrono::milliseconds timeout() const override;

  std::unique_ptr<Communicator> join(int rank, const std::vector<int>& ranks,
                                     const std::string& name) override;
  void run(const std::function<void(int rank)>& body) override;
  void abort(const std::string& why) override;
  FlightRecorder& recorder(int rank) override;
  std::vector<RankState> states() override;
  const Time& time() const override;
  // For tests: called by the rank in the middle of each large collective of a group of this name that it has
  // joined, when another rank has heard that it was called and nothing of its data has left.
  void set_watch(const std::string& group, const std::function<void()>& on_half_sent);

  // For what goes wrong outside run(), where the others may wait for this rank: every rank learns of it, and
  // it returns when somebody has said why. What run() has thrown they know.
  void fail(const std::exception& error);

  int ranks_on_this_node() const;
  int rank_on_node(int rank) const;  // among those of its node
  bool is_first_on_this_node() const;
  // Every process's text, by rank: for what they must agree on before the ranks run.
  std::vector<std::string> gather(const std::string& text);
  // By rank, the text of the first process on its node.
  std::vector<std::string> gather_from_first_on_nodes(const std::string& text);

  struct State;

 private:
  std::unique_ptr<State> state_;
};

// What all processes of a job refuse alike.
struct JointRefusal : RequestError {
  using RequestError::RequestError;
};

// Runs `prepare`, in every process of the job where there are `processes`. Where it throws RequestError in
// one, every process throws that of the lowest rank as JointRefusal: what one refuses, all refuse.
void refuse_together(ProcessWorld* processes, const std::function<void()>& prepare);

// "2 nodes: a has ranks 0-3, b ranks 4-7"
std::string describe_nodes(const std::vector<std::string>& nodes);

}  // namespace echelon
