// What the name of a file to be written promises.
#pragma once

#include <string>
#include <string_view>

namespace echelon {

// A kind of file that a command writes.
struct FileKind {
  std::string_view what;  // as "a page"
  std::string ending;     // of names: ".html"
  // The flag of the same command that writes what the ending of a wrong name stands for, and that ending.
  std::string_view other_flag{}, other_ending{};
};

// RequestError if the name ends as files of another kind do. Any other end, and none, is the user's own.
void check_kind(std::string_view flag, const std::string& path, const FileKind& kind);

}  // namespace echelon
