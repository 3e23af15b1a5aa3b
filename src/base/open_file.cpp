#include "base/open_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/units.h"

namespace echelon {

namespace {

// Closes a descriptor that is needed no longer than a block.
struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

bool says_that_it_is_not_there(int reason) {
  return reason == ENOENT || reason == ENOTDIR || reason == ELOOP || reason == ENXIO;
}

int open_at_once(const std::string& path) {
  return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
}

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a named pipe";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

}  // namespace

OpenFile::OpenFile(const std::string& path, std::string_view what) : what_(what), path_(path) {
  Descriptor file{open_at_once(path)};
  struct stat status {};
  if (file.fd < 0 || ::fstat(file.fd, &status) != 0) {
    const int reason = errno;
    const std::string sentence = fmt::format("{}: cannot be read: {}", subject(), std::strerror(reason));
    if (says_that_it_is_not_there(reason)) throw RequestError(sentence);
    throw Unreadable(sentence);
  }
  if (!S_ISREG(status.st_mode))
    refuse("{}: cannot be read: it is {}, not a regular file", subject(), kind_of(status.st_mode));
  device_ = status.st_dev;
  inode_ = status.st_ino;
  size_ = status.st_size;
  modified_ = status.st_mtim;
  fd_ = std::exchange(file.fd, -1);
}

OpenFile::~OpenFile() { close(); }

OpenFile::OpenFile(OpenFile&& other) noexcept
    : what_(std::move(other.what_)),
      path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      device_(other.device_),
      inode_(other.inode_),
      size_(other.size_),
      modified_(other.modified_),
      was_written_to_(other.was_written_to_.load()) {}

OpenFile& OpenFile::operator=(OpenFile&& other) noexcept {
  if (this == &other) return *this;
  close();
  what_ = std::move(other.what_);
  path_ = std::move(other.path_);
  fd_ = std::exchange(other.fd_, -1);
  device_ = other.device_;
  inode_ = other.inode_;
  size_ = other.size_;
  modified_ = other.modified_;
  was_written_to_ = other.was_written_to_.load();
  return *this;
}

void OpenFile::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

std::string OpenFile::subject() const { return what_.empty() ? path_ : what_ + " " + path_; }

void OpenFile::stop(const char* why) const { fail("{}: cannot be read: {}", subject(), why); }

std::size_t OpenFile::read_some(std::int64_t at, std::span<std::byte> out) const {
  const Descriptor again{fd_ >= 0 ? -1 : open_at_once(path_)};
  const int fd = fd_ >= 0 ? fd_ : again.fd;
  if (fd < 0) stop(std::strerror(errno));
  struct stat status {};
  if (fd_ < 0) {
    if (::fstat(fd, &status) != 0) stop(std::strerror(errno));
    if (status.st_dev != device_ || status.st_ino != inode_) stop("another file has taken its place");
  }
  std::size_t have = 0;
  while (have < out.size()) {
    const ssize_t got = ::pread(fd, out.data() + have, out.size() - have,
                                static_cast<off_t>(at + static_cast<std::int64_t>(have)));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) stop(std::strerror(errno));
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  // After the read: what was written during it is seen too.
  if (::fstat(fd, &status) == 0 &&
      (status.st_mtim.tv_sec != modified_.tv_sec || status.st_mtim.tv_nsec != modified_.tv_nsec))
    was_written_to_ = true;
  return have;
}

void OpenFile::read(std::int64_t at, std::span<std::byte> out) const {
  const std::size_t have = read_some(at, out);
  if (have < out.size())
    fail("{}: has become shorter while it was read: it ends {} byte {}, and had {} when it was opened",
         subject(), have > 0 ? "at" : "before", at + static_cast<std::int64_t>(have), size_);
}

std::string read_text(const std::string& path, std::string_view what, std::int64_t most) {
  const OpenFile file(path, what);
  const std::string subject = what.empty() ? path : std::string(what) + " " + path;
  const auto too_large = [&] {
    refuse("{}: has more than {}, the most that is read of such a file", subject,
           format_bytes(static_cast<double>(most)));
  };
  if (file.size() > most) too_large();
  // Until it ends, whatever its size says: files of the system have none.
  std::string text;
  try {
    for (std::size_t have = 0, room = static_cast<std::size_t>(file.size()) + 1;; room = have + 65536) {
      text.resize(room);
      const auto rest = std::as_writable_bytes(std::span(text).subspan(have));
      const std::size_t got = file.read_some(static_cast<std::int64_t>(have), rest);
      have += got;
      if (static_cast<std::int64_t>(have) > most) too_large();
      if (got == rest.size()) continue;
      text.resize(have);
      return text;
    }
  } catch (const RunError& error) {  // what cannot be read at all is a wrong request
    refuse("{}", error.what());
  }
}

}  // namespace echelon
