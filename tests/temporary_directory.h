// A directory for the files of a test, and whole files as strings.
#pragma once

#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <system_error>

namespace echelon::checks {

// Where tests have their files: in memory where there is room for them, since a checkpoint is flushed to the
// disk many times and a disk may be slow or busy. A container may have less memory than the file system says.
// Programs are started there too. TMPDIR names another place.
inline std::filesystem::path place_of_temporary_directories() {
  constexpr std::uint64_t room = std::uint64_t{2} << 30;
  std::uint64_t limit = 0, used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> limit &&
      std::ifstream("/sys/fs/cgroup/memory.current") >> used && limit < used + 2 * room)
    return std::filesystem::temp_directory_path();
  const char* const memory = "/dev/shm";
  struct statvfs found {};
  const bool fits = ::statvfs(memory, &found) == 0 && ::access(memory, W_OK | X_OK) == 0 &&
                    (found.f_flag & ST_NOEXEC) == 0 && std::uint64_t{found.f_bavail} * found.f_frsize >= room;
  return fits && std::getenv("TMPDIR") == nullptr ? std::filesystem::path(memory)
                                                  : std::filesystem::temp_directory_path();
}

// A directory that goes with the test.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (place_of_temporary_directories() / "echelon-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
    path_ = name;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

inline std::string read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace echelon::checks
