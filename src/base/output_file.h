// Files that the program is asked to write, such as --out FILE.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace echelon {

// Before the work: RequestError with the flag, the path and the system's reason where nothing can be written
// there. What is there stays as it is.
void check_output(std::string_view flag, const std::string& path);

// Each under the flag that names it. RequestError where one that is written is one that is read, or another
// that is written: what is there would be lost. Of devices and pipes nothing is.
struct NamedFile {
  std::string flag, path;
};
void check_apart(const std::vector<NamedFile>& written, const std::vector<NamedFile>& read);

// A regular file is there whole or as it was (AtomicFile); a link leads to it. A pipe, a terminal or another
// device is written to. RunError with the same words where that cannot be done, any more.
void write_output(std::string_view flag, const std::string& path, std::string_view text);

}  // namespace echelon
