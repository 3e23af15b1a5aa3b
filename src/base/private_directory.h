// A directory for one run that nobody else can look into or lead astray, in a place where everybody may
// write.
#pragma once

#include <map>
#include <mutex>
#include <string>

namespace echelon {

// Where temporary files go: TMPDIR, else /tmp. RequestError where that is no directory.
std::string temporary_place();

// Makes PLACE/NAME-XXXXXX, mode 0700, and returns its path. `place` is made where it is missing; empty: the
// temporary one. RequestError that begins with `asked_by` (a flag) or names TMPDIR when it cannot be made.
std::string make_private_directory(const std::string& place, const std::string& name,
                                   const std::string& asked_by);

// The files that this process writes in such a directory. Any thread.
class PrivateFiles {
 public:
  // Nothing is written before.
  void open(std::string directory);
  std::string directory() const;
  // To the end of a file, which is made (mode 0600) by the first call: a file or link of that name that is
  // there already is not written to. Empty when all is written, else why it is not.
  std::string append(const std::string& file, const std::string& text);

 private:
  mutable std::mutex mutex_;
  std::string directory_;
  std::map<std::string, bool> made_;
};

}  // namespace echelon
