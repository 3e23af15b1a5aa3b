// Ranks as threads of one process: shared memory, no copies that are not needed, a fixed order of every sum.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace echelon {

// The shared state of one job of thread ranks. Outlives its communicators.
class ThreadWorld {
 public:
  // `timeout`: how long any wait may last before every rank throws CommError saying who is missing and in
  // which verb.
  ThreadWorld(int num_ranks, std::chrono::milliseconds timeout);
  virtual ~ThreadWorld();
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

  int num_ranks() const;

  // The communicator of world rank `rank` in the group `ranks` (world ranks in group order; contains `rank`).
  // Every member calls this with the same group and the same name ("dp", "tp", ...), which appears in error
  // messages.
  virtual std::unique_ptr<Communicator> join(int rank, const std::vector<int>& ranks,
                                             const std::string& name);

  // Makes every present and later wait throw CommError with this message. The first call wins.
  void abort(const std::string& why);

 private:
  friend void run_ranks(ThreadWorld& world, const std::function<void(int rank)>& body);
  struct State;
  std::unique_ptr<State> state_;
};

// Runs body(rank) on num_ranks threads and waits for all. When one throws, the others are aborted, and the
// exception of the rank that failed first is rethrown here (CommErrors that are only its echo are not).
void run_ranks(ThreadWorld& world, const std::function<void(int rank)>& body);

}  // namespace echelon
