// Files that are there whole or not at all: written under a temporary name, synced, then renamed.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {

// A power cut leaves the old file or the new one, never a part; no device or pipe is replaced. Every error is
// a RunError with the path and the system's reason; the temporary file (PATH.tmp-RANDOM) is removed then, and
// when the object dies before commit().
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void commit();  // write what is buffered, fsync, rename, fsync of the directory

 private:
  void write_through(const std::byte* data, std::size_t bytes);
  void discard() noexcept;
  [[noreturn]] void stop(const char* doing);

  std::string path_, temporary_;
  int fd_ = -1;
  std::vector<std::byte> buffer_;
};

void write_file_atomically(const std::string& path, std::string_view text);

}  // namespace echelon
