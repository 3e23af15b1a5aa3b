#include "train/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace echelon {

namespace {

constexpr std::size_t largest_read = 64 * 1024;

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

MappedFile::MappedFile(const std::string& path, const char* what) : path_(path) {
  const auto stop = [&]() { refuse("{} {}: {}", what, path, std::strerror(errno)); };
  // Not blocking: opening a named pipe would wait for its writer for ever.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) stop();
  struct stat status {};
  if (::fstat(file.fd, &status) != 0) stop();
  if (!S_ISREG(status.st_mode)) refuse("{} {}: not a regular file", what, path);
  size_ = static_cast<std::size_t>(status.st_size);
  if (size_ > largest_read) {
    void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.fd, 0);
    if (mapped == MAP_FAILED) stop();
    data_ = static_cast<const std::byte*>(mapped);
    return;
  }
  buffer_.resize(size_);
  std::size_t have = 0;
  while (have < size_) {
    const ssize_t got = ::read(file.fd, buffer_.data() + have, size_ - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) stop();
    if (got == 0) refuse("{} {}: became shorter while it was read", what, path);
    have += static_cast<std::size_t>(got);
  }
  data_ = buffer_.data();
}

MappedFile::~MappedFile() { release(); }

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      buffer_(std::move(other.buffer_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  if (this == &other) return *this;
  release();
  path_ = std::move(other.path_);
  buffer_ = std::move(other.buffer_);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

void MappedFile::release() noexcept {
  if (size_ > largest_read && data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
  data_ = nullptr;
}

}  // namespace echelon
