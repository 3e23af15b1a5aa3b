// The ranks of one job, however they run: threads of this process (threads.h) or processes connected by MPI
// (process_world.h).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "comm/communicator.h"
#include "comm/flight_recorder.h"

namespace echelon {

// Thrown on ranks that only learn of a failure, so that run() can distinguish it from the cause.
struct EchoError : CommError {
  using CommError::CommError;
};

// What the program does when a job fails. Each hook may be empty.
struct FailureHooks {
  // Reports why, and the state of each rank then. Called once per job: one process speaks for all. If it
  // throws, another process speaks.
  std::function<void(const std::string& report)> report;
  // Receives lines for the flight record of a rank of this process: its last operations, and its own error.
  // Any thread, more than once.
  std::function<void(int rank, const std::string& json_lines)> record;
  // A rank's thread is stuck: the process must end without it.
  std::function<void()> last_resort;
};

// "WHY\n  rank 2 failed too: ...\n  rank 0 [node]: waits in ..., with rank `origin` marked. `further`:
// simultaneous failures. `nodes`: by rank, or empty.
std::string failure_report(const std::string& why, const std::vector<std::string>& further, int origin,
                           const std::vector<RankState>& states, const std::vector<std::string>& nodes);
// The flight record's line for a rank with an error of its own.
std::string cause_line(int rank, const std::string& cause);

class World {
 public:
  virtual ~World() = default;
  virtual int num_ranks() const = 0;
  // A unique name of the job, the same on all its ranks.
  const std::string& job() const { return job_; }

  // The communicator of world rank `rank` in the group `ranks` (world ranks in group order, `rank` included).
  // Every member calls this with the same group and the same name ("dp", "tp", ...), which appears in error
  // messages. Ranks that share several groups join them in the same order.
  virtual std::unique_ptr<Communicator> join(int rank, const std::vector<int>& ranks,
                                             const std::string& name) = 0;

  // Runs body(rank) for each rank in this process and waits for them. If one throws, all ranks of the job are
  // stopped. The exception of the rank that failed first is rethrown in its process (CommErrors that merely
  // follow from it are not); other processes throw a CommError that describes it.
  virtual void run(const std::function<void(int rank)>& body) = 0;

  // Makes all current and later waits throw CommError with this message. The first call wins.
  virtual void abort(const std::string& why) = 0;

  // Whether the job has failed or was aborted. Any thread may ask.
  virtual bool failed() const = 0;
  // The longest that a wait for another rank may last.
  virtual std::chrono::milliseconds timeout() const = 0;

  // The recorder of a rank in this process.
  virtual FlightRecorder& recorder(int rank) = 0;
  // The state of each rank, by rank; for ranks of other processes, as last heard. Any thread may ask.
  virtual std::vector<RankState> states() = 0;
  // The clock that measures waits.
  virtual const Time& time() const = 0;

 protected:
  World();
  std::string job_;
};

// The ranks 0 to n - 1.
std::vector<int> everyone(int n);

// world.run(body).
void run_ranks(World& world, const std::function<void(int rank)>& body);

// The index of `rank` in `ranks`. RequestError unless these are distinct ranks of a job of `num_ranks` and
// include `rank`.
int place_in_group(int rank, const std::vector<int>& ranks, int num_ranks, const std::string& name);

}  // namespace echelon
