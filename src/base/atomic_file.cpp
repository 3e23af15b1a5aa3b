#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/error.h"
#include "base/random_name.h"

namespace echelon {

namespace {

constexpr std::size_t buffer_bytes = 256 * 1024;
constexpr std::size_t largest_write = std::size_t{1} << 30;  // Linux writes at most 2 GiB in one call

// A device, a pipe or a socket: what is written goes there, and another file in its place would end that.
bool is_special(mode_t mode) { return !S_ISREG(mode) && !S_ISLNK(mode) && !S_ISDIR(mode); }

}  // namespace

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)), temporary_(fmt::format("{}.tmp-{}", path_, random_name())) {
  buffer_.reserve(buffer_bytes);
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("cannot create {}: {}", temporary_, std::strerror(errno));
}

AtomicFile::~AtomicFile() { discard(); }

void AtomicFile::write(const void* data, std::size_t bytes) {
  const auto* first = static_cast<const std::byte*>(data);
  if (buffer_.size() + bytes <= buffer_bytes) {
    buffer_.insert(buffer_.end(), first, first + bytes);
    return;
  }
  write_through(buffer_.data(), buffer_.size());
  buffer_.clear();
  write_through(first, bytes);
}

void AtomicFile::write_through(const std::byte* data, std::size_t bytes) {
  check(fd_ >= 0, "write to an atomic file that has ended");
  while (bytes > 0) {
    const ssize_t written = ::write(fd_, data, std::min(bytes, largest_write));
    if (written < 0 && errno == EINTR) continue;
    if (written == 0) errno = ENOSPC;  // a regular file takes nothing for no other reason
    if (written <= 0) stop("write");
    data += written;
    bytes -= static_cast<std::size_t>(written);
  }
}

void AtomicFile::commit() {
  write_through(buffer_.data(), buffer_.size());
  buffer_.clear();
  if (::fsync(fd_) != 0) stop("sync");
  const int closing = std::exchange(fd_, -1);
  if (::close(closing) != 0) {
    const int reason = errno;
    ::unlink(temporary_.c_str());
    errno = reason;
    stop("close");
  }
  if (struct stat there{}; ::lstat(path_.c_str(), &there) == 0 && is_special(there.st_mode)) {
    ::unlink(temporary_.c_str());
    fail("cannot replace {}: it is not a regular file", path_);
  }
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int reason = errno;
    ::unlink(temporary_.c_str());
    errno = reason;
    stop("rename the finished file to");
  }
  const std::string directory = std::filesystem::path(path_).parent_path().string();
  sync_directory(directory.empty() ? "." : directory);
}

void AtomicFile::discard() noexcept {
  if (fd_ < 0) return;
  ::close(std::exchange(fd_, -1));
  ::unlink(temporary_.c_str());
}

void AtomicFile::stop(const char* doing) {
  const std::string reason = std::strerror(errno);
  discard();
  fail("cannot {} {}: {}", doing, path_, reason);
}

void write_file_atomically(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text.data(), text.size());
  file.commit();
}

void sync_directory(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = fd >= 0 && (::fsync(fd) == 0 || errno == EINVAL);  // EINVAL: a file system without this
  const int reason = errno;
  if (fd >= 0) ::close(fd);
  if (!synced) fail("{}: cannot be flushed to disk: {}", path, std::strerror(reason));
}

}  // namespace echelon
