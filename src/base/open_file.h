// Files as they are read: at positions, or whole as text.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"

namespace echelon {

// The system does not let this process read it, for want of a right or of descriptors, say: what it holds is
// not known.
struct Unreadable : RequestError {
  using RequestError::RequestError;
};

// A regular file that is read at positions, by any number of threads. It maps nothing: somebody may cut it
// short while it is read, which would end a process that has it mapped (SIGBUS).
class OpenFile {
 public:
  // Does not wait, as opening a named pipe would. RequestError naming the path and why: it is missing, may
  // not be read, or is no regular file. `what` begins the messages ("--data"); it may be empty.
  explicit OpenFile(const std::string& path, std::string_view what = "");
  ~OpenFile();
  OpenFile(OpenFile&& other) noexcept;
  OpenFile& operator=(OpenFile&& other) noexcept;

  const std::string& path() const { return path_; }
  std::int64_t size() const { return size_; }  // when it was opened
  int descriptor() const { return fd_; }       // -1 once it is closed

  // The bytes from position `at` on. RunError where the file has become shorter or cannot be read any more.
  void read(std::int64_t at, std::span<std::byte> out) const;
  // As many of them as there are now.
  std::size_t read_some(std::int64_t at, std::span<std::byte> out) const;

  // A process may hold a thousand open files, and data may be more: from now on each read opens it for
  // itself. RunError there where another file has taken its place.
  void close();

 private:
  [[noreturn]] void stop(const char* why) const;
  std::string subject() const;

  std::string what_, path_;
  int fd_ = -1;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  std::int64_t size_ = 0;
};

inline constexpr std::int64_t largest_text = std::int64_t{64} << 20;

// A whole file of text. RequestError as above, also where it cannot be read or has more than `most` bytes.
std::string read_text(const std::string& path, std::string_view what = "", std::int64_t most = largest_text);

}  // namespace echelon
