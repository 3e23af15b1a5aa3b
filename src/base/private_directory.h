// A directory for one run, in a place where everybody may write, that nobody else can read or tamper with.
#pragma once

#include <map>
#include <mutex>
#include <string>

namespace echelon {

// The directory for temporary files: TMPDIR, else /tmp. RequestError if that is no directory.
std::string temporary_place();

// Creates PLACE/NAME-XXXXXX with mode 0700 and returns its path. `place` is created if missing; empty: the
// directory for temporary files. If it cannot, RequestError that begins with `asked_by` (a flag) or names
// TMPDIR.
std::string make_private_directory(const std::string& place, const std::string& name,
                                   const std::string& asked_by);

// Files that this process writes in such a directory. Any thread may call.
class PrivateFiles {
 public:
  // Before this call nothing is written.
  void open(std::string directory);
  std::string directory() const;
  // Appends to a file. The first call creates it (mode 0600) and does not write to a file or link of that
  // name that already exists. Returns the error, or empty if all is written.
  std::string append(const std::string& file, const std::string& text);

 private:
  mutable std::mutex mutex_;
  std::string directory_;
  std::map<std::string, bool> made_;
};

}  // namespace echelon
