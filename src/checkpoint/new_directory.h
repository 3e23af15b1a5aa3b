// The directory of --out. Files are written to `.unfinished` in it and then moved to their places together,
// so that an interrupted export leaves nothing that looks like a model, and the next export to this directory
// removes it.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/directory_lock.h"

namespace echelon {

class NewDirectory {
 public:
  // RequestError if the directory has anything else in it, or cannot be made.
  explicit NewDirectory(const std::string& directory);
  ~NewDirectory();
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;

  // Where to write a file.
  std::string path(const std::string& name) const;
  // Call when all is written, and synced. Without the file `last` the others do not form a model, so it is
  // moved last. RunError if one cannot be moved, or the directory not be synced.
  void finish(const std::string& last);

 private:
  bool has_others() const;
  void place(const std::filesystem::path& file) const;
  std::vector<std::filesystem::path> files() const;

  const std::filesystem::path directory_, unfinished_;
  bool made_ = false;
  std::optional<DirectoryLock> lock_;
};

}  // namespace echelon
