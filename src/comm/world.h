// The ranks of one job, whatever runs them: threads of this process (threads.h) or processes that MPI
// connects (process_world.h).
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

// Thrown on the ranks that only learn of a failure, so that run() can tell it from its cause.
struct EchoError : CommError {
  using CommError::CommError;
};

// What the program does when a job fails. Any may be empty.
struct FailureHooks {
  // Why, and how each rank stood then. Once in a job: processes have one that speaks for all. Where it
  // throws, another process speaks.
  std::function<void(const std::string& report)> report;
  // Lines for the flight record of a rank of this process: its last operations, and why it failed by itself.
  // Any thread, more than once.
  std::function<void(int rank, const std::string& json_lines)> record;
  // A rank's thread has not come back from where it was: the process must end without it.
  std::function<void()> last_resort;
};

// "WHY\n  rank 2 failed too: ...\n  rank 0 [node]: waits in ..., rank `origin` marked. `further`: what failed
// at the same time. `nodes` by rank, or empty.
std::string failure_report(const std::string& why, const std::vector<std::string>& further, int origin,
                           const std::vector<RankState>& states, const std::vector<std::string>& nodes);
// A line of the flight record of a rank that failed by itself.
std::string cause_line(int rank, const std::string& cause);

class World {
 public:
  virtual ~World() = default;
  virtual int num_ranks() const = 0;
  // A name that no other job has, the same on all ranks of this one.
  const std::string& job() const { return job_; }

  // The communicator of world rank `rank` in the group `ranks` (world ranks in group order; contains `rank`).
  // Every member calls this with the same group and the same name ("dp", "tp", ...), which appears in error
  // messages; ranks that share several groups join them in the same order.
  virtual std::unique_ptr<Communicator> join(int rank, const std::vector<int>& ranks,
                                             const std::string& name) = 0;

  // Runs body(rank) for each rank that lives in this process, and waits for them. When one throws, every
  // rank of the job is stopped; the exception of the rank that failed first is rethrown where that rank lives
  // (CommErrors that are only its echo are not), and a CommError that tells of it elsewhere.
  virtual void run(const std::function<void(int rank)>& body) = 0;

  // Makes every present and later wait throw CommError with this message. The first call wins.
  virtual void abort(const std::string& why) = 0;

  // Whether it has failed, or was aborted. Any thread may ask.
  virtual bool failed() const = 0;
  // How long any wait for another rank may last.
  virtual std::chrono::milliseconds timeout() const = 0;

  // The recorder of a rank that lives in this process.
  virtual FlightRecorder& recorder(int rank) = 0;
  // How each rank stands, by rank: those of other processes as they were last heard of. Any thread may ask.
  virtual std::vector<RankState> states() = 0;
  // The clock that its waits are measured by.
  virtual const Time& time() const = 0;

 protected:
  World();
  std::string job_;
};

// The ranks 0 to n - 1.
std::vector<int> everyone(int n);

// world.run(body).
void run_ranks(World& world, const std::function<void(int rank)>& body);

// RequestError unless `ranks` are distinct ranks of a job of `num_ranks`, one of them `rank`. Returns its
// place.
int place_in_group(int rank, const std::vector<int>& ranks, int num_ranks, const std::string& name);

}  // namespace echelon
