// Messages that ranks exchange in every step, outside training: each sends before the update and receives
// after it, so that nobody waits. All ranks receive the same, and so decide alike.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "comm/host_group.h"
#include "comm/rank.h"

namespace echelon {

class StepMeeting {
 public:
  struct Words {
    bool stop = false;  // the run is asked to end
    // The step of the pending checkpoint, once this rank's part is on disk.
    std::int64_t written = -1;
    double seconds = 0;  // that this rank worked on the previous step
    // The step for which this rank has its share of the fingerprint, and that share.
    std::int64_t fingerprinted = -1;
    std::uint64_t fingerprint = 0;
  };

  explicit StepMeeting(const Rank& rank);

  void say(const Words& words);
  // The last message of each rank, by rank; empty before the first. Each is returned once.
  std::vector<Words> hear();
  // The word of rank 0, for which the others wait; theirs is ignored.
  bool told_by_first(bool word);
  // Waits for every rank.
  void wait_for_all() { group_->barrier().wait(); }

 private:
  std::unique_ptr<Communicator> group_;
  std::optional<HostNumbers> said_;
};

}  // namespace echelon
