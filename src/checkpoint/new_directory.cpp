#include "checkpoint/new_directory.h"

#include <system_error>

#include "base/atomic_file.h"
#include "base/error.h"

namespace echelon {

namespace fs = std::filesystem;

NewDirectory::NewDirectory(const std::string& directory)
    : directory_(directory), unfinished_(directory_ / ".unfinished") {
  const auto refuse_full = [&] { refuse("--out {}: is there already and not empty", directory); };
  std::error_code error;
  if (has_others()) refuse_full();
  // The target of a link is not ours, and must not be cleared.
  if (fs::is_symlink(unfinished_, error))
    refuse("--out {}: {} is a link; remove it, or name another directory", directory, unfinished_.string());
  made_ = !fs::exists(directory_, error);
  fs::create_directories(unfinished_, error);
  if (error) refuse("--out {}: cannot be made: {}", directory, error.message());
  lock_.emplace(unfinished_.string(), "--out");
  if (has_others()) {  // of one that ended before this one had the lock
    fs::remove_all(unfinished_, error);
    refuse_full();
  }
  for (const fs::path& left : files()) fs::remove_all(left, error);
}

NewDirectory::~NewDirectory() {
  std::error_code none;
  fs::remove_all(unfinished_, none);  // under the lock: then it may be another's
  lock_.reset();
  if (made_) fs::remove(directory_, none);  // if it is empty
}

std::string NewDirectory::path(const std::string& name) const { return (unfinished_ / name).string(); }

void NewDirectory::finish(const std::string& last) {
  for (const fs::path& file : files())
    if (file.filename() != last) place(file);
  sync_directory(directory_.string());  // so that it is not there without them after a power cut
  place(path(last));
  sync_directory(directory_.string());
}

bool NewDirectory::has_others() const {
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(directory_, none))
    if (entry.path() != unfinished_) return true;
  return false;
}

void NewDirectory::place(const fs::path& file) const {
  std::error_code error;
  fs::rename(file, directory_ / file.filename(), error);
  if (error) fail("--out {}: {}", (directory_ / file.filename()).string(), error.message());
}

std::vector<fs::path> NewDirectory::files() const {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(unfinished_))
    if (entry.path().filename() != ".lock") found.push_back(entry.path());
  return found;
}

}  // namespace echelon
