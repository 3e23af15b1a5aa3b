// Files that the user asks the program to write, as with --out FILE.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace echelon {

// Call before the work: RequestError with the flag, the path and the system's reason if nothing can be
// written there. An existing file stays as it is.
void check_output(std::string_view flag, const std::string& path);

// Files with the flags that name them. RequestError if a file to be written is also to be read, or written
// twice: its contents would be lost. Devices and pipes are exempt.
struct NamedFile {
  std::string flag, path;
};
void check_apart(const std::vector<NamedFile>& written, const std::vector<NamedFile>& read);

// Writes a regular file atomically (AtomicFile), following a link. Pipes, terminals and other devices are
// written to directly. RunError with the same text if it can no longer be written.
void write_output(std::string_view flag, const std::string& path, std::string_view text);

}  // namespace echelon
