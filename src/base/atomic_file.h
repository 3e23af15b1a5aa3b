// Writes files that appear completely or not at all: under a temporary name, synced, then renamed.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace echelon {

// After a power cut there is the old file or the new one, never part of one. Devices and pipes are never
// replaced. Every error is a RunError with the path and the system's reason. On an error, or if the object is
// destroyed before commit(), the temporary file (PATH.tmp-RANDOM) is removed.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void commit();  // writes the buffer, fsync, rename, sync_directory()

 private:
  void write_through(const std::byte* data, std::size_t bytes);
  void discard() noexcept;
  [[noreturn]] void stop(const char* doing);

  std::string path_, temporary_;
  int fd_ = -1;
  std::vector<std::byte> buffer_;
};

void write_file_atomically(const std::string& path, std::string_view text);

// Names that were given or taken away in a directory survive a power cut from here on, where its file system
// can promise that. RunError with the path and the system's reason.
void sync_directory(const std::string& path);

}  // namespace echelon
