#include "checkpoint/directory_lock.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "base/utf8.h"

namespace echelon {

bool is_still_at(int fd, const std::string& path) {
  struct stat here {
  }, there{};
  return ::fstat(fd, &here) == 0 && ::stat(path.c_str(), &there) == 0 && here.st_dev == there.st_dev &&
         here.st_ino == there.st_ino;
}

DirectoryLock::DirectoryLock(const std::string& directory, const char* what, const char* file)
    : directory_(directory), path_((std::filesystem::path(directory) / file).string()) {
  for (;;) {
    open_file(what);
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
      const int reason = errno;
      if (reason == EWOULDBLOCK) refuse_second(what);
      warning_ = fmt::format("{}: this file system locks nothing ({}): keep a second run out yourself",
                             directory, std::strerror(reason));
      return;
    }
    // A holder with leave_no_trace() removed the file, perhaps after it was opened here: tries again.
    if (is_still_at(fd_, path_)) break;
    ::close(std::exchange(fd_, -1));
  }
  write_record();
}

DirectoryLock::~DirectoryLock() {
  if (!keeps_file_ && !was_there_) ::unlink(path_.c_str());
  if (warning_.empty()) (void)!::ftruncate(fd_, 0);  // nobody holds it now
  ::close(fd_);
}

void DirectoryLock::open_file(const char* what) {
  constexpr int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  fd_ = ::open(path_.c_str(), flags);
  was_there_ = fd_ >= 0;
  if (fd_ < 0 && errno == ENOENT) fd_ = ::open(path_.c_str(), flags | O_CREAT, 0666);
  if (fd_ < 0) refuse("{} {}: cannot be written: {}: {}", what, directory_, path_, std::strerror(errno));
}

void DirectoryLock::refuse_second(const char* what) const {
  std::array<char, 512> record{};
  const ssize_t got = ::pread(fd_, record.data(), record.size(), 0);
  std::string holder(record.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
  holder = printable(holder);
  ::close(fd_);
  refuse("{} {}: {} writes there; wait for its end, or name another directory", what, directory_,
         holder.empty() ? "another run" : holder);
}

void DirectoryLock::write_record() const {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  const std::string record = fmt::format("process {} on {}, since {:%Y-%m-%d %H:%M:%S},", ::getpid(),
                                         host.data(), fmt::localtime(std::time(nullptr)));
  // For the message to a second run; the lock works without it, for example on a full disk.
  if (::ftruncate(fd_, 0) == 0) (void)!::pwrite(fd_, record.data(), record.size(), 0);
}

}  // namespace echelon
