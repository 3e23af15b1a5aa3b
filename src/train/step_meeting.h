// What ranks tell each other in every step, beside the training: each speaks before the update and hears
// after it, so that nobody waits for it. All ranks hear the same, and so decide the same.
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
    bool stop = false;          // the run is asked to end
    std::int64_t written = -1;  // the step whose checkpoint is under way, once this rank's part is on disk
    double seconds = 0;         // that this rank worked on the step before
    std::int64_t fingerprinted = -1;  // the step whose weights' fingerprint this rank has its share of
    std::uint64_t fingerprint = 0;    // which is this
  };

  explicit StepMeeting(const Rank& rank);

  void say(const Words& words);
  // What each rank said last, by rank; empty before anybody spoke. Each is heard once.
  std::vector<Words> hear();
  // What rank 0 says now, for which the others wait; theirs is not heard.
  bool told_by_first(bool word);
  // Waits for every rank.
  void wait_for_all() { group_->barrier().wait(); }

 private:
  std::unique_ptr<Communicator> group_;
  std::optional<HostNumbers> said_;
};

}  // namespace echelon
