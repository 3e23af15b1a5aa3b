#include "checkpoint/checkpoint_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_compare.h"
#include "checkpoint/checkpoint_manifest.h"

namespace echelon {

namespace fs = std::filesystem;

std::string step_name(std::int64_t step) { return fmt::format("step-{:08}", step); }

std::string hidden_name(std::int64_t step, const char* what, const std::string& job) {
  return fmt::format(".{}.{}-{}", step_name(step), what, job);
}

// begin() removes it, also that of a run that died.
static fs::path shown_at(const std::string& path, const std::string& job) {
  return fs::path(path) / hidden_name(0, "unfinished", job);
}

CheckpointDirectory::CheckpointDirectory(const std::string& path, const char* what)
    : path_(path), what_(what) {
  const auto stop = [&](const std::string& why) { refuse("{} {}: cannot be written: {}", what, path, why); };
  std::error_code error;
  fs::path first;  // the topmost missing directory
  for (fs::path p = fs::absolute(path, error); !p.empty() && !fs::exists(p, error) && p != p.root_path();
       p = p.parent_path())
    first = p;
  fs::create_directories(path, error);
  if (error) stop(error.message());
  if (!fs::is_directory(path, error)) stop(std::strerror(ENOTDIR));
  made_ = first.string();
  if (::access(path.c_str(), W_OK | X_OK) != 0) stop(std::strerror(errno));
  lock_.emplace(path, what);
}

CheckpointDirectory::~CheckpointDirectory() {
  if (began_) return;
  if (!shown_.empty()) ::rmdir(shown_.c_str());
  lock_->leave_no_trace();
  lock_.reset();
  // From the innermost outwards, as long as they are empty.
  std::error_code error;
  for (fs::path p = fs::absolute(path_, error); !made_.empty() && p.string().size() >= made_.size();
       p = p.parent_path())
    if (::rmdir(p.c_str()) != 0) break;
}

void CheckpointDirectory::show(const std::string& job) {
  shown_ = shown_at(path_, job).string();
  if (::mkdir(shown_.c_str(), 0777) != 0) fail("{}: cannot be made: {}", shown_, std::strerror(errno));
}

// A network file system may remember for half a minute that a directory was not there, when this process
// first looked. Opening the one above it asks the server again.
static bool is_there_now(const fs::path& directory) {
  fs::path above;
  for (const fs::path& part : fs::absolute(directory)) {
    above /= part;
    const int fd = ::open(above.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) ::close(fd);
  }
  std::error_code error;
  return fs::is_directory(directory, error);
}

void refuse_other_directory(const std::string& path, const std::string& what, const std::string& job) {
  if (!is_there_now(shown_at(path, job)))
    refuse("{} {}: is not the directory that rank 0 sees; legal: one that all ranks share", what, path);
  if (::access(path.c_str(), W_OK | X_OK) != 0)
    refuse("{} {}: cannot be written: {}", what, path, std::strerror(errno));
}

std::string CheckpointDirectory::find_last_whole(const Progress& progress) {
  damaged_.clear();
  std::vector<std::string> paths = named_as_checkpoints(path_);
  for (; !paths.empty(); paths.pop_back()) {
    const std::string& path = paths.back();
    std::int64_t step = 0;
    try {
      step = read_manifest(path).info.step;
      check_checkpoint(path, progress);
    } catch (const ForeignFormat&) {
      throw;
    } catch (const Unreadable&) {  // it may be intact
      throw;
    } catch (const RequestError& error) {
      damaged_.push_back({path, error.what()});
      continue;
    }
    // The next ones would be taken for older, and --keep would remove them.
    if (step != checkpoint_step(path))
      refuse("{} {}: its {} holds step {}; rename or remove it", what_, path_,
             fs::path(path).filename().string(), step);
    return path;
  }
  if (damaged_.empty()) refuse_without_checkpoint(what_, path_);
  refuse("{} {}: none of its checkpoints is whole; of the last: {}", what_, path_, damaged_.front().why);
}

std::vector<std::string> CheckpointDirectory::begin(const std::string& job) {
  began_ = true;
  std::vector<fs::path> stale;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(path_, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(".step-") &&
        (name.find(".unfinished") != std::string::npos || name.find(".removed-") != std::string::npos))
      stale.push_back(entry.path());
  }
  for (const fs::path& path : stale) fs::remove_all(path, error);
  std::vector<std::string> said;
  for (const Damaged& d : damaged_) {
    const fs::path aside = fs::path(path_) / hidden_name(checkpoint_step(d.path).value(), "damaged", job);
    fs::rename(d.path, aside, error);
    if (error)
      fail("{}: damaged, and cannot be set aside as {}: {}", d.path, aside.string(), error.message());
    said.push_back(fmt::format("{}; it is set aside as {}", d.why, aside.filename().string()));
  }
  damaged_.clear();
  return said;
}

}  // namespace echelon
