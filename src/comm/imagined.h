// A job of which only one rank runs and the others are imagined: to find out what that rank holds, sends and
// calls.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/world.h"

namespace echelon {

// All_reduces that a group cannot divide evenly (split_range): its first `larger` ranks send more than the
// others.
struct UnevenSum {
  std::string group;  // the name under which it was joined
  int size = 0, larger = 0;
};

// Every verb finishes at once and moves nothing: buffers for data from other ranks keep their contents. Ranks
// and group sizes are the job's; arguments are checked as anywhere (CommError).
class ImaginedWorld final : public World {
 public:
  // RequestError unless `rank` is one of num_ranks.
  ImaginedWorld(int num_ranks, int rank, const Time& time = {});

  int num_ranks() const override { return num_ranks_; }
  std::unique_ptr<Communicator> join(int rank, const std::vector<int>& ranks,
                                     const std::string& name) override;
  // Runs the one rank, on the calling thread.
  void run(const std::function<void(int rank)>& body) override { body(rank_); }
  // No rank waits here.
  void abort(const std::string& why) override;
  bool failed() const override { return false; }
  std::chrono::milliseconds timeout() const override { return std::chrono::milliseconds::max(); }
  FlightRecorder& recorder(int rank) override;
  std::vector<RankState> states() override;
  const Time& time() const override { return time_; }

  // For all joined groups, each remainder once.
  std::vector<UnevenSum> uneven_sums() const;

 private:
  friend class ImaginedCommunicator;
  const int num_ranks_, rank_;
  std::vector<UnevenSum> groups_;               // as they were joined
  std::set<std::pair<std::size_t, int>> sums_;  // group and remainder
  const Time time_;
  FlightRecorder recorder_;
};

}  // namespace echelon
