// The bytes of a file, read-only.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace echelon {

// Small files are read, larger ones mapped (a process may hold some 65,000 maps; a source tree has more
// files). The mapping sees later changes of the file; a file that is cut short while it is mapped ends the
// process (SIGBUS).
class MappedFile {
 public:
  // Throws RequestError naming the path and the system's reason; `what` begins the message ("--data").
  MappedFile(const std::string& path, const char* what);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  const std::string& path() const { return path_; }
  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  void release() noexcept;

  std::string path_;
  std::vector<std::byte> buffer_;  // of a small file; empty when mapped
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace echelon
