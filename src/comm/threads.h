// Ranks as threads of one process, with shared memory: no needless copies, and a fixed order of every sum.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "comm/world.h"

namespace echelon {

// One job of thread ranks. Outlives its communicators.
class ThreadWorld : public World {
 public:
  // `timeout`: the longest that a wait inside run() may last, by the clock of `time`. After that every rank
  // throws a CommError that says who is missing, in which verb, and who is at fault (diagnosis.h).
  ThreadWorld(int num_ranks, std::chrono::milliseconds timeout, FailureHooks hooks = {},
              const Time& time = {});
  ~ThreadWorld() override;
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  int num_ranks() const override;
  std::unique_ptr<Communicator> join(int rank, const std::vector<int>& ranks,
                                     const std::string& name) override;
  void run(const std::function<void(int rank)>& body) override;
  void abort(const std::string& why) override;
  bool failed() const override;
  std::chrono::milliseconds timeout() const override;
  FlightRecorder& recorder(int rank) override;
  std::vector<RankState> states() override;
  const Time& time() const override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echelon
