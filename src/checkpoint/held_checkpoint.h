// A checkpoint that is read while a run writes beside it, whose --keep would remove it.
#pragma once

#include <filesystem>
#include <string>

namespace echelon {

// While this lives, remove_unless_held() leaves the checkpoint alone, also on other hosts of a shared file
// system that supports locks. Where it does not, CheckpointReader says what became of the checkpoint.
class HeldCheckpoint {
 public:
  // Of what find_checkpoint() finds, or of the next one where that is being removed. RequestError as there.
  explicit HeldCheckpoint(const std::string& path, const std::string& field = "--checkpoint");
  ~HeldCheckpoint();
  HeldCheckpoint(const HeldCheckpoint&) = delete;
  HeldCheckpoint& operator=(const HeldCheckpoint&) = delete;

  const std::string& path() const { return path_; }  // of the step

 private:
  std::string path_;
  int fd_ = -1;
};

// Removes a checkpoint, unless somebody holds it. It is renamed to `removed` first, so that one that is half
// removed is never taken for a complete one.
void remove_unless_held(const std::filesystem::path& checkpoint, const std::filesystem::path& removed);

}  // namespace echelon
