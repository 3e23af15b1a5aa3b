// Ranks as processes that a launcher (mpirun, srun) started, connected by MPI (message_passing.h). A separate
// network notices failures (control_network.h).
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
  // Collective over all processes; one per process. `timeout`: the longest that any wait may last, by the
  // clock of `time`. RequestError in a build without MPI.
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
  // For tests: the rank calls this in the middle of each large collective of a joined group of this name,
  // when another rank knows of its call but no data has left.
  void set_watch(const std::string& group, const std::function<void()>& on_half_sent);

  // For errors outside run(), while others may wait for this rank: tells every rank, and returns when some
  // rank has reported the reason. Errors thrown by run() are known already.
  void fail(const std::exception& error);

  int ranks_on_this_node() const;
  int rank_on_node(int rank) const;  // its index among the ranks of its node
  bool is_first_on_this_node() const;
  // Gathers every process's text, by rank: for agreement before the ranks run.
  std::vector<std::string> gather(const std::string& text);
  // By rank, the text of the first process on that rank's node.
  std::vector<std::string> gather_from_first_on_nodes(const std::string& text);

  struct State;

 private:
  std::unique_ptr<State> state_;
};

// A request that all processes of a job refuse together.
struct JointRefusal : RequestError {
  using RequestError::RequestError;
};

// Runs `prepare`, in every process of the job if there are `processes`. If it throws RequestError in any,
// every process throws that of the lowest rank, as JointRefusal.
void refuse_together(ProcessWorld* processes, const std::function<void()>& prepare);

// "2 nodes: a has ranks 0-3, b ranks 4-7"
std::string describe_nodes(const std::vector<std::string>& nodes);

}  // namespace echelon
