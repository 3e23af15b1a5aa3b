#include "model/scratch_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/private_directory.h"
#include "base/units.h"

namespace echelon {
namespace {

// An open file that has lost its name already; -1 and errno when there is none.
int open_nameless(const std::string& directory) {
  std::string path = (std::filesystem::path(scratch_place(directory)) / "echelon-scratch-XXXXXX").string();
  const int fd = ::mkostemp(path.data(), O_CLOEXEC);
  if (fd >= 0) ::unlink(path.c_str());
  return fd;
}

}  // namespace

std::string scratch_place(const std::string& directory) {
  return directory.empty() ? temporary_place() : directory;
}

ScratchFile::ScratchFile(const std::string& directory, std::size_t bytes, Device device, const char* what_for)
    : bytes_(std::max<std::size_t>(bytes, 1)) {
  if (device == Device::none) return;
  const int fd = open_nameless(directory);
  int error = fd < 0 ? errno : ::posix_fallocate(fd, 0, static_cast<off_t>(bytes_));
  if (error == 0) {
    void* mapped = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
      error = errno;
    else
      data_ = static_cast<std::byte*>(mapped);
  }
  if (fd >= 0) ::close(fd);
  if (error != 0)
    fail("{}: a file of {} for {} cannot be made: {}", scratch_place(directory),
         format_bytes(static_cast<double>(bytes)), what_for, std::strerror(error));
}

ScratchFile::~ScratchFile() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

void check_scratch_directory(const std::string& directory) {
  const int fd = open_nameless(directory);
  if (fd < 0)
    refuse("--offload-dir {}: no file can be made there: {}", scratch_place(directory), std::strerror(errno));
  ::close(fd);
}

}  // namespace echelon
