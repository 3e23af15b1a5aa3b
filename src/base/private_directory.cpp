#include "base/private_directory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "base/error.h"

namespace echelon {

namespace fs = std::filesystem;

std::string temporary_place() {
  const char* const named = std::getenv("TMPDIR");
  const std::string place = named != nullptr ? named : "/tmp";
  std::error_code none;
  if (!fs::is_directory(place, none))
    refuse(
        "TMPDIR {}: {}; legal: a directory where files can be made, or no TMPDIR for /tmp",
        place.empty() ? "(empty)" : place,
        place.empty() || !fs::exists(place, none) ? "there is no such directory" : "it is not a directory");
  return place;
}

std::string make_private_directory(const std::string& place, const std::string& name,
                                   const std::string& asked_by) {
  const std::string parent = place.empty() ? temporary_place() : place;
  std::string path = (fs::path(parent) / (name + "-XXXXXX")).string();
  std::error_code error;
  if (!place.empty()) fs::create_directories(parent, error);
  if (!error && ::mkdtemp(path.data()) == nullptr) error = {errno, std::generic_category()};
  if (error)
    refuse(
        "{} {}: no directory for this run can be made there: {}; legal: a directory where files can be "
        "made{}",
        place.empty() ? "TMPDIR" : asked_by, parent, error.message(),
        place.empty() ? ", as the TMPDIR of the environment" : "");
  return path;
}

void PrivateFiles::open(std::string directory) {
  const std::lock_guard lock(mutex_);
  directory_ = std::move(directory);
}

std::string PrivateFiles::directory() const {
  const std::lock_guard lock(mutex_);
  return directory_;
}

std::string PrivateFiles::append(const std::string& file, const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (directory_.empty()) return "there is no directory for it yet";
  const std::string path = (fs::path(directory_) / file).string();
  bool& made = made_[file];
  const int fd = ::open(path.c_str(),
                        O_WRONLY | O_APPEND | O_NOFOLLOW | O_CLOEXEC | (made ? 0 : O_CREAT | O_EXCL), 0600);
  if (fd < 0) return fmt::format("{}: {}", path, std::strerror(errno));
  made = true;
  std::string why;
  for (std::size_t done = 0; done < text.size() && why.empty();) {
    const ssize_t wrote = ::write(fd, text.data() + done, text.size() - done);
    if (wrote > 0) done += static_cast<std::size_t>(wrote);
    if (wrote < 0 && errno != EINTR) why = fmt::format("{}: {}", path, std::strerror(errno));
  }
  if (::close(fd) != 0 && why.empty()) why = fmt::format("{}: {}", path, std::strerror(errno));
  return why;
}

}  // namespace echelon
