// A directory of checkpoints, locked by the one run that writes it.
//
//    DIR/step-00000100                  a checkpoint; has this name only once it is complete
//        .step-00000200.unfinished-JOB  what the run named JOB is writing
//        .step-00000100.removed-JOB     what --keep is removing
//        .step-00000100.damaged-JOB     found damaged later, and set aside by the run named JOB
//        .lock                          held by the run that writes (directory_lock.h)
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

// Held by the leading process of a run, as long as the run may write.
class CheckpointDirectory {
 public:
  // Creates the directory if needed, and locks it. RequestError if that fails, or another run writes there.
  CheckpointDirectory(const std::string& path, const char* what);
  // A refused run leaves nothing behind: removes the directory and its lock if this created them.
  ~CheckpointDirectory();
  CheckpointDirectory(const CheckpointDirectory&) = delete;
  CheckpointDirectory& operator=(const CheckpointDirectory&) = delete;

  // Makes what the other processes of the run named `job` look for (refuse_other_directory), until it begins.
  // RunError if it cannot be made.
  void show(const std::string& job);
  // The last checkpoint that is intact, byte for byte; RequestError if there is none. Remembers the damaged
  // ones after it.
  std::string find_last_whole(const Progress& progress);
  // Call when the run begins: removes what earlier runs left unfinished, and sets aside what was found
  // damaged. Returns a sentence for each.
  std::vector<std::string> begin(const std::string& job);

  const std::string& warning() const { return lock_->warning(); }

 private:
  struct Damaged {
    std::string path, why;
  };
  std::string path_, what_;
  std::string made_;   // the topmost directory that had to be created
  std::string shown_;  // by show()
  std::optional<DirectoryLock> lock_;
  std::vector<Damaged> damaged_;
  bool began_ = false;
};

// In another process of the run, after show() in the leading one: RequestError if what is at `path` here is
// not that directory, or cannot be written. On a host with a directory of its own, the parts of a checkpoint
// would never come together, which would be found out only when the first one is saved.
void refuse_other_directory(const std::string& path, const std::string& what, const std::string& job);

}  // namespace echelon
