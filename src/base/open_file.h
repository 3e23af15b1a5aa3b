// Reads files: at positions, or whole as text.
#pragma once

#include <sys/types.h>
#include <time.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

namespace echelon {

// The system does not let this process read the file, for lack of permission or descriptors: its contents are
// unknown.
struct Unreadable : RequestError {
  using RequestError::RequestError;
};

// A regular file that any number of threads may read at positions. It is not mapped: if it were cut short
// meanwhile, a mapping would kill the process (SIGBUS).
class OpenFile {
 public:
  // Never blocks, as opening a named pipe would. RequestError naming the path and the reason: missing, not
  // readable, or no regular file. `what` begins the messages ("--data"); it may be empty.
  explicit OpenFile(const std::string& path, std::string_view what = "");
  ~OpenFile();
  OpenFile(OpenFile&& other) noexcept;
  OpenFile& operator=(OpenFile&& other) noexcept;

  const std::string& path() const { return path_; }
  std::int64_t size() const { return size_; }  // when it was opened
  int descriptor() const { return fd_; }       // -1 once it is closed
  // Whether a read found that somebody has written to the file since it was opened: perhaps other bytes.
  bool was_written_to() const { return was_written_to_; }

  // Reads the bytes from position `at` on. RunError if the file has become shorter or can no longer be read.
  void read(std::int64_t at, std::span<std::byte> out) const;
  // Reads as many of them as there are now.
  std::size_t read_some(std::int64_t at, std::span<std::byte> out) const;

  // Closes the descriptor; from now on each read reopens the file. (A process may hold only about a thousand
  // open files, and data may be more.) A read then throws RunError if another file has taken its place.
  void close();

 private:
  [[noreturn]] void stop(const char* why) const;
  std::string subject() const;

  std::string what_, path_;
  int fd_ = -1;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  std::int64_t size_ = 0;
  timespec modified_{};  // when it was opened
  mutable std::atomic<bool> was_written_to_{false};
};

inline constexpr std::int64_t largest_text = std::int64_t{64} << 20;

// Reads a whole text file. RequestError as above, and if it cannot be read or has more than `most` bytes.
std::string read_text(const std::string& path, std::string_view what = "", std::int64_t most = largest_text);

}  // namespace echelon
