#include "checkpoint/held_checkpoint.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>
#include <utility>

#include "checkpoint/checkpoint.h"
#include "checkpoint/checkpoint_manifest.h"
#include "checkpoint/directory_lock.h"

namespace echelon {

HeldCheckpoint::HeldCheckpoint(const std::string& path, const std::string& field) {
  for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    path_ = find_checkpoint(path, field);
    const std::string manifest = (std::filesystem::path(path_) / manifest_name).string();
    fd_ = ::open(manifest.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd_ < 0 && errno == ENOENT) continue;
    if (fd_ < 0) return;  // reading it will say why
    const bool locked = ::flock(fd_, LOCK_SH | LOCK_NB) == 0;
    if (!locked && errno != EWOULDBLOCK) return;  // this file system locks nothing
    if (locked && is_still_at(fd_, manifest)) return;
    ::close(std::exchange(fd_, -1));  // it is being removed
  }
}

HeldCheckpoint::~HeldCheckpoint() {
  if (fd_ >= 0) ::close(fd_);
}

void remove_unless_held(const std::filesystem::path& checkpoint, const std::filesystem::path& removed) {
  // For writing, as NFS asks of who locks for himself alone.
  const int fd = ::open((checkpoint / manifest_name).c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  const bool held = fd >= 0 && ::flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  std::error_code error;
  if (!held) std::filesystem::rename(checkpoint, removed, error);
  if (fd >= 0) ::close(fd);  // NFS keeps files that are open
  if (!held && !error) std::filesystem::remove_all(removed, error);
}

}  // namespace echelon
