#include "base/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/atomic_file.h"
#include "base/error.h"

namespace echelon {
namespace {

// Files that are ours already, as --out /dev/stdout > FILE: another one under their name would leave them
// behind.
bool is_standard_stream(const struct stat& status) {
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat ours {};
    if (::fstat(fd, &ours) == 0 && ours.st_dev == status.st_dev && ours.st_ino == status.st_ino) return true;
  }
  return false;
}

bool is_written_to(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && (!S_ISREG(status.st_mode) || is_standard_stream(status));
}

// Where a link leads, so that the link stays one.
std::string target_of(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_symlink(path, error)) return path;
  const std::filesystem::path target = std::filesystem::canonical(path, error);
  return error ? path : target.string();
}

[[noreturn]] void fail_output(std::string_view flag, const std::string& path, const std::string& why) {
  fail("{} {}: cannot be written: {}", flag, path, why);
}

void write_to(std::string_view flag, const std::string& path, std::string_view text) {
  std::fflush(stdout);  // what was printed before comes before it
  const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY | O_APPEND);
  if (fd < 0) fail_output(flag, path, std::strerror(errno));
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) break;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  const int error = errno;
  ::close(fd);
  if (!text.empty()) fail_output(flag, path, std::strerror(error));
}

// Begun under a temporary name.
AtomicFile begin(std::string_view flag, const std::string& path) {
  const std::string target = target_of(path);
  struct stat status {};
  if (::stat(target.c_str(), &status) == 0 && ::access(target.c_str(), W_OK) != 0)
    fail_output(flag, path, std::strerror(errno));
  std::string directory = std::filesystem::path(target).parent_path().string();
  if (directory.empty()) directory = ".";
  // That a plain file has no permission to be searched is not what is wrong with it.
  if (::stat(directory.c_str(), &status) == 0 && !S_ISDIR(status.st_mode))
    fail_output(flag, path, std::strerror(ENOTDIR));
  if (::access(directory.c_str(), W_OK | X_OK) != 0) fail_output(flag, path, std::strerror(errno));
  try {
    return AtomicFile(target);
  } catch (const RunError& error) {
    fail_output(flag, path, error.what());
  }
}

}  // namespace

void check_output(std::string_view flag, const std::string& path) {
  try {
    struct stat status {};
    if (::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode))
      fail_output(flag, path, std::strerror(EISDIR));
    if (!is_written_to(path)) (void)begin(flag, path);
  } catch (const RunError& error) {
    throw RequestError(error.what());
  }
}

void check_apart(const std::vector<NamedFile>& written, const std::vector<NamedFile>& read) {
  namespace fs = std::filesystem;
  std::error_code error;
  const auto is_same = [&](const std::string& a, const std::string& b) {
    if (fs::exists(a, error) && fs::exists(b, error)) return fs::equivalent(a, b, error);
    // Of a path none of which exists it would take the relative one for canonical.
    const auto canonical = [&](const std::string& path) {
      return fs::weakly_canonical(fs::absolute(path, error), error);
    };
    const fs::path first = canonical(a), second = canonical(b);
    return !first.empty() && first == second;
  };
  for (std::size_t i = 0; i < written.size(); ++i) {
    const NamedFile& one = written[i];
    if (is_written_to(one.path)) continue;
    std::vector<NamedFile> others = read;
    others.insert(others.end(), written.begin(), written.begin() + static_cast<std::ptrdiff_t>(i));
    for (const NamedFile& other : others)
      if (is_same(one.path, other.path))
        refuse("{} {}: is the file that {} names; give it one of its own", one.flag, one.path, other.flag);
  }
}

void write_output(std::string_view flag, const std::string& path, std::string_view text) {
  if (is_written_to(path)) return write_to(flag, path, text);
  AtomicFile file = begin(flag, path);
  file.write(text.data(), text.size());
  file.commit();
}

}  // namespace echelon
