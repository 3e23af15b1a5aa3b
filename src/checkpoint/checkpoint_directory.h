// A directory of checkpoints in the hands of the one run that writes it.
//
//   DIR/step-00000100                  a checkpoint; has this name only when it is whole
//       .step-00000200.unfinished-JOB  what the run named JOB writes at the moment
//       .step-00000100.removed-JOB     what --keep has begun to remove
//       .step-00000100.damaged-JOB     what was found damaged later, and set aside by the run named JOB
//       .lock                          held by the run that writes (directory_lock.h)
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "checkpoint/directory_lock.h"

namespace echelon {

std::string step_name(std::int64_t step);
// `what`: unfinished, removed or damaged.
std::string hidden_name(std::int64_t step, const char* what, const std::string& job);

// Held by the process that leads a run, as long as the run may write.
class CheckpointDirectory {
 public:
  // Makes the directory where there is none, and locks it. RequestError where that cannot be, or another run
  // writes there.
  CheckpointDirectory(const std::string& path, const char* what);
  // A run that was refused leaves nothing behind: neither the directory nor its lock, if this made them.
  ~CheckpointDirectory();
  CheckpointDirectory(const CheckpointDirectory&) = delete;
  CheckpointDirectory& operator=(const CheckpointDirectory&) = delete;

  // The last checkpoint of which every byte is as it was written; RequestError where there is none. Those
  // after it are kept in mind.
  std::string find_last_whole(const Progress& progress);
  // The run begins: what earlier ones left unfinished is removed, and what was found damaged set aside.
  // Returns a sentence for each of those.
  std::vector<std::string> begin(const std::string& job);

  const std::string& warning() const { return lock_->warning(); }

 private:
  struct Damaged {
    std::string path, why;
  };
  std::string path_, what_;
  std::string made_;  // the first of the directories that had to be made
  std::optional<DirectoryLock> lock_;
  std::vector<Damaged> damaged_;
  bool began_ = false;
};

}  // namespace echelon
